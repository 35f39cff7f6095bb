"""Ulysses as it is usually built: all-to-alls of equal parts for queries, keys, values and outputs.

Legend: B samples, S rows of a sample, s those of a rank, H heads, h those of a rank, D head dim,
P ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.hybrid.shape import Shape


class _Usual(torch.autograd.Function):
    """`_usual` of one tensor, with the other direction as its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, to_heads: bool) -> Tensor:
        context.to_heads = to_heads
        return _usual(x, to_heads)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _usual(grad, not context.to_heads), None


def _usual(x: Tensor, to_heads: bool) -> Tensor:
    """(B, S/P, H, D) to (B, S, H/P, D), or back."""
    P, D = dist.get_world_size(), x.shape[3]
    if to_heads:
        B, s, H, _ = x.shape
        sent = x.view(B, s, P, H // P, D).permute(2, 0, 1, 3, 4).contiguous()
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent)
        return arrived.permute(1, 0, 2, 3, 4).reshape(B, P * s, H // P, D)
    B, S, h, _ = x.shape
    sent = x.view(B, P, S // P, h, D).transpose(0, 1).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent)
    return arrived.permute(1, 2, 0, 3, 4).reshape(B, S // P, P * h, D)


def usual(
    randn: Callable[..., Tensor], shape: Shape, samples: int, rows: int
) -> Callable[[], None]:
    """`samples` of `rows` rows a rank, by an all-to-all for each of queries, keys, values, outputs.

    Key/value heads that are fewer than the ranks are repeated, as is usual.
    """
    H, D, K = shape.num_heads, shape.head_dim, max(shape.num_kv_heads, dist.get_world_size())
    q, k, v = (randn(samples, rows, n, D) for n in (H, K, K))

    def run() -> None:
        heads = [_Usual.apply(x, True) for x in (q, k, v)]
        out = _Usual.apply(heads[0], False)
        torch.autograd.grad((out, *heads[1:]), (q, k, v), (out, *heads[1:]))

    return run
