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
PIECES = 8
"""Puts of a block between nodes, at most. Several, since what arrives is passed on before the rest has
come; few, since each, with its signal and its credit, costs host and stream what megabytes take."""


@dataclass
class Portion:
    """A part of a shard."""

    parts: list[Part]
    places: list[Tensor]
    """Where the parts are cast to: their places in this rank's own slot, or what is kept of them."""
    puts: Any
    """From there to the neighbours, as the link wants them."""
    table: Table | None
    """To cast it in one launch, where that can be done."""
    mark: Any = None
    """When it had been cast."""


@dataclass
class Gather:
    """How one layer is gathered into its slot; its addresses are worked out once.

    `members`, neighbours in the order of their shards, gather among themselves; None: the whole
    group does. `piece` is the smallest put between nodes, `whole` what is not worth portions, in bytes.
    With `keep`, shards are cast into memory of their own, which is still there for another gather, and
    may be cast before their turn (`cast`).
    """

    slot: Slot
    layout: Layout
    rail: Rail | None = None
    piece: int = 1 << 24
    whole: int = 1 << 26
    members: list[int] | None = None
    keep: bool = False
    tensors: list[Tensor] = field(init=False)
    """The gathered tensors, padded and 1-D."""
    kept: list[Tensor] | None = field(init=False, default=None)
    """This rank's shards of them, packed."""

    def __post_init__(self) -> None:
        slot, topology = self.slot, self.slot.fabric.topology
        self._region: Region = slot.memory.local
        everyone = self.members is None
        self._peers = [p for p in topology.others if everyone or p in (self.members or ())]
        self._multicast = slot.fabric.local.multicast and everyone
        self.tensors = self.layout.tensors(self._region, topology.local)
        rank = topology.rank if self.members is None else self.members.index(topology.local)
        own = self.layout.blocks(rank)
        if self.keep:
            self.kept = [
                torch.empty(block.rows * block.width, dtype=block.dtype, device=whole.device)
                for block, whole in zip(own, self.tensors, strict=True)
            ]
        shares = SHARES if sum(block.nbytes for block in own) > self.whole else SHARES[:1]
        self._own = [self._prepare(parts) for parts in portions(own, shares) if parts]
        whole = [Part(tensor, 0, block) for tensor, block in enumerate(own)]
        puts = [self._put(part, topology.local) for part in whole] if self.keep else []
        self._into_own = slot.fabric.local.prepare(puts, self._region)

    def _prepare(self, parts: list[Part]) -> Portion:
        link, local = self.slot.fabric.local, self.slot.fabric.topology.local
        if self.kept is not None:
            places = [_run(self.kept[part.tensor], part) for part in parts]
        else:
            # Views of their own: a write through the gathered tensors would count as a modification of
            # the parameters, and autograd refuses those.
            places = [part.block.view(self._region, local) for part in parts]
        puts = [self._put(part, peer) for peer in self._peers for part in parts]
        table = None
        dtypes = {place.dtype for place in places}
        if link.on_stream and len(dtypes) == 1 and all(place.is_contiguous() for place in places):
            rows = [(place.data_ptr(), place.numel(), UNKNOWN) for place in places]
            begins = [part.begin for part in parts]
            table = Table.of(rows, [part.tensor for part in parts], begins, 0, None)
        return Portion(parts, places, link.prepare(puts, self._region), table)

    def _put(self, part: Part, peer: int) -> Put:
        """A part of the shard, to its place in a slot."""
        block = part.block
        size = block.dtype.itemsize
        width, pitch = block.width * size, block.pitch * size
        if self.keep:
            begin, step = part.begin * size, width
        else:
            begin, step = block.offset - self.layout.offsets[part.tensor], pitch
        return Put(part.tensor, begin, block.rows, width, step, peer, block.offset, pitch)

    @torch.no_grad()
    def cast(self, shards: Sequence[Tensor]) -> None:
        """Cast this rank's `shards` to where the puts take them from; beside what else is done.

        A shard may have another dtype than its place in the slot: placing it is the cast.
        """
        local = self.slot.fabric.local
        if self.keep:
            local.flush()  # what is kept may still be on its way
        with local.aside():
            for portion in self._own:
                _cast(portion, shards)
                portion.mark = local.mark()

    @torch.no_grad()
    def start(self, shards: Sequence[Tensor] | None, tenant: str) -> None:
        """Write this rank's `shards` everywhere; `wait` completes the gather.

        None: those that were cast last, and kept.
        """
        local = self.slot.fabric.local
        self.slot.acquire(tenant)
        if shards is not None:
            self.cast(shards)
        sources = self.kept if self.kept is not None else self.tensors
        own = None
        if self.keep and not self._multicast:
            with local.aside():  # after the cast
                local.send(self._into_own, sources)
                own = local.mark()
            if self.slot.fabric.network is not None:
                local.after(own)  # what travels is taken from the slot
        for portion in self._own:
            local.after(portion.mark)
            if self._multicast:
                for part, place in zip(portion.parts, portion.places, strict=True):
                    local.put_all(place, self._region, part.block.offset, part.block.pitch)
            else:
                local.send(portion.puts, sources)
        if self.members is None and self.slot.fabric.network is not None:
            self._travel()
        self.slot.announce(self._peers)
        local.after(own)

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

        Puts and arrivals alternate, piece by piece, with puts some pieces ahead: so the next one is
        under way while this rank waits for an arrival. They are ahead by half of what may be in flight,
        so the peer has taken what a put needs the credit of before it waits for that put. All nodes do
        so: a put waits for nothing but the arrivals of earlier pieces, and nobody waits in a circle.
        """
        topology, region = self.slot.fabric.topology, self.slot.memory.remote
        assert self.rail is not None
        assert region is not None
        for step in doubling(topology.node, topology.num_nodes):
            outgoing, incoming = list(self._pieces(step.sends)), list(self._pieces(step.receives))
            assert len(outgoing) == len(incoming)
            ahead = max(self.rail.in_flight // 2, 1)
            for number in range(len(outgoing) + ahead - 1):
                if number < len(outgoing):
                    going = outgoing[number]
                    source = going.view(self._region, topology.local)
                    self.rail.put(source, region, going.offset, step.target, going.pitch)
                if number >= ahead - 1:
                    self.rail.take(step.source)
                    self._spread(incoming[number - ahead + 1])
            self.rail.finish(step.target)

    def _pieces(self, nodes: Sequence[int]) -> Iterator[Block]:
        """The blocks of this rail's ranks on `nodes`, cut into puts."""
        topology = self.slot.fabric.topology
        for node in nodes:
            for block in self.layout.blocks(topology.member(node, topology.local)):
                yield from block.split(max(self.piece, -(-block.nbytes // PIECES)))


def _cast(portion: Portion, shards: Sequence[Tensor]) -> None:
    """Shards to their places."""
    dtypes = {shard.dtype for shard in shards}
    if portion.table is not None and len(dtypes) == 1 and dtypes.issubset(DTYPES):
        # Torch makes dozens of small launches, and each waits for multiprocessors beside a product.
        portion.table.add_up(shards, None, portion.places[0].dtype)
        return
    sources = [_run(shards[part.tensor].view(-1), part) for part in portion.parts]
    torch._foreach_copy_(portion.places, sources)


def _run(flat: Tensor, part: Part) -> Tensor:
    """A part of a packed shard."""
    rows, width = part.block.rows, part.block.width
    return flat[part.begin : part.begin + rows * width].view(rows, width)
