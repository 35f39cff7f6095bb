"""The transport between GPUs of one machine: copy engines for bytes, stream memory operations for flags.

Memory is torch's symmetric memory, which every peer has mapped. Everything is
ordered by the current stream: a put or a signal happens when the stream comes to it, and a wait holds
the stream, not the host.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.symmetric import cuda_driver as cuda
from collectives.symmetric.transport import Region
from collectives.torch_private import allocate_symmetric, tensor_at

CHANNELS = 4096
"""Flags from each peer; the largest model has a few per layer."""
FLAG = 8
"""Bytes."""


@dataclass(frozen=True)
class MappedRegion:
    """See `Region`. The addresses are those of this process, of every rank's part."""

    nbytes: int
    addresses: list[int]
    device: torch.device
    owner: Tensor
    """Keeps the memory."""

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Region.tensor`."""
        return tensor_at(self.addresses[rank] + offset, numel, dtype, self.device)


class CopyEngines:
    """Copy engines between all ranks of `group`, each with a GPU of this machine."""

    on_stream, multicast = True, False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._group, self._device = group, device
        self._flush = cuda.can_flush(device.index)
        self._flags = self.allocate(self.world_size * CHANNELS * FLAG)

    def allocate(self, nbytes: int) -> MappedRegion:
        """See `SymmetricMemory.allocate`."""
        memory, addresses = allocate_symmetric(nbytes, self._device, self._group)
        return MappedRegion(nbytes, addresses, self._device, memory)

    def put(
        self, source: Tensor, region: Region, offset: int, peer: int, pitch: int | None = None
    ) -> None:
        """See `Link.put`."""
        assert isinstance(region, MappedRegion)
        size, target = source.element_size(), region.addresses[peer] + offset
        rows, width = source.shape if source.dim() == 2 else (1, source.numel())
        if not rows * width:
            return
        step = width if pitch is None else pitch
        own_step = source.stride(0) if source.dim() == 2 else width
        if rows == 1 or step == own_step == width:
            cuda.copy(target, source.data_ptr(), rows * width * size)
        else:
            cuda.copy_rows(
                target, step * size, source.data_ptr(), own_step * size, width * size, rows
            )

    def put_all(
        self, source: Tensor, region: Region, offset: int, pitch: int | None = None
    ) -> None:
        """See `SymmetricMemory.put_all`; never called, since this is no multicast."""
        for peer in range(self.world_size):
            self.put(source, region, offset, peer, pitch)

    def signal(self, peer: int, channel: int, value: int) -> None:
        """See `Link.signal`."""
        cuda.write_flag(self._flags.addresses[peer] + self._flag(self.rank, channel), value)

    def wait(self, peer: int, channel: int, value: int) -> int | None:
        """See `Link.wait`: holds the current stream; what was seen is not known here."""
        address = self._flags.addresses[self.rank] + self._flag(peer, channel)
        cuda.wait_flag(address, value, self._flush)
        return None

    def _flag(self, source: int, channel: int) -> int:
        assert channel < CHANNELS
        return (source * CHANNELS + channel) * FLAG

    def mark(self) -> torch.cuda.Event:
        """See `Link.mark`."""
        return torch.cuda.current_stream().record_event()

    def after(self, mark: torch.cuda.Event) -> None:
        """See `Link.after`."""
        torch.cuda.current_stream().wait_event(mark)

    def flush(self) -> None:
        """See `Link.flush`: what follows on the stream is ordered by it."""

    def close(self) -> None:
        """See `Link.close`. The memory goes with its last tensor."""
