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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.symmetric.transport import PeerError, Region

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
    """Shared memory among the ranks of `group`, which must all be on this machine."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self._seen: dict[tuple[int, int], int] = {}
        self._sockets = _connect(group, self.rank, self.world_size, timeout)

    def allocate(self, nbytes: int) -> Region:
        """See `Transport.allocate`. Sizes are rounded up to whole pages by the system."""
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
                    raise ValueError(f"rank {rank} allocated {found} bytes, this rank {nbytes}")
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

    def put(self, source: Tensor, region: Region, offset: int, peer: int) -> None:
        """See `Transport.put`."""
        region.tensor(peer, offset, source.numel(), source.dtype).copy_(source.view(-1))

    def signal(self, peer: int, channel: int, value: int) -> None:
        """See `Transport.signal`."""
        if peer == self.rank:
            self._seen[peer, channel] = value
            return
        link = self._sockets[peer]
        self._guard(peer, lambda: link.sendall(b"f" + MESSAGE.pack(channel, value)))

    def wait(self, peer: int, channel: int, value: int) -> None:
        """See `Transport.wait`."""
        end = time.monotonic() + self.timeout
        while self._seen.get((peer, channel), 0) < value:
            if peer == self.rank or time.monotonic() > end:
                raise PeerError(
                    f"rank {peer} did not signal {value} on channel {channel} to rank {self.rank} "
                    f"within {self.timeout:g} s"
                )
            link = self._sockets[peer]
            self._take(peer, self._guard(peer, partial(link.recv, 1)), link)

    def _take(self, peer: int, kind: bytes, link: socket.socket) -> None:
        """Read the rest of a message that began with `kind`."""
        if kind != b"f":
            raise PeerError(f"rank {peer} allocates, but rank {self.rank} waits for a flag")
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
            raise PeerError(f"rank {peer} was silent for {self.timeout:g} s") from None
        except OSError:
            raise self._gone(peer) from None
        if result == b"" or (isinstance(result, tuple) and result[0] == b""):
            raise self._gone(peer)
        return result

    def _gone(self, peer: int) -> PeerError:
        return PeerError(f"rank {peer} is gone: it closed its link to rank {self.rank}")

    def close(self) -> None:
        """See `Transport.close`. Memory goes when its last tensor does."""
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
    group: dist.ProcessGroup | None, rank: int, world_size: int, timeout: float
) -> dict[int, socket.socket]:
    """A link to every peer: each rank calls those below it and is called by those above."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(timeout)
    with tempfile.TemporaryDirectory(prefix="springtide-") as folder:
        # Linux has addresses without a file; elsewhere the folder goes once everybody is linked.
        address = f"\0{folder}" if sys.platform == "linux" else str(Path(folder) / "link")
        listener.bind(address)
        listener.listen(world_size)
        addresses: list[str] = [""] * world_size
        dist.all_gather_object(addresses, address, group=group)
        links: dict[int, socket.socket] = {}
        for peer in range(rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(timeout)
            link.connect(addresses[peer])
            link.sendall(struct.pack("=I", rank))
            links[peer] = link
        for _ in range(rank + 1, world_size):
            link, _ = listener.accept()
            link.settimeout(timeout)
            (peer,) = struct.unpack("=I", link.recv(4, socket.MSG_WAITALL))
            links[peer] = link
        listener.close()
    return links
