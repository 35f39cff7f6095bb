"""Every token of a batch on one rank, with the label and position that it has in the whole batch."""

import pickle

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.sequence import SequenceRanks
from recipes.text.packing import IGNORED, Sequence_S, collate
from recipes.text.sharing import own_part

END = 256
BATCHES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)
"""Lengths of the pieces of each sequence."""


def sequence(number, pieces):
    rng, S = np.random.default_rng(number), sum(pieces)
    labels = np.where(rng.random(S) < 0.3, IGNORED, rng.integers(0, 256, S))
    positions = np.concatenate([np.arange(n) for n in pieces])
    starts = [0, *np.cumsum(pieces)[:-1].tolist()]
    return Sequence_S(rng.integers(0, 256, S), labels, positions, starts, 0, number % 3)


@settings(max_examples=60)
@given(BATCHES, st.integers(1, 9))
def test_parts_of_all_ranks_are_the_batch(batch, P):
    whole = collate([sequence(number, pieces) for number, pieces in enumerate(batch)], END)
    parts = [own_part(whole, SequenceRanks(P, rank), END) for rank in range(P)]
    T = whole["tokens_BS"].numel()
    more = max(P - T, 0)
    shape = whole["tokens_BS"].shape
    for name, padding in (
        ("tokens_BS", torch.full((more,), END)), ("labels_BS", torch.full((more,), IGNORED)),
        ("positions_BS", torch.arange(more)), ("sources_BS", torch.zeros(more)),
    ):  # fmt: skip
        got = torch.cat([part[name][0] for part in parts])
        expected = torch.cat([whole[name].expand(shape).flatten(), padding])
        assert torch.equal(got, expected.long()), name
    for name in ("count", "padding", "pairs"):
        assert np.isclose(
            sum(part[name] for part in parts), whole[name] + more * (name == "padding")
        )
    for part in parts:
        assert part["layout"].rows_per_rank.min() >= 1
        assert part["cu_seq_lens"].tolist() == part["layout"].offsets.tolist()
        assert part["max_length"] == np.diff(part["layout"].offsets).max()


def test_data_workers_get_the_ranks_without_their_group():
    ranks = pickle.loads(pickle.dumps(SequenceRanks(4, 2, dist.group.WORLD, "halo")))
    assert ranks == SequenceRanks(4, 2, None, "halo")
