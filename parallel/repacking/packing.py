"""Between tensors of heads and the flat buffer that an all-to-all sends or receives.

    parts    q [t, H, D]   k [t, K, D]   v [t, K, D]
    buffer   [ rank 0: t x (its q | its k | its v) | rank 1: t x (its q | its k | its v) | ... ]

`pack` copies each rank's heads into its block, and `unpack` is its transpose: it puts the heads back,
and adds up those that several ranks had, in the order of the ranks, so that the sum does not depend on
anything else. On a GPU each is one launch (`packing_triton.py`); here they are slices, which is also
what the kernels are tested against.

Legend: t rows, H query heads, K key/value heads, N heads of a block, D head dim.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from parallel.repacking.heads import Blocks


def pack(parts: Sequence[Tensor], blocks: Blocks) -> Tensor:
    """The buffer for `parts`, each (t, heads, D), with heads for several ranks copied for each."""
    if parts[0].device.type == "cuda":
        from parallel.repacking.packing_triton import pack_on_device  # triton comes with CUDA

        return pack_on_device(parts, blocks)
    return pack_by_slices(parts, blocks)


def unpack(buffer: Tensor, blocks: Blocks, t: int, D: int) -> list[Tensor]:
    """The parts, each (t, heads, D), from a buffer; sums in fp32 where the buffer is in less."""
    if buffer.device.type == "cuda":
        from parallel.repacking.packing_triton import unpack_on_device

        return unpack_on_device(buffer, blocks, t, D)
    return unpack_by_slices(buffer, blocks, t, D)


def pack_by_slices(parts: Sequence[Tensor], blocks: Blocks) -> Tensor:
    """See `pack`."""
    t, _, D = parts[0].shape
    buffer = parts[0].new_empty(t * num_columns(blocks) * D)
    for block, piece_tND in zip(blocks, _pieces(buffer, blocks, t, D), strict=True):
        slices = [part[:, begin:end] for part, (begin, end) in zip(parts, block, strict=True)]
        torch.cat(slices, dim=1, out=piece_tND)
    return buffer


def unpack_by_slices(buffer: Tensor, blocks: Blocks, t: int, D: int) -> list[Tensor]:
    """See `unpack`."""
    dtype = summed_in(buffer.dtype)
    totals = [buffer.new_empty(t, heads, D, dtype=dtype) for heads in num_heads(blocks)]
    done = [0] * len(totals)  # heads of each part that some rank has brought
    for block, piece_tND in zip(blocks, _pieces(buffer, blocks, t, D), strict=True):
        brought = piece_tND.split([end - begin for begin, end in block], dim=1)
        for part, (begin, end) in enumerate(block):
            first = min(max(done[part], begin), end)
            totals[part][:, begin:first] += brought[part][:, : first - begin]
            totals[part][:, first:end] = brought[part][:, first - begin :]
            done[part] = max(done[part], end)
    return [total.to(buffer.dtype) for total in totals]


def num_columns(blocks: Blocks) -> int:
    """Heads of all blocks: what one row has in the buffer."""
    return sum(end - begin for block in blocks for begin, end in block)


def num_heads(blocks: Blocks) -> list[int]:
    """Heads of each part."""
    return [max(end for _, end in ranges) for ranges in zip(*blocks, strict=True)]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """What heads are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _pieces(buffer: Tensor, blocks: Blocks, t: int, D: int) -> list[Tensor]:
    """Each rank's block of the buffer, (t, N, D)."""
    widths = [sum(end - begin for begin, end in block) for block in blocks]
    starts = accumulate(widths, initial=0)
    return [
        buffer[t * D * start : t * D * (start + N)].view(t, N, D)
        for start, N in zip(starts, widths, strict=False)
    ]
