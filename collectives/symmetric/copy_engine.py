"""The transport between GPUs of one machine: copy engines for bytes, stream memory operations for flags.

Where the memory that every peer has mapped comes from is somebody else's business (`Memory`). Everything
is ordered by the current stream: a put or a signal happens when the stream comes to it, and a wait holds
the stream, not the host. A watchdog looks after waits that never end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.symmetric import cuda_driver as cuda
from collectives.symmetric.transport import PeerError, Put, Region, silent
from collectives.symmetric.watchdog import Watchdog, below
from collectives.torch_private import (
    current_stream_numbers,
    set_stream,
    stream_numbers,
    tensor_at,
)

CHANNELS = 4096
"""Flags from each peer; the largest model has a few per layer."""
FLAG = 8
"""Bytes."""


@dataclass(frozen=True)
class Mapped:
    """Zeroed memory of one size on every rank, mapped by all of them."""

    addresses: list[int]
    """Of every rank's part, in this process."""
    multicast: int | None
    """An address where a write reaches all of them, if there is one."""


class Memory(Protocol):
    """Where mapped memory comes from."""

    name: str
    multicast: bool
    """Whether allocations have a multicast address."""

    def allocate(self, nbytes: int) -> Mapped:
        """All ranks call it, in the same order."""
        ...

    def close(self) -> None:
        """Give all of it back; nobody uses it any more, here or elsewhere."""
        ...


@dataclass(frozen=True)
class MappedRegion:
    """See `Region`."""

    nbytes: int
    mapped: Mapped
    device: torch.device

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Region.tensor`."""
        return tensor_at(self.mapped.addresses[rank] + offset, numel, dtype, self.device)


@dataclass(frozen=True)
class Batch:
    """Prepared puts, as columns of numbers: addresses are all there is to work out later."""

    sources: Any
    begins: Any
    targets: Any
    sizes: Any
    rows: list[Put]
    """Those that lie a pitch apart somewhere, each a call of its own."""
    region: MappedRegion


class CopyEngines:
    """Copy engines between `members`, ranks of `group`, each with a GPU of this machine.

    `timeout` is in seconds. `give_up` is called, from another thread, with what is wrong when a peer has
    not signalled for so long: streams cannot raise, so it has to end the process.
    """

    on_stream = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        device: torch.device,
        memory: Memory,
        timeout: float,
        give_up: Callable[[PeerError], None],
    ) -> None:
        self.rank, self.world_size, self._group = members.index(group.rank()), len(members), group
        self.multicast, self.memory, self._device = memory.multicast, memory, device
        self._flush = cuda.can_flush(device.index)
        self._flags = self.allocate(self.world_size * CHANNELS * FLAG)
        self.beside = torch.cuda.Stream(device)
        """Of the lowest priority: small kernels there do not hold up the layers' own."""
        self._beside_handle = self.beside.cuda_stream
        self._beside_numbers = stream_numbers(self.beside)
        ranks = [dist.get_global_rank(group, member) for member in members]

        def late(peer: int, about: str) -> None:
            give_up(silent(ranks[peer], ranks[self.rank], timeout, about))

        own = self._flags.tensor(self.rank, 0, self.world_size * CHANNELS, torch.int64)
        self._watchdog = Watchdog(below(cuda.Reader(own).read), timeout, late)

    def allocate(self, nbytes: int) -> MappedRegion:
        """See `SymmetricMemory.allocate`."""
        return MappedRegion(nbytes, self.memory.allocate(nbytes), self._device)

    def put(
        self, source: Tensor, region: Region, offset: int, peer: int, pitch: int | None = None
    ) -> None:
        """See `SymmetricMemory.put`."""
        assert isinstance(region, MappedRegion)
        self._put(source, region.mapped.addresses[peer] + offset, pitch)

    def put_all(
        self, source: Tensor, region: Region, offset: int, pitch: int | None = None
    ) -> None:
        """See `SymmetricMemory.put_all`."""
        assert isinstance(region, MappedRegion)
        assert region.mapped.multicast is not None
        self._put(source, region.mapped.multicast + offset, pitch)

    def _put(self, source: Tensor, target: int, pitch: int | None) -> None:
        size = source.element_size()
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

    def prepare(self, puts: Sequence[Put], region: Region) -> Batch:
        """See `SymmetricMemory.prepare`."""
        assert isinstance(region, MappedRegion)
        runs = [p for p in puts if p.rows == 1 or p.step == p.pitch == p.width]
        runs = [p for p in runs if p.rows * p.width]
        addresses = region.mapped.addresses
        return Batch(
            np.array([p.source for p in runs], np.intp),
            np.array([p.begin for p in runs], np.uint64),
            np.array([addresses[p.peer] + p.offset for p in runs], np.uint64),
            np.array([p.rows * p.width for p in runs], np.uint64),
            [p for p in puts if p.rows > 1 and not p.step == p.pitch == p.width],
            region,
        )

    def send(self, prepared: Batch, sources: Sequence[Tensor]) -> None:
        """See `SymmetricMemory.send`."""
        bases = np.array([source.data_ptr() for source in sources], np.uint64)
        if len(prepared.sizes):
            begins = bases[prepared.sources] + prepared.begins
            cuda.copy_all(prepared.targets, begins, prepared.sizes, self._device.index)
        for p in prepared.rows:
            target = prepared.region.mapped.addresses[p.peer] + p.offset
            begin = int(bases[p.source]) + p.begin
            cuda.copy_rows(target, p.pitch, begin, p.step, p.width, p.rows)

    def signal(self, peer: int, channel: int, value: int) -> None:
        """See `Link.signal`."""
        cuda.write_flag(self._flags.mapped.addresses[peer] + self._flag(self.rank, channel), value)

    def wait(self, peer: int, channel: int, value: int, about: str = "") -> int | None:
        """See `Link.wait`: holds the current stream; what was seen is not known here."""
        flag = self._flag(peer, channel)
        cuda.wait_flag(self._flags.mapped.addresses[self.rank] + flag, value, self._flush)
        self._watchdog.expect((flag // FLAG, value), peer, about)
        return None

    def _flag(self, source: int, channel: int) -> int:
        assert channel < CHANNELS
        return (source * CHANNELS + channel) * FLAG

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `SymmetricMemory.aside`."""
        cuda.Mark().hold(self._beside_handle)
        here = current_stream_numbers(self._device.index)
        set_stream(self._beside_numbers)
        try:
            yield
        finally:
            set_stream(here)

    def mark(self) -> cuda.Mark:
        """See `Link.mark`."""
        return cuda.Mark()

    def after(self, mark: cuda.Mark | None) -> None:
        """See `Link.after`."""
        if mark is not None:
            mark.hold_current()

    def flush(self) -> None:
        """See `Link.flush`: what follows on the stream is ordered by it."""

    def close(self) -> None:
        """See `Link.close`. All ranks of the group call it; nobody may use the memory any more."""
        self._watchdog.close()
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        self.memory.close()
