"""What the tests of repacking share: models, costs, and lengths of every kind."""

import numpy as np
from hypothesis import strategies as st

from parallel.repacking.calibration import load
from parallel.repacking.config import RepackingConfig
from parallel.repacking.cost import CostModel, Memory
from parallel.repacking.planner import Planner
from parallel.repacking.shape import ModelShape

SHAPE = ModelShape(
    hidden=4096, head_dim=128, q_heads=64, kv_heads=8, full_layers=11, sparse_layers=33,
    expert_hidden=1280, experts_per_token=9, dense_layers=1, dense_hidden=11264, vocab=128000,
    recompute=True,
)  # fmt: skip
COST = CostModel(SHAPE, load("h200"))


def cost(**changes):
    return CostModel(SHAPE, load("h200"), **changes)


TIGHT = cost(memory=Memory(capacity=100e9, static=50e9))
"""About 80,000 rows a rank."""


def planner(num_ranks=32, max_parent=16, of=COST, **config):
    """Parents span nodes wherever that makes sense: one token a rank is enough for the widest."""
    config = {"rows_per_rank": 1, **config}
    return Planner(of, num_ranks, max_parent, RepackingConfig(**config))


def random_lengths(rng, n, typical=6000, spread=1.3):
    return np.minimum(np.exp(rng.normal(np.log(typical), spread, n)).astype(np.int64) + 1, 600_000)


LENGTHS = st.one_of(
    st.lists(st.integers(1, 300_000), max_size=24),
    st.lists(st.integers(1, 40), max_size=24),
    st.lists(st.just(1), max_size=40),
    st.tuples(st.integers(100_000, 400_000), st.lists(st.integers(1, 900), max_size=20)).map(
        lambda giant: [giant[0], *giant[1]]
    ),
    st.tuples(st.integers(1, 20), st.integers(1, 60_000)).map(lambda equal: [equal[1]] * equal[0]),
)
"""Zero samples, one, one giant, all of length one, equal ones, fewer tokens than ranks."""
