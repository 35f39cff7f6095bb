"""Memory that all GPUs of a machine have mapped, from NCCL's windows; needs nccl4py and NCCL 2.31.

The communicator is one of its own: it moves nothing, it only makes memory known to the others, and
so it never meets torch's collectives.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from nccl import core as nccl

from collectives.nccl import running_version
from collectives.symmetric.copy_engine import Mapped
from collectives.symmetric.nccl_communicator import make_communicator
from collectives.torch_private import tensor_at

NO_MULTICAST_SINCE = (2, 32, 0)
"""From then on a communicator can be told to leave multicast alone."""


class NcclMemory:
    """See `copy_engine.Memory`, for `members`, ranks of `group` on one machine.

    `multicast`: ask for addresses where one write reaches all of them.
    """

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        device: torch.device,
        multicast: bool,
    ) -> None:
        self._group, self._device = group, device
        self._rank, self._size = members.index(group.rank()), len(members)
        options: dict[str, Any] = {}
        version = running_version()
        if not multicast and version is not None and version >= NO_MULTICAST_SINCE:
            options["nvls_host_mode"] = nccl.NcclNvlsHostMode.DISABLE
        self._communicator = make_communicator(group, members, **options)
        self.multicast = multicast and self._communicator.multimem_support
        self._given: list[tuple[Any, Any]] = []

    def allocate(self, nbytes: int) -> Mapped:
        """See `Memory.allocate`. Raises `RuntimeError` where ranks cannot reach each other's memory."""
        buffer = nccl.mem_alloc(nbytes, self._device.index)
        window = self._communicator.register_window(buffer, nccl.WindowFlag.COLL_SYMMETRIC)
        self._given.append((window, buffer))
        addresses = [window.get_peer_device_pointer(rank) for rank in range(self._size)]
        if None in addresses:
            raise RuntimeError(
                f"NCCL does not map the memory of rank {addresses.index(None)} of the node: set "
                "collectives.transport=symm_mem"
            )
        addresses[self._rank] = int(buffer.handle)
        multicast = window.get_lsa_multimem_device_pointer() if self.multicast else None
        mapped = Mapped(addresses, multicast)
        torch.cuda.synchronize(self._device)
        tensor_at(int(buffer.handle), nbytes, torch.uint8, self._device).zero_()
        torch.cuda.synchronize(self._device)
        dist.barrier(
            self._group, device_ids=[self._device.index]
        )  # all is zero before anybody puts
        return mapped

    def close(self) -> None:
        """See `Memory.close`."""
        for window, buffer in self._given:
            window.close()
            nccl.mem_free(buffer)
        self._given.clear()
        self._communicator.destroy()
