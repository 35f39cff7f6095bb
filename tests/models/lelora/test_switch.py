"""A switch changes what trains and nothing else; the moments of Adam go with their rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.lelora import fold
from models.lelora.adapter import KINDS, factors, update_norms
from tests.models.lelora.toys import ALL_KINDS, Adapted, Single, llama, tokens, whole


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_logits_stay_at_the_start_and_at_every_switch(kind):
    model, ids = llama(), tokens()
    with torch.no_grad():
        base = model(input_ids=ids).logits
    # `sigma` has a few numbers to train: they need more of a push to be worth folding
    adapted = Adapted(model, kind, lr=0.3 if kind == "sigma" else 2e-2)
    identities = {name: id(p) for name, p in model.named_parameters()}
    assert torch.equal(adapted.logits(ids), base)
    adapted.switch_all([0, 1, 5])
    assert (adapted.logits(ids) - base).abs().max() < 1e-5
    moved = base
    active = 3
    for components, scale in (([1, 7], 1.0), ([1, 7, 3, 2], 0.5), ([], 1.0), ([0, 1, 4], 1.6)):
        adapted.train(4, ids)
        before = adapted.logits(ids)
        assert ((before - moved).abs().max() > 1e-4) == (active > 0), "rows train, and only rows"
        adapted.switch_all(components, scale)
        active = len(components)
        moved = adapted.logits(ids)
        assert (moved - before).abs().max() < 1e-5
    assert {name: id(p) for name, p in model.named_parameters()} == identities


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_trained_tensor_of_every_layer_moves(kind):
    adapted = Adapted(llama(), kind)
    adapted.switch_all([0, 1, 2])
    before = {n: p.clone() for n, p in adapted.model.named_parameters() if p.requires_grad}
    adapted.train(2, tokens())
    for name, parameter in adapted.model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(parameter, before[name]), name
        elif name in before:
            raise AssertionError(name)


actions = st.lists(
    st.tuples(st.sets(st.integers(0, 9), max_size=4), st.sampled_from([0.625, 1.0, 1.6])),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=25)
@given(st.sampled_from(ALL_KINDS), actions)
def test_any_sequence_of_switches_keeps_the_update(kind, sequence):
    single = Single(kind)
    for components, scale in sequence:
        before = single.update().detach()
        done = single.switch(sorted(components), scale)
        assert not done.refused
        after = single.update().detach()
        torch.testing.assert_close(after, before, atol=2e-6, rtol=1e-5)
        left, right = factors(kind, whole(single.adapter))
        torch.testing.assert_close((left @ right).float(), after, atol=2e-6, rtol=1e-5)
        active = single.adapter.components_R
        assert set(active[active >= 0].tolist()) == components
        assert torch.equal(single.adapter.gate_R != 0, active >= 0)
        single.train(3)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_that_stay_keep_their_moments_and_new_ones_have_none(kind):
    single = Single(kind)
    single.switch([0, 1, 2])
    single.train(10)
    rows = {c: r for r, c in enumerate(single.adapter.components_R.tolist())}
    name = KINDS[kind][0][-1]
    before = {
        k: v.clone() for k, v in single.optimizer.state[getattr(single.adapter, name)].items()
    }
    values = getattr(single.adapter, name).detach().clone()
    single.switch([1, 8])
    entry = single.optimizer.state[getattr(single.adapter, name)]
    axis = name.rpartition("_")[2].index("R")
    now = {c: r for r, c in enumerate(single.adapter.components_R.tolist())}
    assert now[1] == rows[1]

    def row(tensor, number):
        return tensor.movedim(axis, 0)[number]

    if kind != "core":  # its rows have an entry for each other row
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(row(entry[key], now[1]), row(before[key], now[1]))
        assert torch.equal(row(getattr(single.adapter, name), now[1]), row(values, now[1]))
    assert (row(entry["exp_avg"], now[8]) == 0).all()
    assert (row(entry["exp_avg_sq"], now[8]) == 0).all()
    assert single.adapter.age_R.tolist()[now[8]] == 0
    assert single.adapter.age_R.tolist()[now[1]] == 10


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("then", [[1, 8, 9], [7, 8, 9]], ids=["some stay", "all are new"])
def test_new_rows_take_no_leap(kind, then):
    """Zeroed moments under an old step count would move a row by up to 6.6 learning rates."""

    def largest_move(single):
        before = {n: p.detach().clone() for n, p in single.adapter.named_parameters()}
        single.train(1)
        return max(float((p.detach() - before[n]).abs().max())
                   for n, p in single.adapter.named_parameters())  # fmt: skip

    fresh = Single(kind)
    fresh.switch(then)
    usual = max(largest_move(fresh) for _ in range(30))
    single = Single(kind)
    single.switch([0, 1, 2])
    single.train(300)
    single.switch(then)
    assert max(largest_move(single) for _ in range(30)) < 1.2 * usual


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_that_arrive_are_moved_as_if_the_tensor_had_begun_with_them(kind):
    """Against an optimizer made anew, whose count is that of the rows."""
    old, new = Single(kind), Single(kind)
    old.switch([0, 1, 2])
    old.train(7)
    for single in (old, new):
        single.goal = single.weight + 0.2 * single.goal.roll(1, 0)
    new.adapter.load_state_dict(old.adapter.state_dict())
    for single in (old, new):
        single.switch([7, 8, 9])
    for _ in range(5):
        old.train(1)
        new.train(1)
    torch.testing.assert_close(old.update(), new.update(), atol=1e-6, rtol=1e-4)


def test_the_scale_changes_what_is_learnt_next_and_not_what_was():
    """dir_ab at another scale is the same function, and Adam's step of B counts as much more."""
    plain, scaled = Single("dir_ab"), Single("dir_ab")
    for single in (plain, scaled):
        single.switch([0, 1, 2])
        single.train(5)
    scaled.switch([0, 1, 2], 1.6)
    torch.testing.assert_close(scaled.update(), plain.update())
    before = plain.update().detach()
    plain.train(1)
    scaled.train(1)
    ratio = (scaled.update() - before).norm() / (plain.update() - before).norm()
    assert 1.3 < ratio < 1.7


def test_a_switch_that_would_lose_too_much_is_refused():
    single = Single("dir_ab", fold_rows=2)
    single.switch([0, 1])
    single.train(20)
    assert single.switch([2, 3]).discarded == 0
    single.train(20)
    before = {n: t.clone() for n, t in whole(single.adapter).items()}
    done = single.switch([4, 5])
    assert done.refused
    assert done.discarded > 1e-3
    assert all(torch.equal(t, before[n]) for n, t in whole(single.adapter).items())
    done = single.switch([4, 5], tolerance=1.0)
    assert not done.refused
    assert done.discarded > 1e-3


def test_left_learns_in_as_many_directions_as_it_has_touched():
    single = Single("left", fold_rows=8)
    for components in ([0, 1], [1, 2], [0, 2], [3, 0]):
        single.switch(components)
        single.train(10)
    left, right = factors("left", whole(single.adapter))
    assert torch.linalg.matrix_rank(left @ right, rtol=1e-9) == 4
    assert fold.compress(left, right, 99).rank == 4


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 99))
def test_compression_is_the_best_there_is(rank, r, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(s, generator=generator).double() for s in ((9, r), (r, 7)))
    found = fold.compress(left, right, rank)
    values = torch.linalg.svdvals(left @ right)
    error = torch.linalg.matrix_norm(found.left_MC @ found.right_CN - left @ right)
    torch.testing.assert_close(error, values[rank:].square().sum().sqrt(), atol=1e-9, rtol=1e-6)
    assert abs(found.discarded - float(error / values.norm())) < 1e-8


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_norms_of_several_adapters_at_once_are_those_of_their_updates(kind):
    every = [Single(kind, seed=seed) for seed in range(3)]
    for single, first in zip(every, ([0, 1], [2], []), strict=True):
        single.switch(first, 1.25)
        single.train(5)
        single.switch([0, 3], 0.8)
        single.train(5)
    wholes = [whole(single.adapter) for single in every]
    norms = update_norms(kind, {n: torch.stack([of[n] for of in wholes]) for n in wholes[0]})
    expected = torch.stack([single.update().detach().double().norm() for single in every])
    torch.testing.assert_close(norms, expected, atol=1e-6, rtol=1e-5)
