"""FSDP2 on TIDE trains as FSDP2 on torch's collectives does, bit for bit: on two ranks as it is, on more
with sums in the order that TIDE documents."""

import pytest

from tests.parallel.tide.training import Case, each, train
from tests.ranks import run_ranks

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
TWO_RANKS = {
    "shapes": {
        "plain": Case(),
        "uneven": Case(sizes={"hidden_size": 10, "intermediate_size": 5}),
        "fewer rows than ranks": Case(sizes={"hidden_size": 4, "intermediate_size": 1}),
        "untied": Case(sizes={"tie_embeddings": False, "vocab_size": 500}),
        "frozen": Case(frozen=True),
        "columns": Case("toy", placement=1),
        "vectors of one element": Case("toy"),
        "unused on every rank": Case("toy", unused=True, accumulation=2),
        "a block left out": Case("toy", skip=True),
    },
    "types and accumulation": {
        "bf16": Case(parallel=BF16),
        "bf16, summed in bf16": Case(
            parallel={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
        ),
        "fp16": Case(parallel={"param_dtype": "float16", "reduce_dtype": "float32"}),
        "accumulation": Case(accumulation=3),
        "accumulation into shards": Case(
            parallel={"reduce_every_micro_batch": True}, accumulation=3
        ),
        "bf16 accumulation": Case(parallel=BF16, accumulation=2),
    },
    "order of calls": {
        "kept gathered": Case(parallel={"reshard_after_forward": False}),
        "recomputed": Case(parallel={"activation_checkpointing": "block"}),
        "evaluation and state between": Case(evaluate=True),
        "prefetch of one": Case(parallel={"prefetch": 1}),
        "prefetch of two": Case(parallel={"prefetch": 2}),
        "prefetch of three": Case(parallel={"prefetch": 3}),
    },
    "slots": {
        "more slots": Case(tide={"slots": 3}),
        "slot reuse": Case(tide={"slot_reuse": True}),
        "slot reuse, bf16, accumulation": Case(
            parallel=BF16, tide={"slot_reuse": True}, accumulation=2
        ),
        "columns, slot reuse": Case("toy", placement=1, tide={"slot_reuse": True}),
    },
    "casts": {
        "cast in turn": Case("toy", parallel=BF16, tide={"cast_ahead": False}),
        "cast ahead": Case(tide={"cast_ahead": True}),
        "cast ahead, bf16, slot reuse, accumulation": Case(
            parallel=BF16, tide={"cast_ahead": True, "slot_reuse": True}, accumulation=2
        ),
        "cast ahead, columns": Case("toy", placement=1, parallel=BF16, tide={"cast_ahead": True}),
        "cast ahead, a block left out": Case("toy", skip=True, tide={"cast_ahead": True}),
        "cast ahead, recomputed": Case(
            parallel={"activation_checkpointing": "block", "prefetch": 2}, tide={"cast_ahead": True}
        ),
        "cast ahead, evaluation and state between": Case(evaluate=True, tide={"cast_ahead": True}),
        "cast ahead, slow": Case("toy", parallel=BF16, slow=True, tide={"cast_ahead": True}),
    },
}
"""Kinds of cases; those of one kind run one after the other in the same processes."""


@pytest.mark.parametrize("kind", list(TWO_RANKS))
def test_two_ranks_equal_torch(kind):
    run_ranks(2, each, TWO_RANKS[kind], "stock")


MORE_RANKS = {
    3: {
        "plain": Case(),
        "bf16, slot reuse": Case(parallel=BF16, tide={"slot_reuse": True}),
    },
    4: {
        "summed in bf16": Case(parallel={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
        "columns": Case("toy", placement=1),
        "HSDP": Case(parallel={"replicate": 2, **BF16}),
        "HSDP, summed in bf16": Case(
            parallel={"replicate": 2, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
        ),
        "another divisor": Case("toy", factor=3.0),
        "resharded to 2": Case("toy", reshard=2, accumulation=2),
        "resharded to 2, cast ahead": Case(
            "toy", reshard=2, accumulation=2, tide={"cast_ahead": True}
        ),
        "tensor parallel": Case("toy", tensor_parallel=2),
    },
    8: {"plain": Case()},
}


@pytest.mark.parametrize("world_size", list(MORE_RANKS))
def test_more_ranks_equal_sums_in_the_documented_order(world_size):
    check_more_ranks(world_size, MORE_RANKS[world_size])


def check_more_ranks(world_size, cases):
    everywhere = run_ranks(world_size, each, cases, "ordered")
    for name in cases:
        _, first = everywhere[0][name]
        for found in everywhere:
            _, weights = found[name]
            assert all((weights[key] == first[key]).all() for key in first), name


TWO_NODES = {
    "one each, cast ahead": Case("toy", node_size=1, parallel=BF16, tide={"cast_ahead": True}),
    "one each": Case(node_size=1, tide={"pacing": 1}),
    "one each, bf16, slot reuse": Case(
        "toy", node_size=1, parallel=BF16, tide={"slot_reuse": True}
    ),
}
MORE_NODES = {
    "3 of 1": (3, Case("toy", node_size=1)),
    "2 of 2": (4, Case(node_size=2, parallel=BF16)),
    "2 of 2, slot reuse, accumulation": (
        4, Case("toy", node_size=2, tide={"slot_reuse": True}, accumulation=2)
    ),
    "2 of 2, columns": (4, Case("toy", node_size=2, placement=1)),
    "2 of 2, columns, cast ahead": (
        4, Case("toy", node_size=2, placement=1, tide={"cast_ahead": True})
    ),
    "2 of 2, resharded to 2": (4, Case("toy", node_size=2, reshard=2)),
    "3 of 2": (6, Case("toy", node_size=2)),
    "4 of 2": (8, Case("toy", node_size=2, tide={"pacing": 2})),
    "4 of 2, slot reuse": (
        8, Case("toy", node_size=2, parallel=BF16, tide={"slot_reuse": True})
    ),
}  # fmt: skip
"""Over a network, each in processes of its own: an earlier one's messages would be in the way."""


@pytest.mark.parametrize("case", list(TWO_NODES))
def test_two_nodes_equal_torch(case):
    run_ranks(2, each, {case: TWO_NODES[case]}, "stock")


@pytest.mark.parametrize("case", list(MORE_NODES))
def test_more_nodes_equal_sums_in_the_documented_order(case):
    world_size, what = MORE_NODES[case]
    check_more_ranks(world_size, {case: what})


def test_more_ranks_agree_with_torchs_own_sums_to_rounding():
    """Which the order of sums does change."""
    stock = run_ranks(4, train, Case(), "stock")
    tide = run_ranks(4, train, Case(), "tide")
    for (figures, _), (expected, _) in zip(tide, stock, strict=True):
        assert figures == pytest.approx(expected, rel=1e-4)
