"""TIDE reduce-scatter: reads gradients where autograd left them, moves them in their own dtype, and
sums them in fp32 in a fixed order.

The shard that a rank keeps is one stream (see `layout.Piece`), cut into chunks. For each chunk there
is a turn for each node of the group, the own one first:

    read    put my part of the chunk, for that node's rank of each rail, into the neighbour on the rail
    sum     add what the neighbours put here, in rank order: this node's share for that node
    cross   send the share along the rail (own turn: keep it), add the share that came from the
            node as far away in the other direction

So the sum of a shard begins with its own node, goes on with the node before, and so on around; on one
node it is the order of the ranks.

Memory for that is constant: `DEPTH` buffers of each kind, whatever the size of a layer and the number
of nodes. With a vacated all-gather slot to stage in (Slot-Reuse), everything is read at once, before
anything is summed or crosses, and the gradients are free sooner.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives.symmetric.fabric import Fabric
from collectives.tide.crossing import Crossing
from collectives.tide.layout import ALIGNMENT, Cut, Piece
from collectives.tide.reduction import Reduction
from collectives.tide.reuse import GROUPS, Group, fits, reduce_through
from collectives.tide.slots import Slot, stamp, wait_stamped
from collectives.tide.sums import Sum, add_up
from collectives.topology import Topology

DEPTH = 2
"""Staging buffers of a kind: one is filled while the other is read."""
FP32 = torch.float32.itemsize


def staging_size(topology: Topology, chunk: int) -> int:
    """Bytes that staging takes on a node, for chunks of so many elements of two bytes."""
    return max(DEPTH * (topology.node_size - 1) * _part(chunk), ALIGNMENT)


def _part(chunk: int) -> int:
    return -(-2 * chunk // ALIGNMENT) * ALIGNMENT


class ReduceScatter:
    """Reduce-scatters of one group, one after the other, through staging of constant size.

    `chunk` is in elements of two bytes. Channels from `first_channel` on are its own.
    """

    def __init__(self, fabric: Fabric, chunk: int, first_channel: int) -> None:
        self.fabric, self.topology, self.chunk = fabric, fabric.topology, chunk
        self.channel, self.turns_taken = first_channel, 0
        self.local, self.neighbours = self.topology.local, self.topology.others
        self.part_nbytes = _part(chunk)
        self.staging = fabric.allocate(staging_size(self.topology, chunk))
        self.scratch = None if fabric.local.on_stream else torch.empty(chunk)
        self.groups, self.reuses = first_channel + 2 * DEPTH, 0
        self.known: dict[Any, list[Group]] = {}
        """What `reduce_through` has worked out."""
        self.crossing = None
        if fabric.reducing is not None:
            device = self.staging.local.tensor(self.local, 0, 0, torch.uint8).device
            self.total = torch.empty(chunk, device=device)
            self.crossing = Crossing(fabric, chunk * FP32, DEPTH, self.groups + GROUPS)

    @property
    def staging_nbytes(self) -> int:
        """Symmetric memory of this object on each rank."""
        return self.staging.nbytes + (self.crossing.nbytes if self.crossing else 0)

    @torch.no_grad()
    def __call__(
        self,
        grads: list[Tensor],
        cuts: Sequence[Cut],
        targets: Sequence[Tensor],
        *,
        divide: float = 1.0,
        accumulate: bool = False,
        slot: Slot | None = None,
        tenant: str = "",
    ) -> None:
        """Sum `grads` over the group, divide, and store (or add) this rank's parts in `targets`.

        `grads` have one dtype, and are contiguous or else copied; the list is emptied, and they are
        let go as soon as they have been read. `targets` are 1-D, without padding, of any floating
        dtype. `slot` is staged in if it is vacant and large enough. `tenant` names what is reduced:
        peers that reduce something else are an `OrderError`.
        """
        flat = [grad.reshape(-1) for grad in grads]
        grads.clear()
        size = self.topology.world_size
        todo = Reduction(flat, cuts, targets, size, divide, accumulate, tenant)
        if slot is not None and slot.tenant is None and fits(self, slot, todo):
            reduce_through(slot, self, todo)
        else:
            self._through_staging(todo)

    def _through_staging(self, todo: Reduction) -> None:
        """Chunk by chunk; gradients are read until the last."""
        link = self.fabric.local
        for begin, end, step in self.turns(todo, 0, todo.numel):
            buffer, turn = self.turns_taken % DEPTH, self.turns_taken // DEPTH + 1
            data, read = self.channel + 2 * buffer, self.channel + 2 * buffer + 1
            for peer in self.neighbours:
                link.wait(peer, read, turn - 1, todo.tenant)
            link.send(self._puts(todo, begin, end, step, buffer), todo.grads)
            for peer in self.neighbours:
                link.signal(peer, data, stamp(turn, todo.tenant))
            with link.aside():
                for peer in self.neighbours:
                    wait_stamped(link, peer, data, turn, todo.tenant)
                staged: list[Tensor | None] = [None] * self.topology.node_size
                for peer in self.neighbours:
                    place = self._place(buffer, peer, self.local)
                    region = self.staging.local
                    staged[peer] = region.tensor(self.local, place, end - begin, todo.dtype)
                self.sum_and_cross(todo, begin, end, step, staged)
                for peer in self.neighbours:
                    link.signal(peer, read, turn)
            self.turns_taken += 1
        link.flush()  # whoever called may now free or overwrite the gradients

    def _puts(self, todo: Reduction, begin: int, end: int, step: int, buffer: int) -> Any:
        """My parts of a turn, into the neighbours' staging."""
        puts = [
            todo.put(
                piece, peer, self._place(buffer, self.local, peer) - begin * todo.dtype.itemsize
            )
            for peer in self.neighbours
            for piece in todo.pieces(self.member(step, peer), begin, end)
        ]
        return self.fabric.local.prepare(puts, self.staging.local)

    def turns(self, todo: Reduction, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Begin and end of each chunk of a run, and how many nodes on its receiver is."""
        chunk = min(self.chunk, max(self.part_nbytes // todo.dtype.itemsize, 1))
        for at in range(begin, end, chunk):
            for step in range(self.topology.num_nodes):
                yield at, min(at + chunk, end), step

    def member(self, step: int, local: int) -> int:
        """The rank at place `local`, `step` nodes on."""
        node = (self.topology.node + step) % self.topology.num_nodes
        return self.topology.member(node, local)

    def _place(self, buffer: int, source: int, target: int) -> int:
        """Byte offset, in `target`'s staging, of what `source` puts into `buffer`."""
        order = source - (source > target)  # a rank has no place for what it puts itself
        return (buffer * (self.topology.node_size - 1) + order) * self.part_nbytes

    def sum_and_cross(
        self,
        todo: Reduction,
        begin: int,
        end: int,
        step: int,
        staged: Sequence[Tensor | None],
    ) -> None:
        """What one turn does with the neighbours' parts of a chunk; None is this rank's own."""
        own, numel = self.member(step, self.local), end - begin
        finish = partial(
            add_up, scratch=self.scratch, divide=todo.divide, accumulate=todo.accumulate
        )
        if self.crossing is None:
            sums = [
                Sum(self._parts(todo, piece, begin, staged), todo.target(piece))
                for piece in todo.pieces(own, begin, end)
            ]
            finish(sums)
            return
        single = len(staged) == 1  # nothing is summed here: nodes exchange the gradients' own dtype
        wire = todo.dtype if single else torch.float32
        share = self.total[:numel] if step == 0 else self.crossing.outgoing(numel, wire)
        sums = [
            Sum(self._parts(todo, piece, begin, staged), share[_span(piece, begin)])
            for piece in todo.pieces(own, begin, end)
        ]
        add_up(sums, self.scratch)
        if step:
            self.total[:numel].add_(self.crossing.exchange(step, numel, wire))
            self.crossing.acknowledge()
        if step == self.topology.num_nodes - 1:
            mine = todo.pieces(self.topology.rank, begin, end)
            sums = [Sum([self.total[_span(piece, begin)]], todo.target(piece)) for piece in mine]
            finish(sums)

    def _parts(
        self, todo: Reduction, piece: Piece, begin: int, staged: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """What each rank of the node has of a piece; None is this rank, whose part is no copy."""
        at, shape = _span(piece, begin), (piece.rows, piece.width)
        return [todo.gradient(piece) if p is None else p[at].view(shape) for p in staged]


def _span(piece: Piece, begin: int) -> slice:
    """Where a piece lies in a chunk that begins there."""
    return slice(piece.target - begin, piece.target - begin + piece.numel)
