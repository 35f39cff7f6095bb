"""The transport between processes of one machine: shared memory for bytes, sockets for flags.

Memory is anonymous: its descriptor travels to the peers over the same sockets, so there is no name
in `/dev/shm` that a kill could leave behind. A flag is a message: the kernel orders it after the
writes that came before it, on any processor, waiting for it takes no time from anybody, and the end
of the stream says at once that the peer is gone.
"""

import mmap
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.symmetric.transport import PeerError, Put, Region, silent

T = TypeVar("T")
MESSAGE = struct.Struct("=IQ")
"""Channel and value."""


@dataclass(frozen=True)
class SharedRegion:
    """See `Region`. A mapping lives as long as a tensor that looks at it; nobody closes it by hand."""

    nbytes: int
    mappings: list[mmap.mmap]

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Region.tensor`."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.mappings[rank], dtype=dtype, count=numel, offset=offset)


class SharedMemory:
    """Shared memory among `members` of `group` (ranks in it; all by default) on one machine.

    Every rank of the group makes one at the same time. Peers are numbered by their place in
    `members`. `multicast` emulates one write that reaches all of them.
    """

    on_stream, beside = False, None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        members: list[int] | None = None,
        timeout: float = 60.0,
        multicast: bool = False,
    ) -> None:
        members = list(range(dist.get_world_size(group))) if members is None else members
        self.rank, self.world_size = members.index(dist.get_rank(group)), len(members)
        self.timeout, self.multicast = timeout, multicast
        world = group or dist.group.WORLD
        assert world is not None
        self._global = [dist.get_global_rank(world, member) for member in members]
        self._seen: dict[tuple[int, int], int] = {}
        self._sockets = _connect(group, members, self.rank, timeout)

    def allocate(self, nbytes: int) -> Region:
        """See `SymmetricMemory.allocate`. Sizes are rounded up to whole pages by the system."""
        own = _anonymous_file(nbytes)
        files = {self.rank: own}
        try:
            for link in self._sockets.values():
                socket.send_fds(link, [b"m"], [own])
            for peer, link in self._sockets.items():
                files[peer] = self._receive_file(peer, link)
            for rank in range(self.world_size):
                found = os.fstat(files[rank]).st_size
                if found != nbytes:
                    raise ValueError(
                        f"rank {self._global[rank]} allocated {found} bytes, this rank {nbytes}"
                    )
            return SharedRegion(
                nbytes, [mmap.mmap(files[r], nbytes) for r in range(self.world_size)]
            )
        finally:
            for file in files.values():
                os.close(file)

    def _receive_file(self, peer: int, link: socket.socket) -> int:
        """A descriptor; flags that the peer sent before it are kept."""
        while True:
            kind, files, _, _ = self._guard(peer, lambda: socket.recv_fds(link, 1, 1))
            if kind == b"m":
                return files[0]
            self._take(peer, kind, link)

    def put(
        self, source: Tensor, region: Region, offset: int, peer: int, pitch: int | None = None
    ) -> None:
        """See `Link.put`. The copy is over when this returns."""
        rows, width = source.shape if source.dim() == 2 else (1, source.numel())
        step = width if pitch is None else pitch
        span = region.tensor(peer, offset, (rows - 1) * step + width, source.dtype)
        span.as_strided((rows, width), (step, 1)).copy_(source.view(rows, width))

    def put_all(
        self, source: Tensor, region: Region, offset: int, pitch: int | None = None
    ) -> None:
        """See `SymmetricMemory.put_all`; a loop, for want of a switch that copies."""
        for peer in range(self.world_size):
            self.put(source, region, offset, peer, pitch)

    def prepare(self, puts: Sequence[Put], region: Region) -> tuple[Sequence[Put], Region]:
        """See `SymmetricMemory.prepare`."""
        return puts, region

    def send(self, prepared: tuple[Sequence[Put], Region], sources: Sequence[Tensor]) -> None:
        """See `SymmetricMemory.send`."""
        puts, region = prepared
        flat = [source.view(torch.uint8) for source in sources]
        for p in puts:
            source = flat[p.source]
            begin = source.storage_offset() + p.begin
            rows = source.as_strided((p.rows, p.width), (p.step, 1), begin)
            self.put(rows, region, p.offset, p.peer, p.pitch)

    def aside(self) -> AbstractContextManager[None]:
        """See `SymmetricMemory.aside`: the caller's own order."""
        return nullcontext()

    def mark(self) -> None:
        """See `Link.mark`: the caller's own order."""

    def after(self, mark: None) -> None:
        """See `Link.after`."""

    def flush(self) -> None:
        """See `Link.flush`: puts are over when they return."""

    def signal(self, peer: int, channel: int, value: int) -> None:
        """See `Link.signal`."""
        if peer == self.rank:
            self._seen[peer, channel] = value
            return
        link = self._sockets[peer]
        self._guard(peer, lambda: link.sendall(b"f" + MESSAGE.pack(channel, value)))

    def wait(self, peer: int, channel: int, value: int, about: str = "") -> int:
        """See `Link.wait`."""
        end = time.monotonic() + self.timeout
        while (seen := self._seen.get((peer, channel), 0)) < value:
            if peer == self.rank or time.monotonic() > end:
                raise silent(self._global[peer], self._global[self.rank], self.timeout, about)
            link = self._sockets[peer]
            self._take(peer, self._guard(peer, partial(link.recv, 1)), link)
        return seen

    def _take(self, peer: int, kind: bytes, link: socket.socket) -> None:
        """Read the rest of a message that began with `kind`."""
        if kind != b"f":
            raise PeerError(
                f"rank {self._global[peer]} allocates, but rank {self._global[self.rank]} waits for a "
                "flag"
            )
        packed = b""
        while len(packed) < MESSAGE.size:
            packed += self._guard(peer, partial(link.recv, MESSAGE.size - len(packed)))
        channel, value = MESSAGE.unpack(packed)
        self._seen[peer, channel] = value

    def _guard(self, peer: int, action: Callable[[], T]) -> T:
        """Use a link; a peer that is silent or gone becomes a `PeerError` that names it."""
        try:
            result = action()
        except TimeoutError:
            raise PeerError(
                f"rank {self._global[peer]} was silent for {self.timeout:g} s"
            ) from None
        except OSError:
            raise self._gone(peer) from None
        if result == b"" or (isinstance(result, tuple) and result[0] == b""):
            raise self._gone(peer)
        return result

    def _gone(self, peer: int) -> PeerError:
        ranks = self._global
        return PeerError(
            f"rank {ranks[peer]} is gone: it closed its link to rank {ranks[self.rank]}"
        )

    def close(self) -> None:
        """See `Link.close`. Memory goes when its last tensor does."""
        for link in self._sockets.values():
            link.close()
        self._sockets.clear()


def _anonymous_file(nbytes: int) -> int:
    """A descriptor of `nbytes` of shared memory that has no name anywhere."""
    if nbytes < 1:
        raise ValueError(f"cannot allocate {nbytes} bytes of shared memory")
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("springtide")
    else:
        file, path = tempfile.mkstemp(prefix="springtide-")
        os.unlink(path)
    os.ftruncate(file, nbytes)
    return file


def _connect(
    group: dist.ProcessGroup | None, members: list[int], rank: int, timeout: float
) -> dict[int, socket.socket]:
    """A link to every peer: each rank calls those below it and is called by those above."""
    world_size = len(members)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(timeout)
    with tempfile.TemporaryDirectory(prefix="springtide-") as folder:
        # Linux has addresses without a file; elsewhere the folder goes once everybody is linked.
        address = f"\0{folder}" if sys.platform == "linux" else str(Path(folder) / "link")
        listener.bind(address)
        listener.listen(world_size)
        addresses: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(addresses, address, group=group)
        links: dict[int, socket.socket] = {}
        for peer in range(rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(timeout)
            link.connect(addresses[members[peer]])
            link.sendall(struct.pack("=I", rank))
            links[peer] = link
        while len(links) < world_size - 1:
            link, _ = listener.accept()
            if not of_this_user(link):  # an address without a file has no permissions either
                link.close()
                continue
            link.settimeout(timeout)
            (peer,) = struct.unpack("=I", link.recv(4, socket.MSG_WAITALL))
            links[peer] = link
        listener.close()
    return links


def of_this_user(link: socket.socket) -> bool:
    """Whether the process at the other end is this user's, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
