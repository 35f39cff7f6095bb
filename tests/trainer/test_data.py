import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import MicroBatches, shuffled
from trainer.plan import Plan


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
