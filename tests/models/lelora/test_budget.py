from hypothesis import given
from hypothesis import strategies as st

from models.lelora.adapter import KINDS, Adapter
from models.lelora.budget import Shape, cost, fill, project, scaled, total_cost

ALLOWED = [0, 2, 4, 8, 16]
matrices = st.lists(
    st.tuples(
        st.integers(1, 50), st.integers(1, 50), st.sampled_from(ALLOWED),
        st.lists(st.floats(-5, 0), min_size=5, max_size=5),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@given(st.sampled_from(sorted(KINDS)), matrices, st.integers(0, 3000))
def test_a_projection_never_costs_more_than_it_may(kind, given_matrices, budget):
    shapes = [Shape(m, n) for m, n, _, _ in given_matrices]
    widths = [width for _, _, width, _ in given_matrices]
    preferences = [list(p) for _, _, _, p in given_matrices]
    found = project(kind, shapes, widths, preferences, ALLOWED, budget)
    assert total_cost(kind, shapes, found) <= budget
    assert all(narrower <= width for narrower, width in zip(found, widths, strict=True))
    assert project(kind, shapes, found, preferences, ALLOWED, budget) == found
    if total_cost(kind, shapes, widths) <= budget:
        assert found == widths


@given(st.sampled_from(sorted(KINDS)), matrices, st.integers(0, 3000))
def test_what_is_filled_spends_what_there_is_and_no_more(kind, given_matrices, budget):
    shapes = [Shape(m, n) for m, n, _, _ in given_matrices]
    preferences = [list(p) for _, _, _, p in given_matrices]
    start = [0] * len(shapes)
    found = fill(kind, shapes, start, preferences, ALLOWED, budget)
    assert total_cost(kind, shapes, found) <= budget
    assert all(w <= shape.components for w, shape in zip(found, shapes, strict=True))
    for n, (width, shape) in enumerate(zip(found, shapes, strict=True)):
        wider = [w for w in ALLOWED if w > width]
        if wider and wider[0] <= shape.components:
            more = [*found[:n], wider[0], *found[n + 1 :]]
            assert total_cost(kind, shapes, more) > budget


@given(matrices, st.integers(0, 3000))
def test_a_smaller_budget_keeps_proportions(given_matrices, budget):
    shapes = [Shape(m, n) for m, n, _, _ in given_matrices]
    widths = [width for _, _, width, _ in given_matrices]
    found = scaled("dir_ab", shapes, widths, ALLOWED, budget)
    least = [min(w, 2) for w in widths]
    assert total_cost("dir_ab", shapes, found) <= budget or found == least
    for a, b in zip(widths, found, strict=True):
        assert b <= a
        assert (b == 0) == (a == 0)
    pairs = sorted(zip(widths, found, strict=True))
    assert [b for _, b in pairs] == sorted(found), "what was wider is not narrower now"
    if total_cost("dir_ab", shapes, widths) <= budget:
        assert found == widths


def test_the_least_preferred_parameters_go_first():
    shapes = [Shape(10, 10), Shape(10, 10)]
    strong, weak = [-9.0, -9.0, -9.0, -9.0, 0.0], [-1.0, -1.0, -1.0, -1.0, -0.9]
    assert project("dir_ab", shapes, [16, 16], [strong, weak], ALLOWED, 20 * 24) == [16, 8]
    assert project("dir_ab", shapes, [16, 16], [weak, strong], ALLOWED, 20 * 24) == [8, 16]


def test_costs_are_the_parameters_of_full_adapters():
    for kind in KINDS:
        adapter = Adapter(kind, 7, 9, 5, 0)
        assert cost(kind, Shape(7, 9), 5) == sum(p.numel() for p in adapter.parameters())
