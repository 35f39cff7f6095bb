"""Sums in a fixed order, in fp32: what the reduce-scatter does with what has arrived."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sum:
    """One sum: `parts`, of one shape and dtype, added from the first to the last, go to `total`."""

    parts: Sequence[Tensor]
    total: Tensor
    """Flat and contiguous, of any floating dtype."""


def add_up(
    sums: Sequence[Sum], scratch: Tensor, *, divide: float = 1.0, accumulate: bool = False
) -> None:
    """Form `sums`, divide them, and store them (or add them to what is there).

    `scratch` holds as many fp32 elements as the largest sum; it is used where a sum cannot be formed
    where it goes.
    """
    if not sums:
        return
    if sums[0].total.device.type == "cuda":
        from collectives.tide.sums_triton import add_up_on_device  # Triton comes with CUDA builds

        add_up_on_device(sums, divide=divide, accumulate=accumulate)
        return
    for each in sums:
        _add_up(each, scratch, divide, accumulate)


def cast(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Copy each of `sources` to its place, which may be of another dtype and have rows apart.

    On a GPU in one launch where it can: torch makes dozens of small ones, and each has to wait for a
    multiprocessor beside a matrix product.
    """
    if places[0].device.type == "cuda" and len({place.dtype for place in places}) == 1:
        from collectives.tide.sums_triton import TYPES, add_up_on_device

        pairs = [(s, p) for s, p in zip(sources, places, strict=True) if p.numel()]
        if all(p.is_contiguous() and p.dtype in TYPES and s.dtype in TYPES for s, p in pairs):
            sums = [Sum([source.view(-1)], place.view(-1)) for source, place in pairs]
            if sums:
                add_up_on_device(sums, divide=1.0, accumulate=False)
            return
    torch._foreach_copy_(list(places), list(sources))


def _add_up(each: Sum, scratch: Tensor, divide: float, accumulate: bool) -> None:
    """The reference, one operation after the other."""
    first, *others = each.parts
    shape, target = first.shape, each.total
    copied = not others and divide == 1 and not accumulate
    formed_there = copied or (target.dtype == torch.float32 and not accumulate)
    total = (target if formed_there else scratch[: target.numel()]).view(shape)
    total.copy_(first)
    for part in others:
        total.add_(part)
    if divide != 1:
        total.div_(divide)
    if accumulate:
        target.view(shape).add_(total)
    elif not formed_there:
        target.view(shape).copy_(total)
