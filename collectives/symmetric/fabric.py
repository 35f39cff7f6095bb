"""All links of a rank in one group: shared memory on its node, a network between nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from collectives.symmetric.p2p import PointToPoint
from collectives.symmetric.shm import SharedMemory
from collectives.symmetric.transport import Network, Region, SymmetricMemory
from collectives.topology import Topology, make_topology


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
) -> Fabric:
    """Link the ranks of `group`; all of them call it. Nodes hold `node_size` consecutive global ranks.

    `timeout` is in seconds; `device` is this rank's GPU, if it has one. Raises `ValueError` for a group
    that nodes do not divide evenly, and for GPUs of several nodes.
    """
    topology = make_topology(dist.get_process_group_ranks(group), group.rank(), node_size)
    single = topology.num_nodes == 1
    if device is not None and device.type == "cuda":
        if not single:
            raise ValueError("there is no transport between GPUs of several nodes yet")
        from collectives.symmetric.copy_engine import CopyEngines  # symmetric memory needs CUDA

        return Fabric(topology, CopyEngines(group, device), None)
    local = SharedMemory(group, topology.neighbours, timeout, multicast)
    return Fabric(topology, local, None if single else PointToPoint(group, topology.rail, timeout))
