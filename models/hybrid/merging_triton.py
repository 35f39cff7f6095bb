"""`merging.py` on a GPU, in one launch: every number is read once, and the sum written once.

Legend as in `merging.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Numbers that a program writes."""


@triton.jit(do_not_specialize=["queries"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    own, part, place, weights, out, queries,
    PARTS: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Programs: blocks of queries."""
    query = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)[None, :]
    there = query < queries
    inside = there[:, None] & (d < D)
    at = query[:, None] * D + d
    total = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        total *= tl.load(weights + query, mask=there, other=0.0)[:, None]
    for number in tl.static_range(PARTS):
        row = tl.load(place + number * queries.to(tl.int64) + query, mask=there, other=-1)
        chosen = inside & (row >= 0)[:, None]
        value = tl.load(part + row[:, None] * D + d, mask=chosen, other=0.0).to(tl.float32)
        if WEIGHTED:
            begin = weights + (number + 1) * queries.to(tl.int64)
            value *= tl.load(begin + query, mask=there, other=0.0)[:, None]
        total += value
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def merge_on_device(
    own_QD: Tensor, part_RD: Tensor, place_nQ: Tensor, weights_PQ: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `merging.merge`."""
    n, (Q, D) = len(place_nQ), own_QD.shape
    out_QD = torch.empty(Q, D, dtype=dtype, device=own_QD.device)
    wide = triton.next_power_of_2(D)
    rows = max(TILE // wide, 1)
    kernel: Any = _merge_kernel
    kernel[(triton.cdiv(Q, rows),)](
        own_QD.contiguous(), part_RD.contiguous(), place_nQ.contiguous(),
        out_QD if weights_PQ is None else weights_PQ.contiguous(), out_QD, Q,
        PARTS=n, WEIGHTED=weights_PQ is not None, D=D, ROWS=rows, WIDE=wide,
    )  # fmt: skip
    return out_QD
