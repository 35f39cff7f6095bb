"""The transport between nodes: torch.distributed point-to-point messages that act like remote writes.

One thread for each peer takes its messages, lands the bytes in registered memory and keeps the flags,
as a network card would: whoever is written to has nothing to do. A rank sends bytes and flags to one
peer in order, and to different peers independently.

It needs a process group with a CPU backend. The threads end with `close`, or with the interpreter.
"""

import atexit
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.symmetric.transport import PeerError, Region, silent

HEADER, PAYLOAD = 7001, 7002
"""Tags; nobody else sends point-to-point on these."""
PUT, FLAG, BYE = range(3)
FOREVER = timedelta(days=3650)
FLAGS_KEPT = 64
"""Flags that may be on their way before the oldest is waited for."""


@dataclass(frozen=True)
class Registered:
    """See `Region`. Only this rank's part can be looked at."""

    memory: Tensor
    index: int
    """All ranks number their regions alike."""
    rank: int

    @property
    def nbytes(self) -> int:
        """See `Region.nbytes`."""
        return self.memory.numel()

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Region.tensor`; a view, since no parameter lies here by this name."""
        assert rank == self.rank, "memory of another node cannot be looked at"
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)


class PointToPoint:
    """Messages among `members`, ranks of `group`; peers are numbered by their place in `members`."""

    def __init__(self, group: dist.ProcessGroup, members: list[int], timeout: float) -> None:
        self.rank, self.world_size = members.index(group.rank()), len(members)
        self.timeout = timeout
        self._group, self._members = group, members
        self._global = [dist.get_global_rank(group, member) for member in members]
        self._regions: list[Registered] = []
        self._seen: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        """Flags that have arrived and were not waited for, by peer and channel."""
        self._gone: dict[int, str] = {}
        self._changed = threading.Condition()
        self._on_their_way: deque[tuple[int, dist.Work, Tensor]] = deque()
        self._closed = False
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self._threads = [
            threading.Thread(target=self._listen, args=(p,), daemon=True, name=f"rail {p}")
            for p in peers
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread that outlived the interpreter would abort it

    def register(self, memory: Tensor) -> Registered:
        """See `Network.register`."""
        region = Registered(memory, len(self._regions), self.rank)
        with self._changed:
            self._regions.append(region)
            self._changed.notify_all()
        return region

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
        """See `Network.put_signal`."""
        self.put(source, region, offset, peer, pitch)
        self.signal(peer, channel, value)

    def put(
        self, source: Tensor, region: Region, offset: int, peer: int, pitch: int | None = None
    ) -> None:
        """The bytes alone; whatever is signalled next says that they are there."""
        assert isinstance(region, Registered)
        rows = source.shape[0] if source.dim() == 2 else 1
        packed = source.contiguous().view(-1).view(torch.uint8)
        width = packed.numel() // rows
        step = width if pitch is None else pitch * source.element_size()
        self._send(peer, [PUT, region.index, offset, rows, width, step], HEADER)
        self._send_tensor(peer, packed, PAYLOAD)

    def signal(self, peer: int, channel: int, value: int) -> None:
        """See `Link.signal`."""
        if peer == self.rank:
            self._take_flag(peer, channel, value)
            return
        self._send(peer, [FLAG, channel, value, 0, 0, 0], HEADER)
        while len(self._on_their_way) > FLAGS_KEPT:
            self._finish_oldest()

    def wait(self, peer: int, channel: int, value: int, about: str = "") -> int:
        """See `Link.wait`, and `Network` on its order."""
        end = time.monotonic() + self.timeout
        with self._changed:
            while not (arrived := self._seen[peer, channel]):
                if peer in self._gone:
                    raise PeerError(f"rank {self._global[peer]} is gone: {self._gone[peer]}")
                if not self._changed.wait(end - time.monotonic()):
                    ranks = self._global
                    raise silent(ranks[peer], ranks[self.rank], self.timeout, about)
            seen = arrived.popleft()
        assert seen >= value, f"channel {channel} of peer {peer}: {seen} comes before {value}"
        return seen

    def mark(self) -> None:
        """See `Link.mark`: the caller's own order."""

    def after(self, mark: None) -> None:
        """See `Link.after`."""

    def flush(self) -> None:
        """See `Link.flush`."""
        while self._on_their_way:
            self._finish_oldest()

    def close(self) -> None:
        """See `Link.close`. Waits a moment for the peers to close, too."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for peer in set(range(self.world_size)) - {self.rank}:  # also to those that were faster
            with suppress(PeerError):
                self._send(peer, [BYE, 0, 0, 0, 0, 0], HEADER)
        with suppress(PeerError):  # a message dropped half-way would confuse whoever sends next
            self.flush()
        end = time.monotonic() + min(self.timeout, 5)
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        self._on_their_way.clear()

    def _send(self, peer: int, numbers: list[int], tag: int) -> None:
        self._send_tensor(peer, torch.tensor(numbers), tag)

    def _send_tensor(self, peer: int, tensor: Tensor, tag: int) -> None:
        try:
            work = self._group.send([tensor], self._members[peer], tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from None
        self._on_their_way.append((peer, work, tensor))

    def _finish_oldest(self) -> None:
        peer, work, _ = self._on_their_way.popleft()
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def _lost(self, peer: int, error: RuntimeError) -> PeerError:
        return PeerError(f"rank {self._global[peer]} cannot be written to: {error}")

    # What the threads do

    def _listen(self, peer: int) -> None:
        try:
            header = torch.empty(6, dtype=torch.int64)
            while True:
                self._receive(peer, header, HEADER)
                kind, *numbers = header.tolist()
                if kind == BYE:
                    raise RuntimeError("it said goodbye")
                if kind == FLAG:
                    self._take_flag(peer, numbers[0], numbers[1])
                else:
                    self._land(peer, *numbers)
        except RuntimeError as error:
            with self._changed:
                self._gone[peer] = str(error)
                self._changed.notify_all()

    def _receive(self, peer: int, tensor: Tensor, tag: int) -> None:
        self._group.recv([tensor], self._members[peer], tag).wait(FOREVER)

    def _take_flag(self, peer: int, channel: int, value: int) -> None:
        with self._changed:
            self._seen[peer, channel].append(value)
            self._changed.notify_all()

    def _land(self, peer: int, index: int, offset: int, rows: int, width: int, step: int) -> None:
        with self._changed:  # a peer may be ahead of this rank's own registration
            self._changed.wait_for(lambda: index < len(self._regions), self.timeout)
        memory = self._regions[index].memory
        if rows == 1 or step == width:
            self._receive(peer, memory[offset : offset + rows * width], PAYLOAD)
            return
        packed = torch.empty(rows, width, dtype=torch.uint8)
        self._receive(peer, packed.view(-1), PAYLOAD)
        memory[offset:].as_strided((rows, width), (step, 1)).copy_(packed)
