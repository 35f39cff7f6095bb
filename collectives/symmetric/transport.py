"""What a transport of symmetric memory can do; collectives are written against this alone."""

from typing import Protocol

import torch
from torch import Tensor


class PeerError(RuntimeError):
    """A peer is gone, or did not signal in time; the message names it."""


class Region(Protocol):
    """One allocation: the same number of bytes on every rank of the group."""

    @property
    def nbytes(self) -> int:
        """On each rank."""
        ...

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements in `rank`'s part from byte `offset` on, 1-D, with a storage of its own.

        Its own, because FSDP2 takes a parameter's storage to begin where the parameter does.
        """
        ...


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
