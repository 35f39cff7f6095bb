"""Bytes that a rank sends in a step, by collective: arithmetic on the sizes of FSDP2's groups.

What rows of tokens take to experts and back has been counted by a pass on meta.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from collectives.config import CollectivesConfig
from parallel.mesh import ParallelConfig, weight_shards
from trainer.dry_run.memory import Group, is_large


@dataclass(frozen=True)
class Wire:
    """Bytes of one rank and step, by collective. Between nodes the rank's share of its node's."""

    gather_forward: float
    gather_backward: float
    reduce_scatter: float
    all_reduce: float
    """Between copies of the weights."""
    across: float
    """The part of all of them that leaves the node."""
    rows: float = 0.0
    """To experts on other ranks and back, inside the node."""
    tables: float = 0.0
    """Rows of tables that ranks divide, and their gradients."""

    @property
    def total(self) -> float:
        """What collectives of weights and gradients take."""
        weights = self.gather_forward + self.gather_backward + self.reduce_scatter
        return weights + self.all_reduce + self.tables

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def bytes_sent(
    groups: Sequence[Group],
    mesh: dict[str, int],
    node_size: int,
    parallel: ParallelConfig,
    collectives: CollectivesConfig,
    accumulation: int,
    rows: float = 0.0,
    tables: float = 0.0,
) -> Wire:
    """What a step sends, `rows` to experts and of `tables` in each micro-batch.

    Every byte of a weight goes to every other rank that has it once, and enters a node once.
    """
    world = weight_shards(mesh) * mesh.get("replicate", 1)
    away = max(world - node_size, 0) / max(world - 1, 1)
    tables *= accumulation
    total = Wire(0, 0, 0, 0, tables * away, rows * accumulation, tables)
    for experts in sorted({group.experts for group in groups}):
        alike = [group for group in groups if group.experts == experts]
        shards, near = weight_shards(mesh) // experts, max(node_size // experts, 1)
        copies = mesh.get("replicate", 1)
        total += _of_one(alike, shards, copies, near, parallel, collectives, accumulation)
    return total


def _of_one(
    groups: Sequence[Group],
    shards: int,
    copies: int,
    node_size: int,
    parallel: ParallelConfig,
    collectives: CollectivesConfig,
    accumulation: int,
) -> Wire:
    """Of the groups that are sharded over the same `shards` ranks, `node_size` of them on a node."""
    size, reduced = (
        int(getattr(torch, t).itemsize) for t in (parallel.param_dtype, parallel.reduce_dtype)
    )
    others = (shards - 1) / shards
    whole = sum(g.numel for g in groups) * size * others
    again = sum(g.numel for g in groups if g.reshards) * size * others
    in_place = {
        g.name for g in groups if collectives.name == "tide" and is_large(g, collectives, size)
    }
    scatter = others * sum(g.trained * (size if g.name in in_place else reduced) for g in groups)
    reductions = accumulation if parallel.reduce_every_micro_batch else 1
    trained = sum(g.trained for g in groups) / shards * reduced
    nodes = max(shards // node_size, 1)
    # Of what a node's ranks get, (nodes - 1) / nodes comes from others, once for all of its ranks.
    away = (nodes - 1) / nodes / min(node_size, shards) / others if nodes > 1 else 0.0
    sharded = accumulation * (whole + again) + reductions * scatter
    all_reduce = 2 * (copies - 1) / copies * trained * reductions
    return Wire(
        gather_forward=accumulation * whole,
        gather_backward=accumulation * again,
        reduce_scatter=reductions * scatter,
        all_reduce=all_reduce,
        across=sharded * away + (all_reduce if shards * copies > node_size else 0.0),
    )
