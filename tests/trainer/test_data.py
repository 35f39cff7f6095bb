import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainer.data
from recipes.task import DataError
from tests.ranks import run_ranks
from trainer.data import (
    MicroBatches,
    check_enough,
    eval_batches,
    fingerprint,
    shuffled,
    training_steps,
)
from trainer.plan import Plan
from trainer.run import _check_same


def plan(data_parallel, micro, accumulation):
    return Plan(
        world_size=data_parallel,
        mesh={"shard": data_parallel},
        data_parallel=data_parallel,
        micro_batch_size=micro,
        accumulation=accumulation,
        eval_batch_size=micro,
        steps=1,
    )


@given(st.integers(1, 700), st.text(max_size=3))
def test_a_shuffle_is_a_permutation(length, key):
    assert sorted(shuffled(n, length, key) for n in range(length)) == list(range(length))


def test_a_shuffle_moves_and_its_key_matters():
    a = [shuffled(n, 1000, "0/0") for n in range(1000)]
    b = [shuffled(n, 1000, "0/1") for n in range(1000)]
    assert sum(x == n for n, x in enumerate(a)) < 10
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 10
    mean_step = sum(abs(x - y) for x, y in zip(a, a[1:], strict=False)) / 999
    assert 280 < mean_step < 390  # a third of the length, as for a random order


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 50), st.integers(0, 99)
)
def test_ranks_share_each_step_without_gap_or_overlap(ranks, micro, accumulation, length, start):
    """Any split of a batch reads the same samples as one process with one large batch."""
    size, steps = ranks * micro * accumulation, 3
    alone = MicroBatches(length, plan(1, size, 1), start, steps, 0, seed=4)
    split = [
        MicroBatches(length, plan(ranks, micro, accumulation), start, steps, rank, seed=4)
        for rank in range(ranks)
    ]
    for step in range(steps):
        together = [
            index
            for m in range(step * accumulation, (step + 1) * accumulation)
            for rank in range(ranks)
            for index in split[rank][m]
        ]
        assert together == alone[step]
    assert len(split[0]) == steps * accumulation
    with pytest.raises(IndexError):
        split[0][steps * accumulation]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 100))
def test_every_epoch_has_every_sample_once(length, batch, cut):
    """Resuming at any sample number goes on with exactly the rest."""
    whole = MicroBatches(length, plan(1, 1, 1), 0, 3 * length, 0, seed=1)
    numbers = [whole[n][0] for n in range(3 * length)]
    for epoch in range(3):
        assert sorted(numbers[epoch * length : (epoch + 1) * length]) == list(range(length))
    cut = min(cut, 3 * length - 1)
    rest = MicroBatches(length, plan(1, 1, 1), cut, 3 * length - cut, 0, seed=1)
    assert [rest[n][0] for n in range(len(rest))] == numbers[cut:]


class Letters:
    """Samples that are as good as their number, and a task that joins them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

    def collate(self, samples):
        return {"samples": torch.tensor(samples)}

    def count(self, batch):
        return len(batch["samples"])

    def flops(self, batch):
        return 0.0


RANKS = st.sampled_from([(1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 1, 4)])
"""Ways to split a batch of four: ranks, micro-batch, accumulation."""


def samples_of(length, split, start, steps):
    """What all ranks together train on, step by step."""
    ranks, micro, accumulation = split
    parts = [
        MicroBatches(length, plan(ranks, micro, accumulation), start, steps, rank, seed=3)
        for rank in range(ranks)
    ]
    return [
        [
            i
            for m in range(s * accumulation, (s + 1) * accumulation)
            for part in parts
            for i in part[m]
        ]
        for s in range(steps)
    ]


@given(st.integers(1, 30), st.lists(st.tuples(RANKS, st.integers(1, 9)), min_size=1, max_size=4))
def test_a_run_that_is_resumed_on_other_ranks_sees_what_one_run_would(length, stretches):
    """Cut anywhere, at an epoch's end, too: nothing is lost and nothing comes twice."""
    position, seen = 0, []
    for split, steps in stretches:
        seen += samples_of(length, split, position, steps)
        position += 4 * steps
    assert seen == samples_of(length, (1, 4, 1), 0, position // 4)
    flat = [index for step in seen for index in step]
    for epoch in range(len(flat) // length):
        assert sorted(flat[epoch * length : (epoch + 1) * length]) == list(range(length))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_workers_reads_the_same(workers, monkeypatch):
    """Resumed in the middle of an epoch and exactly at its end."""
    monkeypatch.setattr(trainer.data, "all_sum", lambda values: values)  # one rank at a time
    samples = Letters(10)
    for start, rank in ((4, 1), (20, 0)):
        made = plan(2, 1, 2)
        steps = training_steps(
            samples, samples, made, start=start, steps=3, rank=rank, seed=3, workers=workers,
            device=torch.device("cpu"),
        )  # fmt: skip
        seen = [[m["samples"].tolist() for m in step.micros] for step in steps]
        indices = list(MicroBatches(10, made, start, 3, rank, seed=3))
        assert seen == [indices[at : at + 2] for at in range(0, len(indices), 2)]


def test_five_rows_on_four_ranks():
    """A step of four trains on four, and one of eight is refused before any rank starts."""
    check_enough(Letters(5), 4)
    with pytest.raises(
        DataError, match="5 samples do not fill one batch of 8: set trainer.batch_size"
    ):
        check_enough(Letters(5), 8)
    seen = []
    for rank in range(4):
        batches = eval_batches(
            Letters(5), Letters(5), plan(4, 1, 1), limit=None, rank=rank, workers=0,
            device=torch.device("cpu"),
        )  # fmt: skip
        parts = [(batch["samples"].tolist(), counts) for batch, counts in batches]
        assert len(parts) == 2  # as many on every rank
        seen += [index for indices, counts in parts if counts for index in indices]
    assert sorted(seen) == list(range(5))


class Named(Letters):
    def fingerprint(self):
        return "mine"


def test_samples_say_what_they_are_or_how_many():
    assert fingerprint(Letters(5)) == "5 samples"
    assert fingerprint(Named(5)) == "mine"


def found_on_a_rank(names):
    try:
        _check_same(names[torch.distributed.get_rank()])
    except DataError as error:
        return str(error)
    return None


def test_ranks_that_found_different_data_of_one_length_say_so():
    assert run_ranks(2, found_on_a_rank, ["same", "same"]) == [None, None]
    errors = run_ranks(2, found_on_a_rank, ["one", "other"])
    assert all(error.startswith("ranks found different training data") for error in errors)
