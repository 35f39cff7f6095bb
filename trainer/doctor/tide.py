"""Which way TIDE's data would travel between the ranks that are there, by what decides in a run."""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from collectives.host import gather_objects
from collectives.nccl import unusable
from collectives.topology import make_topology
from parallel.tide.reach import Reach, reach
from trainer.doctor.finding import NOTE, WELL, Finding


def ways(local_size: int, device: torch.device) -> Iterator[Finding]:
    """All ranks call it and get the same: between ranks of a node, and between nodes.

    `local_size` is the number of ranks on a node.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        topology = make_topology(range(size), rank, local_size)
    except ValueError as error:
        yield Finding("TIDE", NOTE, "torch's collectives between all ranks", str(error))
        return
    if topology.node_size > 1:
        neighbours = range(rank - topology.local, rank - topology.local + topology.node_size)
        found = reach(device, "auto", neighbours, local_size)
        yield _agreed("TIDE on a node", found, "between its ranks")
    if topology.num_nodes > 1:
        wanted = "nccl" if device.type == "cuda" else "auto"
        found = reach(device, wanted, range(size), local_size)
        how = " with collectives.transport=nccl" if device.type == "cuda" else ""
        yield _agreed("TIDE over nodes", found, f"between all ranks{how}")
    if device.type == "cuda" and not any(gather_objects(unusable())):
        yield from nccl_can()


def _agreed(what: str, own: Reach, between: str) -> Finding:
    """The way of all ranks, or why some cannot take it. All ranks call it."""
    found: list[Reach] = gather_objects(own)
    worse = [rank for rank, each in enumerate(found) if each.transport is None]
    if worse:
        reason = found[worse[0]].reason
        return Finding(what, NOTE, f"torch's collectives, for rank {worse[0]}", reason)
    kinds = Counter(each.transport for each in found)
    if len(kinds) > 1:
        text = ", ".join(f"{name} on {number} ranks" for name, number in kinds.items())
        return Finding(what, NOTE, text, "install the same everywhere: ranks must agree")
    return Finding(what, WELL, f"over {found[0].transport} {between}", found[0].instead)


def nccl_can() -> Iterator[Finding]:
    """What a communicator of all ranks says of itself; they call it together."""
    from collectives.symmetric.nccl_communicator import make_communicator

    group = dist.group.WORLD
    assert group is not None
    communicator = make_communicator(group, range(dist.get_world_size()))
    able = gather_objects(bool(communicator.host_rma_support))
    multimem = gather_objects(bool(communicator.multimem_support))
    communicator.destroy()
    if all(able):
        yield Finding("puts and signals", WELL, "between all ranks")
    else:
        text = f"not on rank {able.index(False)}"
        yield Finding("puts and signals", NOTE, text, "layers stay on torch's between nodes")
    if all(multimem):
        yield Finding("NCCL's multicast", WELL, "between the ranks of a node")
