"""Slots: regions that hold one layer each, and who may write when.

Every layer has its slot for good (its parameters look at that memory), several layers share one in
turn. A turn is a *tenancy*, numbered from 1:

    acquire   wait until every peer has released the tenancy before: then its memory may be written
    ...       peers write into mine, I write into theirs, layers compute
    release   after the last use of what arrived, tell every peer that mine may be written

All ranks run the same program, so they agree on the numbers without talking about them. A flag
carries a mark of the tenant beside the number, so ranks that do run different programs find out.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from collectives.symmetric.fabric import Fabric, Memory
from collectives.symmetric.transport import Link
from collectives.topology import doubling

MARK_BITS = 16


class SlotError(RuntimeError):
    """A layer is gathered while its slot still holds another one: there are too few slots."""


class OrderError(RuntimeError):
    """Another rank does not do what this one does."""


def stamp(count: int, tenant: str) -> int:
    """A flag's value: a number that grows, and a mark of what it is about."""
    return count << MARK_BITS | zlib.crc32(tenant.encode()) & (1 << MARK_BITS) - 1


def wait_stamped(link: Link, peer: int, channel: int, count: int, tenant: str) -> None:
    """Until `peer` has signalled `count`. Raises `OrderError` if it was about something else.

    Where only a device sees the flag, nobody compares.
    """
    seen = link.wait(peer, channel, count << MARK_BITS, tenant)
    if seen is not None and seen >> MARK_BITS == count and seen != stamp(count, tenant):
        raise OrderError(
            f"ranks are at different places: here {tenant}, at peer {peer} of rank {link.rank} "
            "something else. All ranks must run the same layers in the same order and have gradients "
            "for the same parameters (see FSDPModule.set_reduce_scatter_unused_params)"
        )


@dataclass
class Slot:
    """One memory, its number among the slots of a fabric, and its present tenant."""

    fabric: Fabric
    memory: Memory
    index: int
    poison: bool = False
    """Overwrite released memory with NaN bytes, so that a stale alias is noticed."""
    tenant: str | None = None
    tenancy: int = 0
    _last: str = ""
    _released: Any = None
    _links: list[tuple[Link, int]] = field(init=False)
    """Everybody that writes into this rank's memory, or that it writes to."""

    def __post_init__(self) -> None:
        topology, network = self.fabric.topology, self.fabric.network
        self._links = [(self.fabric.local, peer) for peer in topology.others]
        if network is not None:
            steps = doubling(topology.node, topology.num_nodes)
            peers = {step.target for step in steps} | {step.source for step in steps}
            self._links += [(network, peer) for peer in sorted(peers)]

    def acquire(self, tenant: str) -> None:
        """Begin a tenancy. Raises `SlotError`, `OrderError`, and `PeerError` from the transport.

        It waits for every peer, not only for the one that is written to first: a peer that still
        sends from its memory has not released it.
        """
        if self.tenant is not None:
            raise SlotError(
                f"{tenant} is gathered while {self.tenant} still uses slot {self.index}: set "
                "collectives.slots to more than the number of layers gathered at the same time"
            )
        if self.tenancy:
            self.fabric.local.after(self._released)  # this rank's own last use
        for link, peer in self._links:
            if self.tenancy:
                wait_stamped(link, peer, self._free, self.tenancy, self._last)
        self.tenant, self._last = tenant, tenant
        self.tenancy += 1

    def announce(self, peers: Sequence[int]) -> None:
        """Tell neighbours that everything from this rank is in their memory."""
        for peer in peers:
            self.fabric.local.signal(peer, self._ready, stamp(self.tenancy, self._last))

    def wait_ready(self, peers: Sequence[int]) -> None:
        """Until neighbours have announced."""
        for peer in peers:
            wait_stamped(self.fabric.local, peer, self._ready, self.tenancy, self._last)

    def release(self) -> None:
        """End the tenancy: nothing here reads what arrived any more."""
        if self.poison:
            self.fabric.local.flush()  # peers are still sent what lies here
            own = self.fabric.local.rank
            whole = self.memory.local.tensor(own, 0, self.memory.nbytes, torch.uint8)
            whole.fill_(0xFF)  # a NaN in every floating-point format
        self.tenant, self._released = None, self.fabric.local.mark()
        for link, peer in self._links:
            link.signal(peer, self._free, stamp(self.tenancy, self._last))

    @property
    def _ready(self) -> int:
        return 2 * self.index

    @property
    def _free(self) -> int:
        return 2 * self.index + 1


def channels_of(num_slots: int) -> int:
    """Channels that slots use; others begin there."""
    return 2 * num_slots
