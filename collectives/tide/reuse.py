"""Slot-Reuse: a layer's gradients, all at once, through the slots that the layer has just vacated.

A slot holds a stream for each node and, within it, each rank of this one: exactly the layer's size.
Neighbours put everything there before anything is summed or crosses, in a few groups, each announced
for itself: while one is summed, the next is on its way.

This rank's own part goes there as well, so that the gradients are free at once; on a device, whose
streams order the reads, it is summed where it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from collectives.tide.addresses import UNKNOWN, Table
from collectives.tide.layout import Piece
from collectives.tide.reduction import Reduction
from collectives.tide.slots import Slot, stamp, wait_stamped
from collectives.tide.sums import Sum, add_up

if TYPE_CHECKING:
    from collectives.tide.reduce_scatter import ReduceScatter

SHARES = (2, 1)
"""Sizes of the groups; a channel for each. The last is small: nothing hides its sum at the end."""
GROUPS = len(SHARES)
WHOLE = 1 << 26
"""Bytes that one rank receives from another that are not worth groups."""


@dataclass(frozen=True)
class Group:
    """A run of every stream."""

    begin: int
    end: int
    puts: Any
    """To all neighbours, and to this rank, as the link wants them."""
    sums: list[tuple[Piece, list[Tensor | None]]]
    """This rank's pieces with what every rank of the node has of them; None: the gradient itself."""
    table: Table | None
    """The same, where every piece is one run of elements."""


def fits(reduce: "ReduceScatter", slot: Slot, todo: Reduction) -> bool:
    """Whether the slot has room for what all neighbours put at once."""
    streams = reduce.topology.world_size * todo.numel
    return streams * todo.dtype.itemsize <= slot.memory.nbytes


def reduce_through(slot: Slot, reduce: "ReduceScatter", todo: Reduction) -> None:
    """Reduce as another tenant of `slot`, which has to be vacant and large enough."""
    link = reduce.fabric.local
    in_place = link.on_stream and reduce.crossing is None
    groups = _groups(slot, reduce, todo, in_place)
    slot.acquire(todo.tenant)
    reduce.reuses += 1
    for number, group in enumerate(groups):
        link.send(group.puts, todo.grads)
        for peer in reduce.neighbours:
            link.signal(peer, reduce.groups + number, stamp(reduce.reuses, todo.tenant))
        if in_place:
            with link.aside():
                _await(reduce, number, todo.tenant)
                _sum_in_place(todo, group)
    if not in_place:
        link.flush()
        todo.grads.clear()  # all have been read: their memory is free from here on
        for number, group in enumerate(groups):
            _await(reduce, number, todo.tenant)
            _sum_and_cross(slot, reduce, todo, group)
    with link.aside():
        slot.release()


def _groups(
    slot: Slot, reduce: "ReduceScatter", todo: Reduction, in_place: bool
) -> Sequence[Group]:
    """Worked out once for each set of gradients: their addresses change, nothing else does."""
    key = (slot.index, todo.dtype, tuple(todo.cuts))
    if key not in reduce.known:
        shares = SHARES if todo.numel * todo.dtype.itemsize > WHOLE else SHARES[:1]
        ends = [todo.numel * sum(shares[: n + 1]) // sum(shares) for n in range(len(shares))]
        reduce.known[key] = [
            _group(slot, reduce, todo, in_place, begin, end)
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
    return reduce.known[key]


def _group(
    slot: Slot, reduce: "ReduceScatter", todo: Reduction, in_place: bool,
    begin: int, end: int,
) -> Group:  # fmt: skip
    stream = todo.numel * todo.dtype.itemsize
    link, region, local = reduce.fabric.local, slot.memory.local, reduce.local
    size, nodes = reduce.topology.node_size, reduce.topology.num_nodes
    puts = [
        todo.put(piece, peer, (step * size + local) * stream)
        for peer in [*reduce.neighbours, *([] if in_place else [local])]
        for step in range(nodes)
        for piece in todo.pieces(reduce.member(step, peer), begin, end)
    ]
    sums: list[tuple[Piece, list[Tensor | None]]] = []
    for piece in todo.pieces(reduce.topology.rank, begin, end) if in_place else ():
        staged: list[Tensor | None] = [None] * size
        for peer in reduce.neighbours:
            place = peer * stream + piece.target * todo.dtype.itemsize
            run = region.tensor(local, place, piece.numel, todo.dtype)
            staged[peer] = run.view(piece.rows, piece.width)
        sums.append((piece, staged))
    return Group(begin, end, link.prepare(puts, region), sums, _table(sums, todo, local))


def _table(
    sums: list[tuple[Piece, list[Tensor | None]]], todo: Reduction, local: int
) -> Table | None:
    if not sums or any(piece.rows > 1 for piece, _ in sums):
        return None
    rows = [
        [UNKNOWN, piece.numel, *(UNKNOWN if part is None else part.data_ptr() for part in staged)]
        for piece, staged in sums
    ]
    pieces = [piece for piece, _ in sums]
    begins = [piece.source for piece in pieces]
    targets = [todo.target_begin(piece) for piece in pieces]
    return Table.of(rows, [piece.tensor for piece in pieces], begins, local, targets)


def _await(reduce: "ReduceScatter", number: int, tenant: str) -> None:
    for peer in reduce.neighbours:
        channel = reduce.groups + number
        wait_stamped(reduce.fabric.local, peer, channel, reduce.reuses, tenant)


def _sum_in_place(todo: Reduction, group: Group) -> None:
    dtypes = {target.dtype for target in todo.targets}
    if group.table is not None and len(dtypes) == 1:
        group.table.add_up(
            todo.grads, todo.targets, dtypes.pop(), divide=todo.divide, accumulate=todo.accumulate
        )
        return
    sums = []
    for piece, staged in group.sums:
        own = todo.gradient(piece)
        parts = [own if part is None else part for part in staged]
        sums.append(Sum(parts, todo.target(piece)))
    add_up(sums, None, divide=todo.divide, accumulate=todo.accumulate)


def _sum_and_cross(slot: Slot, reduce: "ReduceScatter", todo: Reduction, group: Group) -> None:
    region, size = slot.memory.local, reduce.topology.node_size
    stream = todo.numel * todo.dtype.itemsize
    for begin, end, step in reduce.turns(todo, group.begin, group.end):
        staged: list[Tensor | None] = [
            region.tensor(
                reduce.local,
                (step * size + peer) * stream + begin * todo.dtype.itemsize,
                end - begin,
                todo.dtype,
            )
            for peer in range(size)
        ]
        reduce.sum_and_cross(todo, begin, end, step, staged)
