"""Memory of a rank at the worst moment of a step, from shapes and a probe of one micro-batch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from collectives.config import CollectivesConfig
from collectives.tide.layout import cut, make_layout
from collectives.tide.reduce_scatter import DEPTH
from parallel.blocks import find_blocks, large_leaves
from parallel.experts.layout import side_to_shard
from parallel.mesh import ParallelConfig
from parallel.tide.suitable import TENSORS
from trainer.dry_run.probe import Moment, Probe

FP32 = 4
MOMENTS = 2
"""Of AdamW, in fp32."""


@dataclass(frozen=True)
class Group:
    """What FSDP2 gathers and reduces together."""

    name: str
    parameters: Sequence[nn.Parameter]
    reshards: bool
    """Whether it is given back after the forward pass."""
    experts: int = 1
    """Ranks that divide these experts; parameters are one rank's part."""

    @property
    def numel(self) -> int:
        """Elements that a rank has when they are gathered."""
        return sum(p.numel() for p in self.parameters)

    @property
    def trained(self) -> int:
        """Of them, those that have gradients."""
        return sum(p.numel() for p in self.parameters if p.requires_grad)


def groups_of(
    model: nn.Module,
    config: ParallelConfig,
    experts: Sequence[nn.Module] = (),
    tables: Sequence[nn.Module] = (),
) -> list[Group]:
    """The groups that `parallel.fsdp.parallelize` makes; `experts` have been divided.

    `tables` are in none.
    """
    blocks = find_blocks(model)
    leaves = [leaf for leaf in large_leaves(model, blocks) if leaf[1] not in tables]
    groups = [Group(name, list(leaf.parameters()), False) for name, leaf in leaves]
    keep = config.reshard_after_forward is False
    for number, module in enumerate(experts):
        name = f"experts {number}"
        groups.append(Group(name, list(module.parameters()), not keep, config.experts))
    taken = {id(p) for group in groups for p in group.parameters}
    for name, block in blocks:
        own = [p for p in block.parameters() if id(p) not in taken]
        groups.append(Group(name, own, not keep))
    taken = {id(p) for group in groups for p in group.parameters}
    taken |= {id(p) for table in tables for p in table.parameters()}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [*groups, Group("the rest", rest, False)] if rest else groups


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, at the moment of a step that needs most."""

    weights: int
    optimizer: int
    gradients: int
    """Sharded ones that are there at that moment, and whole ones that accumulate."""
    activations: int
    """Whatever the passes keep and make, gradients that are not reduced yet included."""
    gathered: int
    """Layers in use or on their way: slots of TIDE, buffers of torch's collectives."""
    staging: int
    """What reductions go through."""
    cast: int
    """Shards that TIDE has cast ahead."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def estimate(
    groups: Sequence[Group],
    probe: Probe,
    shards: int,
    parallel: ParallelConfig,
    collectives: CollectivesConfig,
    accumulation: int,
    rows: int = 0,
) -> Memory:
    """The worst moment of a step; `shards` ranks share a copy of the weights.

    `collectives` must say what is little and whether shards are cast ahead; `rows` are elements of
    tables that ranks divide by rows, of one rank. Their gradient is among the activations, and in later
    micro-batches that of the earlier ones is there, too.
    """
    shard = {group.name: _shard_numel(group, shards) for group in groups}
    trained = sum(_shard_numel(group, shards, trained=True) for group in groups)
    whole = sum(g.trained for g in groups)
    buffers = _buffers(groups, shard, shards, parallel, collectives)

    def at(moment: Moment) -> Memory:
        done = moment.reduced / max(whole, 1)
        if accumulation == 1:
            gradients = FP32 * trained * done
        elif parallel.reduce_every_micro_batch:
            gradients = FP32 * trained
        else:  # whole ones until the last micro-batch reduces them
            gradients = FP32 * trained * done + _size(parallel.reduce_dtype) * whole * (1 - done)
        return Memory(
            weights=FP32 * (sum(shard.values()) + rows),
            optimizer=MOMENTS * FP32 * (trained + rows),
            gradients=int(gradients) + FP32 * rows * (accumulation > 1),
            activations=moment.activations,
            gathered=buffers.gathered,
            staging=buffers.staging + (buffers.reducing if moment.reduced else 0),
            cast=buffers.cast,
        )

    return max((at(moment) for moment in probe.moments), key=lambda memory: memory.total)


@dataclass
class Buffers:
    """Bytes that collectives hold beside the shards."""

    gathered: int = 0
    staging: int = 0
    reducing: int = 0
    """Only while gradients are reduced."""
    cast: int = 0


def _buffers(
    groups: Sequence[Group],
    shard: dict[str, int],
    shards: int,
    parallel: ParallelConfig,
    collectives: CollectivesConfig,
) -> Buffers:
    """Of each process group that parameters are sharded over: of experts that are divided, another."""
    found = Buffers()
    for experts in sorted({group.experts for group in groups}):
        alike = [group for group in groups if group.experts == experts]
        one = _buffers_of_one(alike, shard, shards // experts, parallel, collectives)
        found.gathered += one.gathered
        found.staging += one.staging
        found.reducing = max(found.reducing, one.reducing)
        found.cast += one.cast
    return found


def _buffers_of_one(
    groups: Sequence[Group],
    shard: dict[str, int],
    shards: int,
    parallel: ParallelConfig,
    collectives: CollectivesConfig,
) -> Buffers:
    size, found = _size(parallel.param_dtype), Buffers()
    if shards == 1:
        if parallel.param_dtype != "float32":  # nothing is gathered, but layers in use are cast
            kept = sum(g.numel for g in groups if not g.reshards)
            found.gathered = size * (kept + 2 * _largest(g for g in groups if g.reshards))
        return found
    tide = [g for g in groups if collectives.name == "tide" and is_large(g, collectives, size)]
    stock = [g for g in groups if g not in tide]
    if tide:
        slots = {g.name: _slot(g, shards, parallel.param_dtype) for g in tide}
        rotating = [slots[g.name] for g in tide if g.reshards]
        depth = 1 if parallel.prefetch is None else parallel.prefetch
        number = min(collectives.slots or depth + 1, len(rotating))
        found.gathered = number * max(rotating, default=0)
        found.gathered += sum(slots[g.name] for g in tide if not g.reshards)
        found.staging = DEPTH * _size("bfloat16") * collectives.chunk
        if collectives.cast_ahead and parallel.param_dtype != "float32":
            found.cast = size * sum(shard[g.name] for g in tide)
    # The layer in use, and the next one on its way; packed gradients of the one before.
    found.gathered += 2 * size * _largest(g for g in stock if g.reshards)
    found.gathered += size * sum(g.numel for g in stock if not g.reshards)
    found.reducing = _size(parallel.reduce_dtype) * _largest(stock)
    return found


def _largest(groups: Iterable[Group]) -> int:
    return max((group.numel for group in groups), default=0)


def is_large(group: Group, collectives: CollectivesConfig, size: int) -> bool:
    """Whether TIDE serves a group: see `parallel.tide.suitable.too_small`."""
    assert collectives.smallest is not None
    nbytes = group.numel * size
    return (
        nbytes >= collectives.smallest
        and nbytes * TENSORS >= len(group.parameters) * collectives.smallest
    )


def _slot(group: Group, shards: int, dtype: str) -> int:
    kind = getattr(torch, dtype)
    dims = [0 if group.experts == 1 else side_to_shard(p.shape, shards) for p in group.parameters]
    cuts = [cut(p.shape, dim or 0, shards) for p, dim in zip(group.parameters, dims, strict=True)]
    return make_layout(shards, [(c, kind) for c in cuts]).nbytes


def _shard_numel(group: Group, shards: int, trained: bool = False) -> int:
    """Elements of the largest shard: of the first rank, which rounding favours.

    `trained`: of those only that have gradients.
    """
    parameters = [p for p in group.parameters if p.requires_grad or not trained]
    if group.experts > 1:  # along a side that divides
        return sum(p.numel() for p in parameters) * group.experts // shards
    return sum(
        math.ceil((p.shape[0] if p.ndim else 1) / shards) * math.prod(p.shape[1:])
        for p in parameters
    )


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
