"""All links of a rank in one group: shared memory on its node, a network between nodes."""

import os
import sys
from collections.abc import Callable
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
    """The links of one group; `network` is None on a single node."""

    topology: Topology
    local: SymmetricMemory
    network: Network | None

    def allocate(self, nbytes: int) -> Memory:
        """Memory of `nbytes` on every rank; all ranks of the group call it, in the same order."""
        local = self.local.allocate(nbytes)
        if self.network is None:
            return Memory(local, None, nbytes)
        own = local.tensor(self.local.rank, 0, nbytes, torch.uint8)
        return Memory(local, self.network.register(own), nbytes)

    def close(self) -> None:
        """Give every link back."""
        self.local.close()
        if self.network is not None:
            self.network.close()


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
    divide evenly, and for GPUs of several nodes.
    """
    topology = make_topology(dist.get_process_group_ranks(group), group.rank(), node_size)
    single = topology.num_nodes == 1
    if device is not None and device.type == "cuda":
        if not single:
            raise ValueError("there is no transport between GPUs of several nodes yet")
        from collectives.symmetric.copy_engine import CopyEngines  # symmetric memory needs CUDA

        memory = _memory(transport, group, device, multicast)
        return Fabric(topology, CopyEngines(group, device, memory, timeout, give_up), None)
    local = SharedMemory(group, topology.neighbours, timeout, multicast)
    return Fabric(topology, local, None if single else PointToPoint(group, topology.rail, timeout))


def _memory(transport: str, group: dist.ProcessGroup, device: torch.device, multicast: bool) -> Any:
    if transport == "nccl":
        from collectives.symmetric.nccl_memory import NcclMemory  # an optional package

        return NcclMemory(group, device, multicast)
    from collectives.symmetric.torch_memory import TorchMemory

    return TorchMemory(group, device)
