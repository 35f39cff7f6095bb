"""All links of a rank in one group: shared memory on its node, a network between nodes."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from collectives.symmetric.p2p import PointToPoint
from collectives.symmetric.shm import SharedMemory
from collectives.symmetric.transport import Network, PeerError, Region, SymmetricMemory
from collectives.topology import Topology, make_topology


def end_process(error: PeerError) -> None:
    """What happens when a stream waits in vain, unless somebody else takes care: nothing goes on."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


@dataclass(frozen=True)
class Memory:
    """One allocation, which neighbours see and ranks of the same rail can put into."""

    local: Region
    remote: Region | None
    nbytes: int


@dataclass(frozen=True)
class Fabric:
    """The links of one group; the networks are None on a single node."""

    topology: Topology
    local: SymmetricMemory
    network: Network | None
    second: Network | None = None
    """Of reductions, where these must not wait for gathers; None: one serves both."""

    @property
    def reducing(self) -> Network | None:
        """The network of reductions."""
        return self.second or self.network

    def allocate(self, nbytes: int, network: Network | None = None) -> Memory:
        """Memory of `nbytes` on every rank; all ranks of the group call it, in the same order.

        `network`: the one that puts into it, unless it is that of gathers.
        """
        local, network = self.local.allocate(nbytes), network or self.network
        if network is None:
            return Memory(local, None, nbytes)
        own = local.tensor(self.local.rank, 0, nbytes, torch.uint8)
        return Memory(local, network.register(own), nbytes)

    def close(self) -> None:
        """Give every link back."""
        for network in (self.network, self.second):
            if network is not None:
                network.close()
        self.local.close()


def connect(
    group: dist.ProcessGroup,
    node_size: int,
    timeout: float,
    multicast: bool = False,
    device: torch.device | None = None,
    transport: str = "symm_mem",
    give_up: Callable[[PeerError], None] = end_process,
) -> Fabric:
    """Link the ranks of `group`; all of them call it. Nodes hold `node_size` consecutive global ranks.

    `timeout` is in seconds; `device` is this rank's GPU, if it has one; `transport` between GPUs is
    `nccl` or `symm_mem`. `multicast`: write to all neighbours at once where the system can. `give_up`
    ends the process where a stream waits in vain. Raises `ValueError` for a group that nodes do not
    divide evenly, and for GPUs of several nodes without NCCL.
    """
    topology = make_topology(dist.get_process_group_ranks(group), group.rank(), node_size)
    single = topology.num_nodes == 1
    if device is not None and device.type == "cuda":
        if not single and transport != "nccl":
            raise ValueError(
                "between GPUs of several nodes there is collectives.transport=nccl only"
            )
        from collectives.symmetric.copy_engine import CopyEngines  # symmetric memory needs CUDA

        members = topology.neighbours
        memory = _memory(transport, group, members, device, multicast)
        engines = CopyEngines(group, members, device, memory, timeout, give_up)
        if single:
            return Fabric(topology, engines, None)
        from collectives.symmetric.nccl_network import NcclNetwork  # an optional package

        rails = [NcclNetwork(group, topology.rail, device, timeout, give_up) for _ in range(2)]
        return Fabric(topology, engines, *rails)
    local = SharedMemory(group, topology.neighbours, timeout, multicast)
    return Fabric(topology, local, None if single else PointToPoint(group, topology.rail, timeout))


def _memory(
    transport: str,
    group: dist.ProcessGroup,
    members: Sequence[int],
    device: torch.device,
    multicast: bool,
) -> Any:
    if transport == "nccl":
        from collectives.symmetric.nccl_memory import NcclMemory  # an optional package

        return NcclMemory(group, members, device, multicast)
    from collectives.symmetric.torch_memory import TorchMemory

    return TorchMemory(group, device)
