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
    sums: Sequence[Sum],
    scratch: Tensor | None,
    *,
    divide: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Form `sums`, divide them, and store them (or add them to what is there).

    `scratch` holds as many fp32 elements as the largest sum; the CPU needs it where a sum cannot be
    formed where it goes.
    """
    if not sums:
        return
    if sums[0].total.device.type == "cuda":
        from collectives.tide.sums_triton import add_up_on_device  # Triton comes with CUDA builds

        add_up_on_device(sums, divide=divide, accumulate=accumulate)
        return
    for each in sums:
        _add_up(each, scratch, divide, accumulate)


def forget(device: torch.device) -> None:
    """Give back what sums on `device` have kept for their next time; models in use make it anew."""
    if device.type == "cuda":
        from collectives.tide.sums_triton import tables

        tables(device).clear()


def _add_up(each: Sum, scratch: Tensor | None, divide: float, accumulate: bool) -> None:
    """The reference, one operation after the other."""
    first, *others = each.parts
    shape, target = first.shape, each.total
    copied = not others and divide == 1 and not accumulate
    formed_there = copied or (target.dtype == torch.float32 and not accumulate)
    if formed_there:
        total = target.view(shape)
    else:
        assert scratch is not None
        total = scratch[: target.numel()].view(shape)
    total.copy_(first)
    for part in others:
        total.add_(part)
    if divide != 1:
        total.div_(divide)
    if accumulate:
        target.view(shape).add_(total)
    elif not formed_there:
        target.view(shape).copy_(total)
