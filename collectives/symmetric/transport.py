"""What transports can do; the collectives are written against these protocols alone.

A flag is a pair of a peer and a channel; its value only grows. Whoever sees a value also sees every
byte that the peer put before it signalled that value.

On a device, everything is ordered by its current stream, and waiting holds that stream; elsewhere the
caller's own order is all there is, and waiting holds the caller.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class PeerError(RuntimeError):
    """A peer is gone, or did not signal in time; the message names it."""


def silent(peer: int, rank: int, seconds: float, about: str = "") -> PeerError:
    """The error of global rank `rank` that has waited in vain for `peer`."""
    what = f" ({about})" if about else ""
    return PeerError(f"rank {peer} did not signal rank {rank} within {seconds:g} s{what}")


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


@dataclass(frozen=True)
class Put:
    """Rows of one of several sources on their way to a peer; everything is in bytes."""

    source: int
    """Which of the sources."""
    begin: int
    """Where the first row begins in the source, which is contiguous."""
    rows: int
    width: int
    step: int
    """From one row to the next in the source."""
    peer: int
    offset: int
    """Where the first row goes in the peer's part of the region."""
    pitch: int
    """From one row to the next there."""


class Link(Protocol):
    """Bytes and flags between this rank and its peers, which are numbered from 0."""

    rank: int
    world_size: int

    def signal(self, peer: int, channel: int, value: int) -> None:
        """Raise the flag that `peer` sees from this rank on `channel` to `value`."""
        ...

    def wait(self, peer: int, channel: int, value: int, about: str = "") -> int | None:
        """Until `peer` has signalled at least `value` on `channel`; the value seen, if it is known.

        `about` says what is waited for. Raises `PeerError`, where the caller is held.
        """
        ...

    def mark(self) -> Any:
        """This moment, to be waited for elsewhere."""
        ...

    def after(self, mark: Any) -> None:
        """What follows here comes after `mark`; None: after anything."""
        ...

    def flush(self) -> None:
        """Until no put reads its source any more."""
        ...

    def close(self) -> None:
        """Give everything back; no other call may follow."""
        ...


class SymmetricMemory(Link, Protocol):
    """The ranks of one node: each sees, and writes into, the memory of the others."""

    on_stream: bool
    """Whether everything is ordered by a device's current stream, not by the caller."""
    multicast: bool
    """Whether `put_all` is one write; without it, collectives put to each peer in turn."""
    beside: Any
    """The stream of `aside`; None where there are no streams."""

    def put(
        self, source: Tensor, region: Region, offset: int, peer: int, pitch: int | None = None
    ) -> None:
        """Copy `source` to byte `offset` of `peer`'s part of `region`.

        `source` is contiguous, or has rows that are; rows arrive `pitch` elements apart (None: one
        right after the other). It may be read until `flush` has returned.
        """
        ...

    def allocate(self, nbytes: int) -> Region:
        """The same region on every rank; all ranks call it, in the same order."""
        ...

    def put_all(
        self, source: Tensor, region: Region, offset: int, pitch: int | None = None
    ) -> None:
        """`put` to every rank at once, this one included."""
        ...

    def prepare(self, puts: Sequence[Put], region: Region) -> Any:
        """What `send` needs to know of puts that are made again and again."""
        ...

    def send(self, prepared: Any, sources: Sequence[Tensor]) -> None:
        """Do the puts that were prepared, in their order, out of `sources` (contiguous, 1-D).

        Those to this rank itself are over for whatever follows.
        """
        ...

    def aside(self) -> AbstractContextManager[None]:
        """What is done inside comes after everything before it, but holds up nothing after it.

        `mark` inside, and `after` outside, where something has to wait for it.
        """
        ...


class Network(Link, Protocol):
    """Ranks of different nodes: memory that they have registered may be put into, not looked at.

    As with remote direct memory access, sources must lie in registered memory, too. A network may know
    no more of a flag than how often it was raised, so **every signal is waited for, one by one**, in
    the order in which the peer gives them on a channel.
    """

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
        """`SymmetricMemory.put`, and a signal that it has arrived."""
        ...

    def register(self, memory: Tensor) -> Region:
        """Let peers put into `memory` (bytes, 1-D); all ranks call it, in the same order."""
        ...
