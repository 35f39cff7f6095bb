"""Causal attention to packed documents where long ones get a kernel call of their own.

torch's packed kernel is FlashAttention 2 (half of what a Hopper GPU can do); cuDNN's, behind
`scaled_dot_product_attention`, takes about half the time, but knows no packing here. cuDNN prepares a
plan for every length, so lengths are rounded up: rows behind a document's end are after all others, so
nobody sees them.

Legend: T rows, H query heads, K key/value heads, D head dim, L rows of one document.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.hybrid.documents import Documents

LONG = 4096
"""From so many rows on a call of one's own is worth it."""
ROUND = 512
HOPPER = (9, 0)
"""The least compute capability where cuDNN is faster."""
OTHERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Where cuDNN does not take something."""

Packed = Callable[[Tensor, Tensor, Tensor, Documents], Tensor]


class Run(NamedTuple):
    """Documents that are attended to together."""

    first: int
    """The first of them."""
    lengths: tuple[int, ...]
    alone: bool
    """Whether it is one long document."""


def runs(lengths: Sequence[int], long: int) -> list[Run]:
    """Long documents by themselves, and the ones between them together; empty runs are left out."""
    found, begin = [], 0
    for number, length in enumerate([*lengths, long]):
        if length >= long:
            if any(lengths[begin:number]):
                found.append(Run(begin, tuple(lengths[begin:number]), False))
            if number < len(lengths):
                found.append(Run(number, (length,), True))
            begin = number + 1
    return found


def attend_causally(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    documents: Documents,
    scale: float,
    packed: Packed,
    long: int = LONG,
) -> Tensor:
    """(T, H, D) of at least one row; `packed` attends to runs of documents shorter than `long`."""
    parts, outs = runs(documents.lengths, long), []
    sizes = [sum(run.lengths) for run in parts]
    rows = zip(parts, *(x.split(sizes) for x in (q_THD, k_TKD, v_TKD)), strict=True)
    for (first, lengths, alone), q, k, v in rows:
        if alone:
            outs.append(_attend_one(q, k, v, scale))
        else:
            bounds = documents.cu_seq_lens[first : first + len(lengths) + 1]
            outs.append(packed(q, k, v, Documents(lengths, bounds - bounds[0])))
    return torch.cat(outs)


def _attend_one(q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float) -> Tensor:
    L = len(q_LHD)
    more = -L % ROUND
    q_1HLD, k_1KLD, v_1KLD = (
        nn.functional.pad(x, (0, 0, 0, 0, 0, more)).transpose(0, 1)[None]
        for x in (q_LHD, k_LKD, v_LKD)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *OTHERS], set_priority=True):
        out_1HLD = nn.functional.scaled_dot_product_attention(
            q_1HLD, k_1KLD, v_1KLD, is_causal=True, scale=scale,
            enable_gqa=q_LHD.shape[1] != k_LKD.shape[1],
        )  # fmt: skip
    return out_1HLD[0].transpose(0, 1)[:L]


def is_faster(q_THD: Tensor) -> bool:
    """Whether calls of one's own are worth it here. cuDNN's gradients are not the same every time."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return _hopper(q_THD.device) and torch.backends.cuda.cudnn_sdp_enabled()


@cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= HOPPER
