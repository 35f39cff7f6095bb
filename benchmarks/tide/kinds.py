"""What is compared: torch's collectives in three ways, TIDE whole, in halves and with other settings."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from collectives.config import CollectivesConfig
from parallel.blocks import find_blocks
from parallel.fsdp import prefetch_layers
from parallel.tide import Tide, use_tide

IN_FLIGHT = 3
"""Outputs of one size that FSDP2 may hold at the same time: in use, copied out, on its way."""


def stock(model: nn.Module, node_size: int, gpu: bool) -> None:
    """FSDP2 as it comes."""


def one_ahead(model: nn.Module, node_size: int, gpu: bool) -> None:
    """FSDP2 that gathers a layer ahead in the forward pass, too; TIDE does so in any case."""
    prefetch_layers([block for _, block in find_blocks(model)], 1)


def group_memory(model: nn.Module, node_size: int, gpu: bool) -> None:
    """FSDP2 with buffers that NCCL has registered."""
    for module in _sharded(model):
        module.set_allocate_memory_from_process_group_for_comm(True)


def symmetric_memory(model: nn.Module, node_size: int, gpu: bool) -> None:
    """FSDP2 with symmetric memory, in which NCCL's all-gather uses copy engines.

    Torch has that since 2.12; for 2.11 it is rebuilt here with a custom all-gather.
    """
    for module in _sharded(model):
        if hasattr(module, "set_symm_mem_for_comm"):
            module.set_symm_mem_for_comm("NCCL")
        else:
            module.set_custom_all_gather(_shared_buffers())


def tide(**settings: Any) -> Callable[[nn.Module, int, bool], Tide]:
    """TIDE, both halves."""

    def use(model: nn.Module, node_size: int, gpu: bool) -> Tide:
        chosen = CollectivesConfig(**settings)
        used = use_tide(model, chosen, node_size)
        assert all("little" in reason for reason in used.stayed.values()), used.stayed
        prefetch_layers([block for _, block in find_blocks(model)], 1)
        return used

    return use


def all_gather_only(model: nn.Module, node_size: int, gpu: bool) -> Tide:
    """TIDE's all-gather, torch's reduce-scatter."""
    used = tide()(model, node_size, gpu)
    for layer in _layers(used):
        layer.group._reduce_scatter_comm = _fsdp_collectives.DefaultReduceScatter()
    return used


def reduce_scatter_only(model: nn.Module, node_size: int, gpu: bool) -> Tide:
    """Torch's all-gather, TIDE's reduce-scatter (which has no slots to reuse, then)."""
    used = tide(slot_reuse=False, chunk=1 << 23)(model, node_size, gpu)
    for layer in _layers(used):
        layer.group._all_gather_comm = _fsdp_collectives.DefaultAllGather()
    for pool in used.pools:
        pool.layers.clear()
    return used


ON_CPU: dict[str, Callable[[nn.Module, int, bool], Tide | None]] = {
    "stock": stock,
    "tide": tide(),
    "tide, slot reuse": tide(slot_reuse=True),
}
ON_GPUS: dict[str, Callable[[nn.Module, int, bool], Tide | None]] = {
    "stock": stock,
    "stock, one ahead": one_ahead,
    "stock, memory of the group": group_memory,
    "stock, symmetric memory": symmetric_memory,
    "tide, all-gather only": all_gather_only,
    "tide, reduce-scatter only": reduce_scatter_only,
    "tide, staging": tide(slot_reuse=False, chunk=1 << 23),
    "tide, cast in turn": tide(cast_ahead=False),
    "tide, three slots": tide(slots=3),
    "tide": tide(),
}
ENVIRONMENT = {"stock, symmetric memory": {"NCCL_CTA_POLICY": "2"}}
"""Of a kind's processes: the policy that has NCCL use copy engines."""


def _sharded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _layers(used: Tide) -> list[Any]:
    return [layer for pool in used.pools for layer in pool.layers]


_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
_turns: dict[tuple[int, torch.dtype], int] = {}


def _shared_buffers() -> Any:
    """An all-gather whose outputs are symmetric memory, a few of each size in turn."""
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.set_backend("NCCL")
    world = dist.group.WORLD

    class Gather(_fsdp_collectives.DefaultAllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            numel = int(torch.Size(size).numel())
            key = (numel, dtype)
            if key not in _buffers:
                _buffers[key] = [
                    symm_mem.empty(numel, dtype=dtype, device=device) for _ in range(IN_FLIGHT)
                ]
                assert world is not None
                for buffer in _buffers[key]:
                    symm_mem.rendezvous(buffer, world)
            _turns[key] = _turns.get(key, -1) + 1
            return _buffers[key][_turns[key] % IN_FLIGHT].view(size)

    return Gather()
