"""Memory that all GPUs of a machine have mapped, from torch's symmetric memory."""

import torch
import torch.distributed as dist

from collectives.symmetric.copy_engine import Mapped
from collectives.torch_private import allocate_symmetric


class TorchMemory:
    """See `copy_engine.Memory`. Needs nothing but torch; has no multicast addresses."""

    name, multicast = "symm_mem", False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._given: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> Mapped:
        """See `Memory.allocate`."""
        # Torch keeps two small arrays for each allocation and never frees them. On the default stream
        # they share a segment; on the stream of a model's gathers each model would leave 2 MiB.
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            memory, addresses = allocate_symmetric(nbytes, self._device, self._group)
        self._given.append(memory)
        return Mapped(addresses, None)

    def close(self) -> None:
        """See `Memory.close`."""
        self._given.clear()
