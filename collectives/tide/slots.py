"""Slots: regions of symmetric memory that hold one gathered layer each, and who may write when.

Every layer has its slot for good (the parameters look at that memory), several layers share one in
turn. A turn is a *tenancy*, numbered from 1:

    acquire   wait until every peer has released the tenancy before: then its memory may be written
    ...       peers write their shards into mine, I write mine into theirs, layers compute
    release   after the last use of the gathered layer, tell every peer that mine may be written

All ranks run the same program, so they agree on the numbers without talking about them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from collectives.symmetric.transport import Region, Transport

ALIGNMENT = 256
"""Bytes; tensors begin at multiples, which is what copy engines and vector loads like."""


class SlotError(RuntimeError):
    """A layer is gathered while its slot still holds another one: there are too few slots."""


@dataclass(frozen=True)
class Layout:
    """Where the gathered tensors of a layer lie in a slot.

    Tensor `t` has `world_size` shards of `shard_numels[t]` elements (padded, so that all are equal),
    one after the other: the gathered bytes are the parameter.
    """

    world_size: int
    shard_numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    """In bytes."""
    nbytes: int


def make_layout(world_size: int, shards: list[tuple[int, torch.dtype]]) -> Layout:
    """Place tensors, given each one's shard size in elements and dtype, in their order."""
    offsets, end = [], 0
    for numel, dtype in shards:
        offsets.append(end)
        end += -(-numel * world_size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    numels, dtypes = zip(*shards, strict=True)
    return Layout(world_size, numels, dtypes, tuple(offsets), max(end, ALIGNMENT))


@dataclass
class Slot:
    """One region, its number among the slots of a transport, and its present tenant."""

    transport: Transport
    region: Region
    index: int
    tenant: str | None = None
    tenancy: int = 0
    poison: bool = False
    """Overwrite released memory with NaN bytes, so that a stale alias is noticed."""
    peers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(self.transport.world_size)
        # Each rank begins with its neighbour, so that not all write to the same peer at once.
        self.peers = [(self.transport.rank + k) % len(ranks) for k in ranks if k]

    def acquire(self, tenant: str) -> None:
        """Begin a tenancy. Raises `SlotError`, and `PeerError` from the transport."""
        if self.tenant is not None:
            raise SlotError(
                f"{tenant} is gathered while {self.tenant} still uses slot {self.index}: set "
                "collectives.slots to more than the number of layers gathered at the same time"
            )
        self.tenant = tenant
        for peer in self.peers:
            self.transport.wait(peer, self._free, self.tenancy)
        self.tenancy += 1

    def announce(self, peer: int) -> None:
        """Tell `peer` that this rank's shards are in its memory."""
        self.transport.signal(peer, self._ready, self.tenancy)

    def wait_ready(self) -> None:
        """Until every peer has announced its shards."""
        for peer in self.peers:
            self.transport.wait(peer, self._ready, self.tenancy)

    def release(self) -> None:
        """End the tenancy: nothing here reads the gathered layer any more."""
        if self.poison:
            whole = self.region.tensor(self.transport.rank, 0, self.region.nbytes, torch.uint8)
            whole.fill_(0xFF)  # a NaN in every floating-point format
        self.tenant = None
        for peer in self.peers:
            self.transport.signal(peer, self._free, self.tenancy)

    @property
    def _ready(self) -> int:
        return 2 * self.index

    @property
    def _free(self) -> int:
        return 2 * self.index + 1

    def tensors(self, layout: Layout) -> list[Tensor]:
        """This rank's gathered tensors, each 1-D with a storage of its own."""
        return [
            self.region.tensor(self.transport.rank, offset, numel * layout.world_size, dtype)
            for numel, dtype, offset in zip(
                layout.shard_numels, layout.dtypes, layout.offsets, strict=True
            )
        ]

    def own_places(self, layout: Layout) -> tuple[list[Tensor], list[int]]:
        """Where this rank's shards go, and the byte offsets of these places.

        They have storages of their own, too: a write through the gathered tensors would count as a
        modification of the parameters, and autograd refuses those.
        """
        rank = self.transport.rank
        begins = [
            offset + rank * numel * dtype.itemsize
            for numel, dtype, offset in zip(
                layout.shard_numels, layout.dtypes, layout.offsets, strict=True
            )
        ]
        places = [
            self.region.tensor(rank, begin, numel, dtype)
            for numel, dtype, begin in zip(layout.shard_numels, layout.dtypes, begins, strict=True)
        ]
        return places, begins
