"""Rows that a plan spreads over ranks, each read once, with the label and position that they have."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.mesh import ParallelConfig, SequenceConfig, mesh_shape, widest_parent
from parallel.repacking.config import RepackingConfig
from parallel.repacking.ranks import PlannedRanks, fixed, one_parent
from parallel.repacking.traffic import Traffic, traffic
from parallel.sequence import SequenceRanks
from recipes.repacking import model_shape
from recipes.text.joined import join
from recipes.text.mixture import Interleaved, Mixture
from recipes.text.packing import Sequences
from recipes.text.planned import Unread, planned_batch
from recipes.text.store import TokenFile
from tests.recipes.repacked import END, SLOW_LINKS, Mix, model_of
from tests.recipes.test_hybrid import task

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def sources(lengths, packing, long_documents, length=24):
    files, made = [], []
    for number, part in enumerate((lengths, lengths[::-1] * 2)):
        rng, starts = np.random.default_rng(number), np.cumsum([0, *part])
        tokens = rng.integers(0, 256, int(starts[-1]))
        files.append(TokenFile(tokens, starts, len(tokens), learnt=rng.random(len(tokens)) > 0.25))
        made.append(Sequences(files[-1], length, END, number, packing, long_documents))
    return made


def planned(ranks):
    hybrid = model_of(Mix([], "solver", (6, 2)))
    return ranks.planner(model_shape(hybrid.shape, ranks))


@settings(max_examples=30, deadline=None)
@given(
    LENGTHS, st.sampled_from(["stream", "whole", "none"]), st.sampled_from(["split", "truncate"]),
    st.sampled_from([(4, 2), (8, 4), (3, None)]), st.booleans(),
)  # fmt: skip
def test_all_ranks_together_have_what_one_process_reads(lengths, packing, long, ranks, mixed):
    size, node_size = ranks
    made = sources(lengths, packing, long)
    data = Mixture(made, [len(s) + n for n, s in enumerate(made)]) if mixed else Interleaved(made)
    unread = Unread(data)
    assert len(unread) == len(data)
    assert unread.fingerprint() == data.fingerprint()
    chosen = range(0, len(data), 2)
    whole = join([data[i] for i in chosen])
    bounds = list(pairwise(whole["cu_seq_lens"].tolist()))
    config = RepackingConfig(rows_per_rank=1, calibration=SLOW_LINKS)
    seen = torch.zeros(len(whole["tokens_T"]), dtype=torch.long)
    for rank in range(size):
        if node_size is None:
            of = fixed(SequenceRanks(size, rank))
            plan_for = lambda lengths: one_parent(lengths, size)  # noqa: E731
        else:
            of = PlannedRanks(
                size=size, rank=rank, node_size=node_size, max_parent=size, config=config
            )
            plan_for = planned(of).plan
        batch = planned_batch([unread[i] for i in chosen], plan_for, of)
        parent, child = of.shards(batch["plan"])
        assert batch["cu_seq_lens"].tolist() == parent.layout.offsets.tolist()
        assert batch["child_cu_seq_lens"].tolist() == child.layout.offsets.tolist()
        table = parent.layout.segments(parent.rank)
        ids = parent.layout.samples[table.sample]
        at = [
            np.arange(bounds[i][0] + b, bounds[i][0] + e)
            for i, b, e in zip(ids, table.begin, table.end, strict=True)
        ]
        rows = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *at]))
        for name in ("tokens_T", "labels_T", "sources_T"):
            assert torch.equal(batch[name], whole[name][rows]), name
        starts = torch.tensor([begin for begin, _ in bounds])
        first = starts[torch.searchsorted(starts, rows, right=True) - 1]
        assert torch.equal(batch["positions_T"], rows - first)
        seen[rows] += 1
    assert (seen == 1).all()


def test_data_workers_get_no_groups():
    ranks = PlannedRanks(size=4, rank=3, groups={(0, 4): object()})
    assert pickle.loads(pickle.dumps(ranks)) == PlannedRanks(size=4, rank=3)


def test_bytes_by_hand():
    """Two nodes of one rank: 3 rows and 2; 4 query heads, 2 key/value heads, one of them each."""
    hybrid = task(model={"num_heads": 4, "num_kv_heads": 2, "num_layers": 4})
    plan = one_parent([5], 2)
    shape = model_shape(hybrid.shape, PlannedRanks(size=2, dtype_bytes=4))
    # rank 0 has 2 rows, rank 1 has 3; site 1: 2 + 1 + 1 heads a row, site 2: rows of the other, 2 heads
    a_layer = (2 * 4 + 3 * 4 + 3 * 2 + 2 * 2) * 8 * 4
    assert traffic(plan, shape) == Traffic(4 * a_layer, 0)
    across = type(plan)(2, 1, plan.ids, plan.lengths, plan.parents)
    assert traffic(across, shape) == Traffic(0, 4 * a_layer)


def test_the_mesh_has_all_ranks_together():
    config = ParallelConfig(sequence=SequenceConfig(max_parent=16))
    assert mesh_shape(config, 24) == {"shard": 1, "sequence": 24}
    assert [widest_parent(16, n) for n in (24, 32, 6, 1)] == [8, 16, 2, 1]
    for axis in ("replicate", "shard"):
        with pytest.raises(ValueError, match=f"set parallel.{axis}=1"):
            mesh_shape(ParallelConfig(sequence=config.sequence, **{axis: 2}), 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SequenceConfig(max_parent=12), "set parallel.sequence.max_parent=8"),
        (lambda: SequenceConfig(max_parent=4, size=2), "set parallel.sequence.size=1, or"),
        (lambda: PlannedRanks(size=2, config=RepackingConfig(search_seconds=1)), "search_seconds=null"),
        (lambda: task().share_sequences(SequenceRanks(2, sliding_window="halo")), "=exchange"),
        (lambda: task().plan_samples(PlannedRanks(size=4, node_size=3)), "set parallel.node_size to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_step_that_no_rank_can_hold_is_refused():
    config = RepackingConfig(max_rows=10, rows_per_rank=1)
    hybrid = planned(PlannedRanks(size=4, node_size=2, config=config))
    assert max(hybrid.plan([39]).layout(hybrid.plan([39]).parents[0]).rows_per_rank) == 10
    with pytest.raises(ValueError, match="set trainer.micro_batch_size lower"):
        hybrid.plan([41])
