import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.experts.layout import check_division, experts_mesh, side_to_shard
from parallel.mesh import build_mesh
from tests.ranks import run_ranks

SHAPES = [(8, 32, 24), (8, 24, 16)]
sizes = st.integers(1, 24)


@given(sizes, sizes, sizes, st.integers(1, 24))
def test_an_error_names_all_sizes_that_would_do(size, node_size, weight_ranks, experts):
    shapes = [(experts, *shape[1:]) for shape in SHAPES]
    try:
        check_division(size, shapes, node_size, weight_ranks)
    except ValueError as error:
        possible = [int(n) for n in str(error).rsplit(" to ", 1)[1].split(" or ")]
        assert size not in possible
        for n in possible:
            check_division(n, shapes, node_size, weight_ranks)
    else:
        assert experts % size == node_size % size == weight_ranks % size == 0
        dims = [side_to_shard(shape, weight_ranks // size) for shape in shapes]
        if size > 1:
            for shape, dim in zip(shapes, dims, strict=True):
                assert shape[dim] % (weight_ranks // size) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, SHAPES, 8, 8), "=3 must divide the 8 experts .* set parallel.experts to 1 or 2 or 4 or 8"),
        ((8, SHAPES, 4, 16), "the 4 ranks of a node .* set parallel.experts to 1 or 2 or 4"),
        ((2, SHAPES, 2, 14), "and the 14 that share .* so many .* set parallel.experts to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_says_what_to_set(arguments, words):
    with pytest.raises(ValueError, match=words):
        check_division(*arguments)


def check_mesh():
    flat = experts_mesh(build_mesh({"shard": 2, "sequence": 2}, "cpu"), 2)
    deep = experts_mesh(build_mesh({"replicate": 2, "shard": 2}, "cpu"), 2)
    return [(mesh.mesh_dim_names, mesh.mesh.tolist()) for mesh in (flat, deep)]


def test_blocks_are_consecutive_ranks():
    assert run_ranks(4, check_mesh)[0] == [
        (("shard", "experts"), [[0, 1], [2, 3]]),
        (("replicate", "shard", "experts"), [[[0, 1]], [[2, 3]]]),
    ]
