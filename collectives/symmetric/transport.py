"""What a transport of symmetric memory can do; collectives are written against this alone."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class PeerError(RuntimeError):
    """A peer is gone, or did not signal in time; the message names it."""


@dataclass(frozen=True)
class Region:
    """One allocation: the same number of bytes on every rank of the group."""

    views: list[Tensor]
    """By rank: the rank's bytes as a 1-D uint8 tensor, `views[own rank]` being local memory."""

    @property
    def nbytes(self) -> int:
        """Bytes on each rank."""
        return self.views[0].numel()


class Transport(Protocol):
    """Bytes and flags between the ranks of one group.

    A flag is a pair of a peer and a channel; its value only grows. Whoever sees a value also sees
    every byte that the peer put before it signalled that value.
    """

    rank: int
    world_size: int

    def allocate(self, nbytes: int) -> Region:
        """The same region on every rank; all ranks call it, in the same order."""
        ...

    def put(self, source: Tensor, region: Region, offset: int, peer: int) -> None:
        """Copy contiguous `source` to byte `offset` of `peer`'s part of `region`."""
        ...

    def signal(self, peer: int, channel: int, value: int) -> None:
        """Raise the flag that `peer` sees from this rank on `channel` to `value`."""
        ...

    def wait(self, peer: int, channel: int, value: int) -> None:
        """Until `peer` has signalled at least `value` on `channel`. Raises `PeerError`."""
        ...

    def close(self) -> None:
        """Give everything back; no other call may follow."""
        ...
