"""The sums of `collectives.tide.sums` on a GPU: all sums of a call in one launch of few programs.

Addresses travel in a table, so any number of tensors, wherever they lie, take one launch; tables are
kept, since the allocator hands out the same addresses step after step. There is no more than one
program on a multiprocessor, so that small kernels of layers find room beside it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from collectives.tide.sums import Sum

BLOCK, WARPS = 16384, 16
"""Elements that a program adds at a time, and with how many warps: enough loads under way for the
memory's full rate with one program on a multiprocessor. Thousands of short programs reach it as well,
but every kernel that comes after them waits until the last has begun."""
TABLES = 4096
"""Kept at most; addresses that never settle are sent each time."""
VECTOR = 16
"""Bytes of the widest load."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    row, at, inside, MASKED: tl.constexpr, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr,
    SCALE: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, scale,
):  # fmt: skip
    total = tl.load(row).to(tl.pointer_type(OUT))
    if ALIGNED:
        total = tl.multiple_of(total, 16)
    value = tl.zeros(at.shape, tl.float32)
    for number in tl.static_range(PARTS):
        part = tl.load(row + 2 + number).to(tl.pointer_type(IN))
        if ALIGNED:
            part = tl.multiple_of(part, 16)
        if MASKED:
            loaded = tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        else:
            loaded = tl.load(part + at).to(tl.float32)
        value = loaded if number == 0 else value + loaded  # a first zero would lose the sign of -0
    if SCALE:
        value = value * scale
    if ACCUMULATE:
        if MASKED:
            value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) + value
        else:
            value = tl.load(total + at).to(tl.float32) + value
    if MASKED:
        tl.store(total + at, value.to(OUT), mask=inside)
    else:
        tl.store(total + at, value.to(OUT))


@triton.jit
def _all_sums(  # type: ignore[no-untyped-def]
    table, num_sums, scale, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, SCALE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every so many-th block of all blocks of all sums, counted through."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program  # this program's first block in the sum, as if the sums before were none
    for number in range(num_sums):
        row = table + number * (2 + PARTS)
        numel = tl.load(row + 1)
        whole = (numel // BLOCK).to(tl.int32)
        size = numel * 0 + BLOCK  # in 64 bits, as positions have to be
        for block in range(first, whole, programs):
            at = tl.multiple_of(block * size, BLOCK) + tl.arange(0, BLOCK)
            _tile(row, at, at < numel, False, PARTS, ACCUMULATE, SCALE, IN, OUT, ALIGNED, scale)
        rest = (numel - whole * size > 0).to(tl.int32)
        if (rest == 1) and (whole % programs == first):
            at = whole * size + tl.arange(0, BLOCK)
            _tile(row, at, at < numel, True, PARTS, ACCUMULATE, SCALE, IN, OUT, ALIGNED, scale)
        first = (first + programs - (whole + rest) % programs) % programs


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    table, num_sums, IN: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of one part each, under a name of their own for whoever reads a trace."""
    _all_sums(table, num_sums, 1.0, 1, False, False, IN, OUT, ALIGNED, BLOCK)


@triton.jit
def _add_up_kernel(  # type: ignore[no-untyped-def]
    table, num_sums, scale, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, SCALE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of a reduce-scatter."""
    _all_sums(table, num_sums, scale, PARTS, ACCUMULATE, SCALE, IN, OUT, ALIGNED, BLOCK)


def add_up_on_device(sums: Sequence[Sum], *, divide: float, accumulate: bool) -> None:
    """See `collectives.tide.sums.add_up`; division is by multiplication, as in torch's own kernels."""
    first = sums[0]
    # A column of blocks is packed first: the kernel reads one run of elements per part.
    packed = [[part.contiguous() for part in each.parts] for each in sums]
    rows = np.array(
        [
            (each.total.data_ptr(), each.total.numel(), *(part.data_ptr() for part in parts))
            for each, parts in zip(sums, packed, strict=True)
        ],
        np.int64,
    )
    types = (first.parts[0].dtype, first.total.dtype)
    add_up_rows(rows, *types, first.total.device, divide=divide, accumulate=accumulate)


def add_up_rows(
    rows: Any,
    source: torch.dtype,
    target: torch.dtype,
    device: torch.device,
    *,
    divide: float = 1.0,
    accumulate: bool = False,
) -> None:
    """The same for a NumPy table of int64, a row for each sum: where it goes, elements, its parts.

    All of it as addresses; each part is one run of elements of dtype `source`.
    """
    addresses = np.delete(rows, 1, axis=1)
    options = {
        "IN": TYPES[source],
        "OUT": TYPES[target],
        "ALIGNED": not (addresses % VECTOR).any(),
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    blocks = int((-(-rows[:, 1] // BLOCK)).sum())
    grid = (min(max(blocks, 1), _processors()),)
    table, parts = _table(rows, device), rows.shape[1] - 2
    if parts == 1 and divide == 1 and not accumulate:
        _cast_kernel[grid](table, len(rows), **options)
        return
    _add_up_kernel[grid](
        table, len(rows), 1.0 / divide, PARTS=parts, ACCUMULATE=accumulate, SCALE=divide != 1,
        **options,
    )  # fmt: skip


@cache
def _processors() -> int:
    """Programs at most: one for each multiprocessor."""
    if not torch.cuda.is_available():  # in the interpreter
        return 8
    return int(torch.cuda.get_device_properties().multi_processor_count)


@cache
def tables(device: torch.device) -> dict[Any, Tensor]:
    """Addresses of earlier sums that are still on the device, by their bytes."""
    return {}


def _table(rows: Any, device: torch.device) -> Tensor:
    """The addresses on the device, without waiting for it."""
    known, key = tables(device), (rows.shape, rows.tobytes())
    if key in known:
        return known[key]
    host = torch.from_numpy(rows)
    host = host.pin_memory() if device.type == "cuda" else host.clone()
    table = host.to(device, non_blocking=True)
    if len(known) < TABLES:
        known[key] = table
    return table
