"""FSDP2 on TIDE trains as FSDP2 on torch's collectives does, bit for bit: on two ranks as it is, on more
with sums in the order that TIDE documents."""

import pytest

from tests.parallel.tide.training import Case, both, train
from tests.ranks import run_ranks

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
TWO_RANKS = {
    "plain": Case(),
    "uneven": Case(sizes={"hidden_size": 10, "intermediate_size": 5}),
    "fewer rows than ranks": Case(sizes={"hidden_size": 4, "intermediate_size": 1}),
    "bf16": Case(parallel=BF16),
    "bf16, summed in bf16": Case(parallel={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
    "fp16": Case(parallel={"param_dtype": "float16", "reduce_dtype": "float32"}),
    "kept gathered": Case(parallel={"reshard_after_forward": False}),
    "untied": Case(sizes={"tie_embeddings": False, "vocab_size": 500}),
    "accumulation": Case(accumulation=3),
    "accumulation into shards": Case(parallel={"reduce_every_micro_batch": True}, accumulation=3),
    "bf16 accumulation": Case(parallel=BF16, accumulation=2),
    "recomputed": Case(parallel={"activation_checkpointing": "block"}),
    "evaluation and state between": Case(evaluate=True),
    "frozen": Case(frozen=True),
    "prefetch of one": Case(parallel={"prefetch": 1}),
    "prefetch of two": Case(parallel={"prefetch": 2}),
    "prefetch of three": Case(parallel={"prefetch": 3}),
    "more slots": Case(tide={"slots": 3}),
    "slot reuse": Case(tide={"slot_reuse": True}),
    "slot reuse, bf16, accumulation": Case(
        parallel=BF16, tide={"slot_reuse": True}, accumulation=2
    ),
    "columns": Case("toy", placement=1),
    "columns, slot reuse": Case("toy", placement=1, tide={"slot_reuse": True}),
    "vectors of one element": Case("toy"),
    "unused on every rank": Case("toy", unused=True, accumulation=2),
    "a block left out": Case("toy", skip=True),
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
    "cast ahead, slow": Case("toy", parallel=BF16, slow=True, steps=5, tide={"cast_ahead": True}),
    "cast ahead, two nodes of one": Case(
        "toy", node_size=1, parallel=BF16, tide={"cast_ahead": True}
    ),
    "two nodes of one": Case(node_size=1, tide={"pacing": 1}),
    "two nodes of one, bf16, slot reuse": Case(
        "toy", node_size=1, parallel=BF16, tide={"slot_reuse": True}
    ),
}


@pytest.mark.parametrize("case", list(TWO_RANKS))
def test_two_ranks_equal_torch(case):
    run_ranks(2, both, TWO_RANKS[case], "stock")


MORE_RANKS = {
    "3": (3, Case()),
    "3, bf16, slot reuse": (3, Case(parallel=BF16, tide={"slot_reuse": True})),
    "3 nodes of 1": (3, Case("toy", node_size=1)),
    "4, summed in bf16": (
        4, Case(parallel={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"})
    ),
    "4, columns": (4, Case("toy", placement=1)),
    "4, HSDP": (4, Case(parallel={"replicate": 2, **BF16})),
    "4, HSDP, summed in bf16": (
        4, Case(parallel={"replicate": 2, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"})
    ),
    "4, another divisor": (4, Case("toy", factor=3.0)),
    "4, resharded to 2": (4, Case("toy", reshard=2, accumulation=2)),
    "4, tensor parallel": (4, Case("toy", tensor_parallel=2)),
    "4, 2 nodes of 2": (4, Case(node_size=2, parallel=BF16, steps=5)),
    "4, 2 nodes of 2, slot reuse, accumulation": (
        4, Case("toy", node_size=2, tide={"slot_reuse": True}, accumulation=2)
    ),
    "4, 2 nodes of 2, columns, cast ahead": (
        4, Case("toy", node_size=2, placement=1, tide={"cast_ahead": True})
    ),
    "4, resharded to 2, cast ahead": (
        4, Case("toy", reshard=2, accumulation=2, tide={"cast_ahead": True})
    ),
    "4, 2 nodes of 2, columns": (4, Case("toy", node_size=2, placement=1)),
    "4, 2 nodes of 2, resharded to 2": (4, Case("toy", node_size=2, reshard=2)),
    "6, 3 nodes of 2": (6, Case("toy", node_size=2, steps=5)),
    "8": (8, Case(steps=5)),
    "8, 4 nodes of 2": (8, Case("toy", node_size=2, steps=5, tide={"pacing": 2})),
    "8, 4 nodes of 2, slot reuse": (
        8, Case("toy", node_size=2, steps=5, parallel=BF16, tide={"slot_reuse": True})
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(MORE_RANKS))
def test_more_ranks_equal_sums_in_the_documented_order(case):
    world_size, what = MORE_RANKS[case]
    everywhere = run_ranks(world_size, both, what, "ordered")
    for _, weights in everywhere:
        assert all((weights[name] == everywhere[0][1][name]).all() for name in weights)


def test_more_ranks_agree_with_torchs_own_sums_to_rounding():
    """Which the order of sums does change."""
    stock = run_ranks(4, train, Case(), "stock")
    tide = run_ranks(4, train, Case(), "tide")
    for (figures, _), (expected, _) in zip(tide, stock, strict=True):
        assert figures == pytest.approx(expected, rel=1e-4)
