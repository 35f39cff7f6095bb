"""Which FSDP2 groups TIDE can serve, and why it cannot serve the others."""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as _groups

from collectives.topology import make_topology

_fsdp_collectives: Any = _collectives
_fsdp_param_group: Any = _groups


SMALLEST = 1 << 26
"""Bytes: from there on copy engines beat torch's collectives on two H200 (`docs/performance.md`)."""
TENSORS = 32
"""How many tensors a group of the smallest size may have: each is a put of its own."""


def too_small(group: Any, smallest: int | None) -> str | None:
    """Why a group would be slower with copy engines, or None; `smallest` as it is configured."""
    if smallest is None:
        smallest = SMALLEST if group.device.type == "cuda" else 0
    if smallest == 0:
        return None
    sizes = [
        param._orig_size.numel()
        * (param.mp_policy.param_dtype or param._sharded_local_tensor.dtype).itemsize
        for param in group.fsdp_params
    ]
    if sum(sizes) >= smallest and sum(sizes) * TENSORS >= len(sizes) * smallest:
        return None
    return f"it has {len(sizes)} tensors of {sum(sizes) / 2**20:.1f} MiB in all, which is little"


def unsuitable(group: Any, node_size: int) -> str | None:
    """Why TIDE cannot serve a parameter group, whatever the transport, or None."""
    if not isinstance(group.mesh_info, _fsdp_param_group.FSDPMeshInfo):
        return "it is replicated, not sharded"
    ranks = dist.get_process_group_ranks(group._all_gather_process_group)
    if len(ranks) == 1:
        return "it has one rank"
    if dist.get_process_group_ranks(group._reduce_scatter_process_group) != ranks:
        return "it reduces over other ranks than it gathers from"
    try:
        make_topology(ranks, 0, node_size)
    except ValueError as error:
        return str(error)
    if compiled_autograd_enabled():
        return "compiled autograd traces its collectives"
    if type(group._all_gather_comm) is not _fsdp_collectives.DefaultAllGather:
        return f"it has the all-gather {type(group._all_gather_comm).__name__}"
    if type(group._reduce_scatter_comm) is not _fsdp_collectives.DefaultReduceScatter:
        return f"it has the reduce-scatter {type(group._reduce_scatter_comm).__name__}"
    return _unsuitable_params(group, ranks, node_size)


def _unsuitable_params(group: Any, ranks: Sequence[int], node_size: int) -> str | None:
    few = group._use_post_forward_mesh
    if few:
        some = dist.get_process_group_ranks(group.post_forward_mesh_info.shard_process_group)
        if len({rank // node_size for rank in some}) > 1:
            return "after the forward pass it is sharded over a part of the ranks on several nodes"
    for param in group.fsdp_params:
        if param.offload_to_cpu:
            return "its parameters are offloaded"
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            return "a parameter gathers itself"
        if few and param.fsdp_placement.dim:
            return (
                "a parameter that is not cut along dimension 0 is sharded over a part of the ranks"
            )
    return None


def compiled_autograd_enabled() -> bool:
    """Whether backward passes are traced, hooks of FSDP2 included."""
    config = sys.modules.get("torch._dynamo.config")  # nobody has set it before it was imported
    return bool(getattr(config, "compiled_autograd", False))
