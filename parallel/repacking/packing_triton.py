"""`packing.py` on a GPU: one launch for all parts and ranks, whatever their heads and strides.

A column is a head of a rank's block; tables say where each comes from and lies. They follow from the
number of heads and ranks alone, so they are sent to the device once, and a step only brings its rows.

Legend as in `packing.py`; `start` counts the columns of the blocks before a column's own.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.repacking.heads import Blocks
from parallel.repacking.packing import num_columns, num_heads, summed_in

TILE = 4096
"""Elements that a program copies."""
TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit(do_not_specialize=["rows"])
def _pack_kernel(  # type: ignore[no-untyped-def]
    part0, part1, part2, buffer, columns, rows, row0, row1, row2, head0, head1, head2,
    D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs: blocks of rows x columns."""
    column = tl.program_id(1)
    part, head = tl.load(columns + 4 * column), tl.load(columns + 4 * column + 1)
    start, N = tl.load(columns + 4 * column + 2), tl.load(columns + 4 * column + 3)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDE)[None, :]
    inside = (row < rows) & (d < D)
    if part == 0:
        value = tl.load(part0 + row * row0 + head * head0 + d, mask=inside)
    elif part == 1:
        value = tl.load(part1 + row * row1 + head * head1 + d, mask=inside)
    else:
        value = tl.load(part2 + row * row2 + head * head2 + d, mask=inside)
    tl.store(buffer + (start * rows + row * N + column - start) * D + d, value, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _unpack_kernel(  # type: ignore[no-untyped-def]
    part0, part1, part2, buffer, heads, columns, rows, heads0, heads1, heads2,
    SUM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs: blocks of rows x heads of all parts."""
    at = heads + 4 * tl.program_id(1)
    part, head, first, last = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDE)[None, :]
    inside = (row < rows) & (d < D)
    column, start = tl.load(columns + 3 * first), tl.load(columns + 3 * first + 1)
    N = tl.load(columns + 3 * first + 2)
    place = (start * rows + row * N + column - start) * D + d
    value = tl.load(buffer + place, mask=inside).to(SUM)
    for number in range(first + 1, last):
        column, start = tl.load(columns + 3 * number), tl.load(columns + 3 * number + 1)
        N = tl.load(columns + 3 * number + 2)
        place = (start * rows + row * N + column - start) * D + d
        value += tl.load(buffer + place, mask=inside).to(SUM)
    value = value.to(buffer.dtype.element_ty)
    if part == 0:
        tl.store(part0 + (row * heads0 + head) * D + d, value, mask=inside)
    elif part == 1:
        tl.store(part1 + (row * heads1 + head) * D + d, value, mask=inside)
    else:
        tl.store(part2 + (row * heads2 + head) * D + d, value, mask=inside)


def pack_on_device(parts: Sequence[Tensor], blocks: Blocks) -> Tensor:
    """See `parallel.repacking.packing.pack`."""
    t, _, D = parts[0].shape
    parts = [part if part.stride(2) == 1 else part.contiguous() for part in parts]
    three = [*parts, *parts, *parts][:3]
    buffer = parts[0].new_empty(t * num_columns(blocks) * D)
    columns, _ = tables(blocks, buffer.device)
    grid, tile = _tiles(t, D, num_columns(blocks))
    if buffer.numel():
        _pack_kernel[grid](
            *three, buffer, columns, t, *(part.stride(0) for part in three),
            *(part.stride(1) for part in three), **tile,
        )  # fmt: skip
    return buffer


def unpack_on_device(buffer: Tensor, blocks: Blocks, t: int, D: int) -> list[Tensor]:
    """See `parallel.repacking.packing.unpack`."""
    parts = [buffer.new_empty(t, heads, D) for heads in num_heads(blocks)]
    three = [*parts, *parts, *parts][:3]
    _, heads = tables(blocks, buffer.device)
    grid, tile = _tiles(t, D, sum(num_heads(blocks)))
    if buffer.numel():
        _unpack_kernel[grid](
            *three, buffer, heads[0], heads[1], t, *(part.shape[1] for part in three),
            SUM=TYPES[summed_in(buffer.dtype)], **tile,
        )  # fmt: skip
    return parts


def _tiles(t: int, D: int, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and what a program does."""
    wide = triton.next_power_of_2(D)
    rows = max(TILE // wide, 1)
    return (triton.cdiv(t, rows), columns), {"D": D, "ROWS": rows, "WIDE": wide}


@cache
def tables(blocks: Blocks, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """For packing: part, head, start and N of each column. For unpacking: part, head, first and last
    entry of each head in a second table, and that: column, start and N of all columns, head by head."""
    columns: list[tuple[int, int, int, int]] = []
    for block in blocks:
        start, N = len(columns), sum(end - begin for begin, end in block)
        for part, (begin, end) in enumerate(block):
            columns += [(part, head, start, N) for head in range(begin, end)]
    heads, order = [], list[tuple[int, int, int]]()
    for part, count in enumerate(num_heads(blocks)):
        for head in range(count):
            found = [(c, *row[2:]) for c, row in enumerate(columns) if row[:2] == (part, head)]
            heads.append((part, head, len(order), len(order) + len(found)))
            order += found
    return _upload(columns, device), (_upload(heads, device), _upload(order, device))


def _upload(rows: Sequence[Any], device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    host = torch.tensor(rows, dtype=torch.int64)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
