"""The tasks of one step: FSDP2 on torch's collectives, on symmetric memory, and on TIDE.

Legend: P elements of a group of layers, N ranks, G GPUs of a node, M nodes.

What comes before what is that of the code: FSDP2 2.11 gathers one group ahead, copies out and packs on
the stream of the layers, and packs a gradient when the reduce-scatter before it is over; TIDE casts all
shards first and keeps them, has two slots that layers take turns in, and stages gradients in the one
that has become free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.tide.scale.fluid import Task, run
from benchmarks.tide.scale.rates import Rates

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together."""

    name: str
    numel: int
    forward: float
    """Seconds of its kernels."""
    backward: float
    """Recomputation included."""
    stays: bool = False
    """Gathered from the forward pass to the end of the backward pass."""


@dataclass(frozen=True)
class Cluster:
    """How many GPUs there are, and on how many nodes."""

    ranks: int
    node_size: int

    @property
    def nodes(self) -> int:
        """M."""
        return self.ranks // self.node_size


def moving(numel: int, size: int, cluster: Cluster, bus: float, rates: Rates) -> float:
    """Seconds of a collective over links with this bus bandwidth inside a node, cards between nodes.

    Nodes and links work at the same time, so the slower of the two counts.
    """
    inside = numel * size * (cluster.ranks - 1) / cluster.ranks / bus
    share = numel * size / cluster.node_size  # what one rail carries in all
    across = share * (cluster.nodes - 1) / cluster.nodes / (rates.card * rates.cards)
    return rates.start + max(inside, across)


def pushing(numel: int, cluster: Cluster, rates: Rates) -> float:
    """Seconds of TIDE's puts of bf16: to neighbours by copy engines, along rails by cards.

    A rank puts its rail's shards into its neighbours, so that is what its engines carry.
    """
    size, neighbours = numel * BF16, cluster.node_size - 1
    inside = size / cluster.node_size * neighbours / rates.engines
    across = size / cluster.node_size * (cluster.nodes - 1) / cluster.nodes
    return rates.start + max(inside, across / (rates.card * rates.cards))


def stock(
    groups: Sequence[Group], cluster: Cluster, rates: Rates, symmetric: bool = False
) -> list[Task]:
    """FSDP2; `symmetric`: gathers by copy engines, into symmetric memory, all else as it is."""
    tasks: list[Task] = []
    ranks = cluster.ranks
    few = cluster.node_size <= 2
    bus = rates.nccl_gather if few else rates.nccl_gather_8
    bus = rates.engine_gather if symmetric else bus
    scatter_bus = rates.nccl_scatter if few else rates.nccl_scatter_8

    def add(*arguments: object) -> Task:
        tasks.append(Task(*arguments))  # type: ignore[arg-type]
        return tasks[-1]

    def gather(group: Group, needs: Sequence[Task]) -> Task:
        packed = (6 + 4) * group.numel / ranks / rates.casts
        cast = add(f"cast {group.name}", "pack", "copy", packed, needs)
        seconds = moving(group.numel, BF16, cluster, bus, rates)
        kind = "wire" if symmetric else "nccl"
        return add(f"gather {group.name}", "gather", kind, seconds, [cast])

    def copied_out(group: Group, gathered: Task) -> Task:
        seconds = 4 * group.numel / rates.copies
        return add(f"copy out {group.name}", "layers", "copy", seconds, [gathered])

    out: list[Task] = []
    for group in groups:
        out.append(copied_out(group, gather(group, out[-2:-1])))
        add(f"forward {group.name}", "layers", "layer", group.forward)
    backwards = groups[::-1]
    rotating = [group for group in backwards if not group.stays]
    ahead: dict[str, Task] = {}
    scattered: list[Task] = []
    if rotating:
        ahead[rotating[0].name] = gather(rotating[0], [tasks[-1]])
    for group in backwards:
        if not group.stays:
            copied_out(group, ahead[group.name])
            following = rotating[rotating.index(group) + 1 :][:1]
            if following:
                ahead[following[0].name] = gather(following[0], [tasks[-1]])
        add(f"backward {group.name}", "layers", "layer", group.backward)
        packing = 6 * group.numel / rates.copies
        packed = add(f"pack {group.name}", "layers", "copy", packing, scattered[-1:])
        seconds = moving(group.numel, FP32, cluster, scatter_bus, rates)
        scattered.append(add(f"scatter {group.name}", "scatter", "nccl", seconds, [packed]))
    return tasks


def tide(groups: Sequence[Group], cluster: Cluster, rates: Rates) -> list[Task]:
    """TIDE, both halves, with Slot-Reuse."""
    tasks: list[Task] = []
    ranks = cluster.ranks

    def add(*arguments: object) -> Task:
        tasks.append(Task(*arguments))  # type: ignore[arg-type]
        return tasks[-1]

    casts = {
        group.name: add(
            f"cast {group.name}", "beside", "copy", 6 * group.numel / ranks / rates.own_casts
        )
        for group in groups
    }
    slots: list[Task | None] = [None, None]
    """What each of the slots was last used by."""
    turn = 0

    def gather(group: Group, needs: Sequence[Task]) -> tuple[Task, int]:
        nonlocal turn
        slot = turn % 2
        last = slots[slot]
        free = [last] if last is not None and not group.stays else []
        seconds = pushing(group.numel, cluster, rates)
        put = add(f"gather {group.name}", "gather", "wire", seconds, [*needs, *free])
        if not group.stays:
            turn += 1
        return put, slot

    previous: list[Task] = []
    for group in groups:
        # The host is ahead: a gather begins when its slot is free and the layer before it begins.
        put, slot = gather(group, [casts[group.name], *previous[-2:-1]])
        used = add(f"forward {group.name}", "layers", "layer", group.forward, [put])
        previous.append(used)
        if not group.stays:
            slots[slot] = used
    backwards = groups[::-1]
    rotating = [group for group in backwards if not group.stays]
    ahead: dict[str, tuple[Task, int]] = {}
    if rotating:
        ahead[rotating[0].name] = gather(rotating[0], previous[-1:])
    for group in backwards:
        gathered = ahead.get(group.name)
        following = rotating[rotating.index(group) + 1 :][:1] if not group.stays else []
        if following:
            ahead[following[0].name] = gather(following[0], [])
        needs = [gathered[0]] if gathered else []
        done = add(f"backward {group.name}", "layers", "layer", group.backward, needs)
        seconds = pushing(group.numel, cluster, rates)
        put = add(f"scatter {group.name}", "scatter", "wire", seconds, [done])
        # What the neighbours sent and the own part, in bf16; the total, in fp32.
        parts = cluster.node_size * BF16 + FP32 + (cluster.nodes > 1) * 2 * FP32
        share = group.numel / ranks * (cluster.nodes if cluster.nodes > 1 else 1)
        summed = add(f"sum {group.name}", "beside", "sum", parts * share / rates.sums, [put])
        if gathered:
            slots[gathered[1]] = summed
    return tasks


def passes(kind: str, groups: Sequence[Group], cluster: Cluster, rates: Rates) -> float:
    """Seconds of a forward and a backward pass."""
    if kind == "tide":
        return run(tide(groups, cluster, rates), rates.speeds)
    return run(stock(groups, cluster, rates, kind == "symmetric"), rates.speeds)
