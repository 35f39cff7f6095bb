"""A plain model becomes a sharded one: FSDP2 per block, mixed precision, recomputation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from collectives.config import CollectivesConfig
from parallel.blocks import find_blocks, large_leaves
from parallel.experts.divide import divide, placement
from parallel.experts.layout import expert_ranks, experts_mesh
from parallel.mesh import ParallelConfig, fsdp_mesh
from parallel.recompute import compile_block, recompute
from parallel.tables.divide import divide_tables, rows_mesh
from parallel.tables.exchange import TableRanks
from parallel.torch_private import before_backward


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    experts: Sequence[nn.Module] = (),
    tables: Sequence[nn.Module] = (),
) -> nn.Module:
    """Shard `model` (on meta or on a device) over `mesh`, in place, and return it.

    Every block is one FSDP2 group; so is every large module outside them, which stays gathered
    until the backward pass is over (it is used last, or needed at once); the root holds the rest.
    With `parallel.experts`, modules that hold `experts` (`parallel.experts.divide.Experts`) are groups,
    too, each over the ranks that have the same experts. Of `tables`, all ranks divide the rows
    (`parallel.tables.divide`), and FSDP2 has nothing to do with them.
    """
    blocks = find_blocks(model)
    for _, block in blocks:
        recompute(block, config.activation_checkpointing)
        if config.compile:
            compile_block(block)
    dtype = None if config.param_dtype == "float32" else getattr(torch, config.param_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    sub_mesh = fsdp_mesh(mesh)
    leaves = [leaf for leaf in large_leaves(model, blocks) if leaf[1] not in tables]
    rows = set[nn.Parameter]()
    if tables:
        all_ranks = rows_mesh(mesh)
        group = all_ranks.get_group()
        rows |= {*divide_tables(tables, TableRanks(group.size(), group), all_ranks, dtype)}
    for _, leaf in leaves:
        fully_shard(leaf, mesh=sub_mesh, mp_policy=policy, reshard_after_forward=False)
    if config.experts > 1:
        grid = experts_mesh(mesh, config.experts)
        divide(experts, expert_ranks(grid), grid["experts"])
        for module in experts:
            fully_shard(
                module,
                mesh=fsdp_mesh(grid),
                mp_policy=policy,
                reshard_after_forward=config.reshard_after_forward,
                shard_placement_fn=partial(placement, grid["shard"].size()),
            )
    for _, block in blocks:
        fully_shard(
            block,
            mesh=sub_mesh,
            mp_policy=policy,
            reshard_after_forward=config.reshard_after_forward,
            ignored_params=rows,
        )
        if config.activation_checkpointing != "none" and _inner_groups(block):
            block.register_forward_hook(_gather_inside)
    fully_shard(model, mesh=sub_mesh, mp_policy=policy, ignored_params=rows)
    prefetch_layers([block for _, block in blocks], config.prefetch or 0)
    # What runs first is on its way before its turn: nothing else would hide it.
    first = [leaf for _, leaf in leaves[:1]] + [block for _, block in blocks[:1]]
    assert isinstance(model, FSDPModule)
    model.set_modules_to_forward_prefetch(first)  # type: ignore[arg-type]
    return model


def prefetch_layers(blocks: Sequence[nn.Module], depth: int) -> None:
    """Have each of `blocks`, in their order, gather the next `depth` ahead; backwards likewise.

    Depth 0 leaves it to FSDP2, which gathers one group ahead in the backward pass. Where blocks have
    groups inside, each kind gathers its own kind ahead, backwards one at least: FSDP2 would not look
    further than from a block to what is inside it.
    """
    inside = [group for block in blocks for group in _inner_groups(block)]
    back = depth or int(len(inside) > 0)
    for alike in (blocks, inside) if back else ():
        for number, module in enumerate(alike):
            assert isinstance(module, FSDPModule)
            following = alike[number + 1 : number + 1 + depth]
            before = alike[max(number - back, 0) : number][::-1]
            module.set_modules_to_forward_prefetch(following)  # type: ignore[arg-type]
            module.set_modules_to_backward_prefetch(before)  # type: ignore[arg-type]


def _inner_groups(block: nn.Module) -> list[nn.Module]:
    """Modules of a block that are gathered apart from it: experts, where ranks divide them."""
    return [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]


def _gather_inside(block: nn.Module, _: Any, output: Any) -> None:
    """Have what is inside a block gathered before the backward pass computes the block again.

    FSDP2 would take an inner group for a model of its own, in a forward pass.
    """
    made = output[0] if isinstance(output, tuple) else output
    for group in _inner_groups(block) if made.requires_grad else ():
        made.register_hook(before_backward(group))


@dataclass(frozen=True)
class Chosen:
    """How the data of a model travels, as it was decided."""

    notes: Sequence[str] = ()
    """Which way, and why some groups stay on torch's collectives."""
    pools: Sequence[Any] = ()
    """TIDE's, see `parallel.tide.pool.Pool`."""

    def symmetric_nbytes(self) -> int:
        """Memory of this rank that its peers have mapped, so far; no allocator of torch knows of it."""
        return sum(pool.slot_nbytes + pool.staging_nbytes for pool in self.pools)


def choose_collectives(
    model: nn.Module,
    config: CollectivesConfig,
    node_size: int | None,
    prefetch: int | None,
    timeout: float,
    give_up: Callable[[Exception], None],
) -> Chosen:
    """Have the groups of a parallelized model use the configured collectives.

    `node_size` None: as the launcher says; `prefetch` None: what suits them; `timeout` holds where the
    configuration has none; `give_up` ends the process when a GPU waits for a silent rank.
    """
    if config.name == "stock":
        return Chosen()
    from parallel.tide import use_tide  # private names of torch, which stock runs do not need

    config = replace(config, timeout=config.timeout or timeout)
    groups: dict[str, list[str]] = {}
    tide = use_tide(model, config, node_size, give_up)
    if prefetch is None and tide.pools:
        prefetch_layers([block for _, block in find_blocks(model)], 1)
    for name, reason in tide.stayed.items():
        groups.setdefault(reason, []).append(name)
    stayed = [
        f"{names[0] if len(names) == 1 else f'{len(names)} groups'} on torch's collectives: {reason}"
        for reason, names in groups.items()
    ]
    return Chosen([*tide.notes(), *stayed], tide.pools)


def set_last_micro_batch(model: nn.Module, last: bool, every: bool) -> None:
    """Before a backward pass: reduce gradients now, or keep adding them up on this rank.

    `every` reduces after each micro-batch, into gradients that are already sharded.
    """
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or every)
