"""The global gradient norm, and clipping by it, without a device-to-host synchronisation.

Works on any mix of meshes and placements: each rank sums the squares of what it holds, divided by
the number of ranks that hold the same, and one all-reduce over the world adds them up.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from parallel.waits import waiting


@torch.no_grad()
def global_norm(grads: Iterable[Tensor], extra: Tensor) -> tuple[Tensor, Tensor]:
    """The 2-norm over all ranks of `grads`, and `extra` (a vector) summed over all ranks.

    Both travel in one all-reduce in fp32. Returns a scalar and a vector on the gradients' device;
    a NaN or infinity on any rank reaches every rank.
    """
    world_size = dist.get_world_size()
    by_copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local.numel():
            by_copies.setdefault(copies(grad, world_size), []).append(local)
    total = extra.new_zeros(())
    for number, tensors in by_copies.items():
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        total = total + torch.stack(norms).square().sum() / number
    sums = torch.cat([total.reshape(1), extra])
    with waiting():
        dist.all_reduce(sums)
    return sums[0].sqrt(), sums[1:]


def copies(grad: Tensor, world_size: int) -> int:
    """Ranks that hold the same elements of `grad` as this one."""
    if not isinstance(grad, DTensor):
        return world_size
    parts = 1
    for axis, placement in enumerate(grad.placements):
        if isinstance(placement, Shard):
            parts *= grad.device_mesh.size(axis)
    return world_size // parts


@torch.no_grad()
def clip(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `grads` in place so that their global norm is at most `max_norm`."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    if local:
        torch._foreach_mul_(local, scale)
