"""TIDE all-gather: each rank casts its shards into their place in its slot, and writes them to the same
place at every peer. The gathered bytes are the parameters; nothing is copied in or out.

    own shards -> own slot -> neighbours on the node          (one write for all, with multicast)
                     |
                     v  along the rail, in ceil(log2(nodes)) steps, paced
                slot of a rank on another node -> its neighbours
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collectives.symmetric.transport import Region
from collectives.tide.layout import Block, Layout
from collectives.tide.rail import Rail
from collectives.tide.slots import Slot
from collectives.tide.sums import cast
from collectives.topology import doubling


@dataclass
class Gather:
    """How one layer is gathered into its slot; its addresses are worked out once.

    `members`, neighbours in the order of their shards, gather among themselves; None: the whole
    group does. `piece` is the largest put between nodes, in bytes.
    """

    slot: Slot
    layout: Layout
    rail: Rail | None = None
    piece: int = 1 << 23
    members: list[int] | None = None
    tensors: list[Tensor] = field(init=False)
    """The gathered tensors, padded and 1-D."""

    def __post_init__(self) -> None:
        slot, topology = self.slot, self.slot.fabric.topology
        self._region: Region = slot.memory.local
        everyone = self.members is None
        self._peers = [p for p in topology.others if everyone or p in (self.members or ())]
        self._multicast = slot.fabric.local.multicast and everyone
        self.tensors = self.layout.tensors(self._region, topology.local)
        rank = topology.rank if self.members is None else self.members.index(topology.local)
        self._own = self.layout.blocks(rank)
        # Views of their own: a write through the gathered tensors would count as a modification of
        # the parameters, and autograd refuses those.
        self._places = [block.view(self._region, topology.local) for block in self._own]

    @torch.no_grad()
    def start(self, shards: Sequence[Tensor], tenant: str) -> None:
        """Write this rank's `shards` everywhere; `wait` completes the gather.

        A shard may have another dtype than its place in the slot: placing it is the cast.
        """
        self.slot.acquire(tenant)
        sources = [s.view(p.shape) for s, p in zip(shards, self._places, strict=True)]
        cast(sources, self._places)
        self._spread(zip(self._places, self._own, strict=True))
        if self.members is None and self.slot.fabric.network is not None:
            self._travel()
        self.slot.announce(self._peers)

    def wait(self) -> None:
        """Until the whole layer is in this rank's slot."""
        self.slot.wait_ready(self._peers)

    def _spread(self, blocks: Iterator[tuple[Tensor, Block]]) -> None:
        """From this rank's slot to those of its neighbours."""
        local = self.slot.fabric.local
        for view, block in blocks:
            if self._multicast:
                local.put_all(view, self._region, block.offset, block.pitch)
                continue
            for peer in self._peers:
                local.put(view, self._region, block.offset, peer, block.pitch)

    def _travel(self) -> None:
        """Along the rail: pass on what this rank holds, spread what arrives.

        Puts and arrivals alternate, piece by piece. All nodes do so, so a put waits for nothing but
        the arrivals of earlier pieces, and nobody waits in a circle.
        """
        topology, region = self.slot.fabric.topology, self.slot.memory.remote
        assert self.rail is not None
        assert region is not None
        for step in doubling(topology.node, topology.num_nodes):
            outgoing, incoming = self._pieces(step.sends), self._pieces(step.receives)
            for going, coming in zip(outgoing, incoming, strict=True):
                source = going.view(self._region, topology.local)
                self.rail.put(source, region, going.offset, step.target, going.pitch)
                self.rail.take(step.source)
                self._spread(iter([(coming.view(self._region, topology.local), coming)]))
            self.rail.finish(step.target)

    def _pieces(self, nodes: Sequence[int]) -> Iterator[Block]:
        """The blocks of this rail's ranks on `nodes`, cut into puts."""
        topology = self.slot.fabric.topology
        for node in nodes:
            for block in self.layout.blocks(topology.member(node, topology.local)):
                yield from block.split(self.piece)
