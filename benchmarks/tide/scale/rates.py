"""What the model of a step knows of a machine; every figure with its source, from a JSON file.

processors   kernels of a model, copies of layouts, casts and sums share the multiprocessors
nccl         NCCL's kernels take a share of them, and a way over the links
wire         copy engines and network cards take the links only
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SOURCES = ("measured", "derived", "given")
ON_PROCESSORS = ("layer", "copy", "sum")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second, seconds and shares."""

    copies: float
    """Bytes read and written by copies between layouts."""
    casts: float
    """By torch's casts of shards, before it gathers."""
    own_casts: float
    """By TIDE's casts."""
    sums: float
    """By TIDE's sums."""
    nccl_gather: float
    """Bus bandwidth of two GPUs: bytes of the output times (ranks - 1) / ranks, over the time."""
    nccl_scatter: float
    nccl_gather_8: float
    """The same of more GPUs of a node, which use more of its links."""
    nccl_scatter_8: float
    engines: float
    """What copy engines put into the memory of peers, in all."""
    engine_gather: float
    """Bus bandwidth of NCCL's gather by copy engines, into symmetric memory."""
    card: float
    """What one network card sends."""
    cards: float
    """How many a GPU has."""
    nccl_share: float
    """Of the multiprocessors that NCCL's kernels take away from others."""
    wire_share: float
    """By how much transfers slow down kernels, through memory."""
    start: float
    """Of any collective, in seconds."""

    def speeds(self, kinds: Sequence[str]) -> list[float]:
        """See `fluid.Speeds`."""
        sharing = sum(kind in ON_PROCESSORS for kind in kinds)
        free = 1.0 - self.nccl_share * ("nccl" in kinds) - self.wire_share * ("wire" in kinds)
        moving = sum(kind in ("nccl", "wire") for kind in kinds)
        return [free / sharing if kind in ON_PROCESSORS else 1.0 / moving for kind in kinds]


def load(path: Path) -> Rates:
    """Read a file. Raises `ValueError` for one that lacks a figure or its source."""
    entries: dict[str, Any] = json.loads(path.read_text())["rates"]
    known = {field.name for field in fields(Rates)}
    if known ^ entries.keys():
        raise ValueError(f"{path}: missing or unknown rates {sorted(known ^ entries.keys())}")
    for name, entry in entries.items():
        if entry["source"] not in SOURCES:
            raise ValueError(f"{path}: the source of {name} is none of {', '.join(SOURCES)}")
    return Rates(**{name: float(entry["value"]) for name, entry in entries.items()})
