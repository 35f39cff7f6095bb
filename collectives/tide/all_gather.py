"""TIDE all-gather: each rank casts its shards into their place in its slot, and writes them to the same
place at every peer. The gathered bytes are the parameters; nothing is copied in or out.

    own shards -> own slot -> neighbours on the node          (one write for all, with multicast)
                     |
                     v  along the rail, in ceil(log2(nodes)) steps, paced
                slot of a rank on another node -> its neighbours
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collectives.symmetric.transport import Put, Region
from collectives.tide.addresses import DTYPES, UNKNOWN, Table
from collectives.tide.layout import Block, Layout, Part, portions
from collectives.tide.rail import Rail
from collectives.tide.slots import Slot
from collectives.topology import doubling

SHARES = (1, 4)
"""Sizes of the portions that are cast and sent one after the other: while the first is on its way, the
others are cast, which takes a quarter of the time. A portion costs the host a moment."""


@dataclass
class Portion:
    """A part of a shard."""

    parts: list[Part]
    places: list[Tensor]
    """Where the parts go in this rank's own slot."""
    puts: Any
    """To the neighbours, as the link wants them."""
    table: Table | None
    """To cast it in one launch, where that can be done."""


@dataclass
class Gather:
    """How one layer is gathered into its slot; its addresses are worked out once.

    `members`, neighbours in the order of their shards, gather among themselves; None: the whole
    group does. `piece` is the largest put between nodes, `whole` what is not worth portions, in bytes.
    """

    slot: Slot
    layout: Layout
    rail: Rail | None = None
    piece: int = 1 << 23
    whole: int = 1 << 26
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
        own = self.layout.blocks(rank)
        shares = SHARES if sum(block.nbytes for block in own) > self.whole else SHARES[:1]
        self._own = [self._prepare(parts) for parts in portions(own, shares) if parts]

    def _prepare(self, parts: list[Part]) -> Portion:
        # Views of their own: a write through the gathered tensors would count as a modification of
        # the parameters, and autograd refuses those.
        local = self.slot.fabric.topology.local
        places = [part.block.view(self._region, local) for part in parts]
        puts = [
            _put(part.tensor, part.block, self.layout.offsets[part.tensor], peer)
            for peer in self._peers
            for part in parts
        ]
        link = self.slot.fabric.local
        table = None
        dtypes = {place.dtype for place in places}
        if link.on_stream and len(dtypes) == 1 and all(place.is_contiguous() for place in places):
            rows = [(place.data_ptr(), place.numel(), UNKNOWN) for place in places]
            begins = [part.begin for part in parts]
            table = Table.of(rows, [part.tensor for part in parts], begins, 0, None)
        return Portion(parts, places, link.prepare(puts, self._region), table)

    @torch.no_grad()
    def start(self, shards: Sequence[Tensor], tenant: str) -> None:
        """Write this rank's `shards` everywhere; `wait` completes the gather.

        A shard may have another dtype than its place in the slot: placing it is the cast.
        """
        local = self.slot.fabric.local
        self.slot.acquire(tenant)
        marks = []
        with local.aside():
            for portion in self._own:
                _cast(portion, shards)
                marks.append(local.mark())
        for portion, mark in zip(self._own, marks, strict=True):
            local.after(mark)
            if self._multicast:
                for part, place in zip(portion.parts, portion.places, strict=True):
                    local.put_all(place, self._region, part.block.offset, part.block.pitch)
            else:
                local.send(portion.puts, self.tensors)
        if self.members is None and self.slot.fabric.network is not None:
            self._travel()
        self.slot.announce(self._peers)

    def wait(self) -> None:
        """Until the whole layer is in this rank's slot."""
        self.slot.wait_ready(self._peers)

    def _spread(self, block: Block) -> None:
        """A block that has arrived, to the neighbours."""
        local = self.slot.fabric.local
        view = block.view(self._region, self.slot.fabric.topology.local)
        if self._multicast:
            local.put_all(view, self._region, block.offset, block.pitch)
            return
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
                self._spread(coming)
            self.rail.finish(step.target)

    def _pieces(self, nodes: Sequence[int]) -> Iterator[Block]:
        """The blocks of this rail's ranks on `nodes`, cut into puts."""
        topology = self.slot.fabric.topology
        for node in nodes:
            for block in self.layout.blocks(topology.member(node, topology.local)):
                yield from block.split(self.piece)


def _cast(portion: Portion, shards: Sequence[Tensor]) -> None:
    """Shards to their places."""
    dtypes = {shard.dtype for shard in shards}
    if portion.table is not None and len(dtypes) == 1 and dtypes.issubset(DTYPES):
        # Torch makes dozens of small launches, and each waits for multiprocessors beside a product.
        portion.table.add_up(shards, None, portion.places[0].dtype)
        return
    sources = [
        shards[part.tensor].view(-1)[part.begin : part.begin + place.numel()].view(place.shape)
        for part, place in zip(portion.parts, portion.places, strict=True)
    ]
    torch._foreach_copy_(portion.places, sources)


def _put(tensor: int, block: Block, start: int, peer: int) -> Put:
    """A block of a tensor that begins at byte `start`, from one slot to the same place in another."""
    size = block.dtype.itemsize
    step, width = block.pitch * size, block.width * size
    return Put(tensor, block.offset - start, block.rows, width, step, peer, block.offset, step)
