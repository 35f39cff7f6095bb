"""The transport between GPUs of several nodes: NCCL's one-sided puts and signals.

Between machines a thread of NCCL's has the network card write into the peer's memory; between GPUs of
one machine, which can stand for nodes, copy engines do. Neither takes a multiprocessor, and a wait holds
the stream. Needs nccl4py and NCCL 2.31, whose signals have indices: a channel is one of them.

NCCL keeps the operations of one communicator in the order of the calls, on whatever streams they are.
So gathers and reductions have a communicator each, and a signal that says that something is over goes
to a stream of its own, where it can wait for what was called before it without holding up its caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from nccl import core as nccl
from torch import Tensor

from collectives.symmetric import cuda_driver as cuda
from collectives.symmetric.nccl_communicator import make_communicator
from collectives.symmetric.transport import PeerError, Region, silent
from collectives.symmetric.watchdog import Expected, Watchdog
from collectives.torch_private import current_raw_stream

SIGNALS = 1024
"""Indices of a communicator; each costs every rank eight bytes for every peer."""
UNHEARD = 0
"""The index of puts that nobody waits for: rows of one message but the last. Channels come after it."""


@dataclass(frozen=True)
class Window:
    """See `Region`. Only this rank's part can be looked at."""

    memory: Tensor
    handle: Any

    @property
    def nbytes(self) -> int:
        """See `Region.nbytes`."""
        return self.memory.numel()

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Region.tensor`; a view, since no parameter lies here by this name."""
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)


class NcclNetwork:
    """Puts and signals among `members`, ranks of `group`, by their place in the list.

    `timeout` is in seconds; `give_up` as for `CopyEngines`. Raises `RuntimeError` where NCCL cannot put
    into the memory of all members.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        device: torch.device,
        timeout: float,
        give_up: Callable[[PeerError], None],
    ) -> None:
        self.rank, self.world_size = members.index(group.rank()), len(members)
        self._group, self._device = group, device
        self._communicator = make_communicator(group, members, num_rma_sig=SIGNALS)
        if not self._communicator.host_rma_support:
            self._communicator.destroy()
            raise RuntimeError(
                "NCCL cannot put into the memory of ranks on other nodes here: set collectives=stock"
            )
        self._windows: list[Window] = []
        self._aside = torch.cuda.Stream(device)
        ranks = [dist.get_global_rank(group, member) for member in members]

        def late(peer: int, about: str) -> None:
            give_up(silent(ranks[peer], ranks[self.rank], timeout, about))

        self._watchdog = Watchdog(_not_passed, timeout, late)

    def register(self, memory: Tensor) -> Window:
        """See `Network.register`; `memory` is NCCL's own."""
        handle = self._communicator.register_window(memory, nccl.WindowFlag.COLL_SYMMETRIC)
        window = Window(memory, handle)
        self._windows.append(window)
        return window

    def put_signal(
        self,
        source: Tensor,
        region: Region,
        offset: int,
        peer: int,
        channel: int,
        value: int,
        pitch: int | None = None,
    ) -> None:
        """See `Network.put_signal`. Rows that arrive apart are a put each."""
        assert isinstance(region, Window)
        stream = current_raw_stream(self._device.index)
        size = source.element_size()
        rows, width = source.shape if source.dim() == 2 else (1, source.numel())
        step = width if pitch is None else pitch
        if rows > 1 and not (source.is_contiguous() and step == width):
            *firsts, source = source.unbind(0)
            for row in firsts:
                self._put(row, region, offset, peer, UNHEARD, stream)
                offset += step * size
        if source.numel():
            self._put(source, region, offset, peer, _index(channel), stream)
        else:
            self._communicator.signal(peer, _index(channel), stream=stream)

    def _put(
        self, source: Tensor, region: Window, offset: int, peer: int, index: int, stream: int
    ) -> None:
        packed = source.reshape(-1).view(torch.uint8)
        assert packed.data_ptr() == source.data_ptr(), "a source that is no single run of bytes"
        self._communicator.put_signal(packed, peer, region.handle, offset, index, stream=stream)

    def signal(self, peer: int, channel: int, value: int) -> None:
        """See `Link.signal`: after everything on the current stream, which goes on meanwhile."""
        aside = self._aside.cuda_stream
        cuda.Mark().hold(aside)
        self._communicator.signal(peer, _index(channel), stream=aside)

    def wait(self, peer: int, channel: int, value: int, about: str = "") -> None:
        """See `Link.wait`, and `Network` on its order: for one arrival, on the current stream."""
        one = nccl.WaitSignalDesc(peer, signal_index=_index(channel))
        self._communicator.wait_signal(one, stream=current_raw_stream(self._device.index))
        self._watchdog.expect(cuda.Mark(), peer, about)

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
        """See `Link.close`. All ranks of the group call it."""
        self._watchdog.close()
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        for window in self._windows:
            window.handle.close()
        self._windows.clear()
        self._communicator.destroy()


def _index(channel: int) -> int:
    assert channel + 1 < SIGNALS
    return channel + 1


def _not_passed(expected: Sequence[Expected]) -> list[Expected]:
    """Waits that streams are still held by."""
    return [each for each in expected if not each.what.has_passed()]
