"""What was measured on one GPU and on two, as groups of parameters with the time of their kernels."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tide.scale.step import Group

RESULTS = Path(__file__).resolve().parents[2] / "results"
ALONE = RESULTS / "tide-compute-1xH200.json"
"""Of `benchmarks.tide.compute`."""
KINDS = {"stock": "stock", "symmetric": "stock, symmetric memory", "tide": "tide"}
"""Ours, and what the result files call them."""
OTHERS = ("nccl", "chunk_cat", "split_with_sizes", "multi_tensor_apply", "_add_up", "_cast_kernel")
"""Kernels that are not the model's own: collectives, layouts, casts, norm and optimizer."""
OPTIMIZER = "multi_tensor_apply"
OWN_COPIES = "Memcpy DtoD (Device -> Device)"
"""On torch's collectives, only the model makes these."""


@dataclass(frozen=True)
class Shape:
    """Elements of a model's groups, and of those that a token is multiplied with."""

    title: str
    file: str
    layers: int
    """Of the whole model; files have fewer."""
    block: int
    active: int
    """Elements of a block that a token is multiplied with."""
    first: int
    last: int
    recomputed: bool = False


def llama(
    title: str, file: str, layers: int, hidden: int, inner: int, kv: int, vocab: int, again: bool
) -> Shape:
    """A Llama by its sizes; `kv`: width of all keys."""
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    return Shape(title, file, layers, block, block, vocab * hidden, vocab * hidden, again)


def qwen3_moe() -> Shape:
    """Qwen3-30B-A3B: 128 experts, 8 for a token."""
    hidden, heads, kv, expert, vocab = 2048, 4096, 512, 768, 151936
    attention = 2 * hidden * heads + 2 * hidden * kv + hidden * 128
    each = 3 * hidden * expert
    block, active = attention + 128 * each, attention + 8 * each
    words = vocab * hidden
    return Shape("Qwen3-30B-A3B", "tide-qwen3_30b_a3b-2xH200", 48, block, active, words, words)


def wan22() -> Shape:
    """One of the two transformers of Wan2.2-A14B: attention to itself and to words, a feed-forward."""
    hidden, inner = 5120, 13824
    block = 8 * hidden * hidden + 2 * hidden * inner
    return Shape("Wan2.2-A14B", "tide-wan22-2xH200", 40, block, block, 0, 0)


SHAPES = (
    llama("Llama 3.1 70B", "tide-2xH200", 80, 8192, 28672, 1024, 32000, False),
    llama("Llama 3.1 8B", "tide-8b-2xH200", 32, 4096, 14336, 1024, 128256, True),
    qwen3_moe(),
    wan22(),
)


@dataclass(frozen=True)
class Measured:
    """One length of one file."""

    shape: Shape
    tokens: int
    layers: int
    kernels: float
    """Seconds of both passes on one GPU, unsharded. Where that was not measured: of the model's own
    kernels and copies in a step, the least disturbed ones, which are those beside TIDE."""
    passes: dict[str, float]
    """Seconds of both passes, by kind."""
    optimizer: float
    """Seconds of norm and optimizer."""


def measurements(shape: Shape) -> list[Measured]:
    """All lengths of the file of a shape."""
    result: dict[str, Any] = json.loads((RESULTS / f"{shape.file}.json").read_text())
    layers = result["config"].get("changes", {}).get("num_layers", shape.layers)
    found, alone = [], passes_alone(shape.file)
    for tokens in result["config"]["lengths"]:
        rows = [row for row in result["rows"] if row["length"] == tokens]
        passes = {}
        for kind, name in KINDS.items():
            seconds = [s for row in rows if row["kind"] == name for s in row["passes"]]
            if seconds:
                passes[kind] = statistics.median(seconds)
        traces = [row["kernels"] for row in rows if row["kind"] == "tide"]
        copied = statistics.median(
            row["copies"].get(OWN_COPIES, [0, 0.0])[1] / 1000
            for row in rows
            if row["kind"] == "stock"
        )
        found.append(
            Measured(
                shape, tokens, layers,
                alone.get(
                    tokens,
                    copied + statistics.median(_seconds(trace, own=True) for trace in traces),
                ),
                passes,
                statistics.median(_seconds(trace, own=False) for trace in traces),
            )
        )  # fmt: skip
    return found


def passes_alone(file: str) -> dict[int, float]:
    """Median seconds of both passes of this file's workload on one GPU, by tokens."""
    if not ALONE.exists():
        return {}
    rows = json.loads(ALONE.read_text())["rows"]
    return {row["length"]: statistics.median(row["passes"]) for row in rows if row["file"] == file}


def _seconds(trace: dict[str, list[float]], own: bool) -> float:
    """Of the model's kernels, or of the optimizer's."""
    return sum(
        ms / 1000
        for name, (ms, _) in trace.items()
        if (not any(other in name for other in OTHERS) if own else OPTIMIZER in name)
    )


def groups_of(measured: Measured, layers: int | None = None) -> list[Group]:
    """With as many layers as were measured, or `layers`; kernels in proportion to their products."""
    shape = measured.shape
    blocks = [("block", shape.active, shape.block, False)] * measured.layers
    parts = [("first", 0, shape.first, True), *blocks, ("last", shape.last, shape.last, True)]
    again = [2 + shape.recomputed if name == "block" else 2 for name, *_ in parts]
    work = sum(active * (1 + back) for (_, active, _, _), back in zip(parts, again, strict=True))
    unit = measured.kernels / work
    one = [
        Group(name, numel, unit * active, unit * active * back, stays)
        for (name, active, numel, stays), back in zip(parts, again, strict=True)
        if numel
    ]
    block = next(group for group in one if group.name == "block")
    count = measured.layers if layers is None else layers
    stacked = [
        Group(f"block {n}", block.numel, block.forward, block.backward) for n in range(count)
    ]
    before = [group for group in one if group.name == "first"]
    return [*before, *stacked, *(group for group in one if group.name == "last")]
