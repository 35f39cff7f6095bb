"""What ranks share beside weights: samples, which the task must know, and parts of its model."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from collectives.host import all_sum
from parallel.experts.layout import check_division
from parallel.mesh import mesh_shape, weight_shards, widest_parent
from parallel.repacking.process_groups import make_groups
from parallel.repacking.ranks import PlannedRanks
from parallel.sequence import SequenceRanks
from parallel.tables import exchange
from parallel.tables.choice import is_divided
from recipes.abilities import HasEmbeddingTables, HasExperts, PlansSamples, SharesSequences
from recipes.task import Task
from trainer.config import Config

NODE = 8
"""Ranks on a node, where nothing says how many."""


def share_samples(
    task: Task, config: Config, world_size: int, mesh: DeviceMesh | None = None
) -> None:
    """As the configuration has it; without a mesh there are no groups yet.

    Raises `ValueError` for a task that cannot, and for settings that suit no ranks.
    """
    sequence = config.parallel.sequence
    if sequence.max_parent is not None:
        _plan_samples(task, config, sequence.max_parent, world_size, mesh)
    elif sequence.size > 1 and isinstance(task, SharesSequences):
        rank = mesh.get_local_rank("sequence") if mesh else 0
        group = mesh.get_group("sequence") if mesh else None
        task.share_sequences(SequenceRanks(sequence.size, rank, group, sequence.sliding_window))


def _plan_samples(
    task: Task, config: Config, max_parent: int, world_size: int, mesh: DeviceMesh | None
) -> None:
    parallel = config.parallel
    if not isinstance(task, PlansSamples):
        raise ValueError(
            f"parallel.sequence.max_parent={max_parent}: task {config.task.name} does not plan which "
            "ranks have which samples: set parallel.sequence.max_parent=null, or "
            "parallel.sequence.size instead"
        )
    device_type = mesh.device_type if mesh else _expected(config)
    groups = make_groups(widest_parent(max_parent, world_size), device_type) if mesh else None
    ranks = PlannedRanks(
        size=world_size,
        rank=dist.get_rank() if mesh else 0,
        node_size=node_size(config, world_size),
        max_parent=max_parent,
        config=parallel.repacking,
        recompute=parallel.activation_checkpointing != "none",
        dtype_bytes=int(getattr(torch, parallel.param_dtype).itemsize),
        device_type=device_type,
        groups=groups,
    )
    task.plan_samples(ranks)


def experts_of(task: Task, config: Config, model: nn.Module) -> Sequence[nn.Module]:
    """The modules of `model` whose experts ranks divide."""
    if config.parallel.experts == 1 or not isinstance(task, HasExperts):
        return ()
    return task.experts(model)


def check_experts(task: Task, config: Config, world_size: int) -> None:
    """Raise `ValueError` unless ranks can divide experts as the configuration has it."""
    parallel = config.parallel
    if parallel.experts == 1:
        return
    modules = task.experts(task.build_model()) if isinstance(task, HasExperts) else ()
    if not modules:
        raise ValueError(
            f"parallel.experts={parallel.experts}: task {config.task.name} has no layers with experts "
            "that ranks could divide: set parallel.experts=1"
        )
    check_division(
        parallel.experts,
        [tuple(p.shape) for module in modules for p in module.parameters(recurse=False)],
        node_size(config, world_size),
        weight_shards(mesh_shape(parallel, world_size)),
    )


def tables_of(task: Task, config: Config, model: nn.Module, world_size: int) -> Sequence[nn.Module]:
    """The modules of `model` whose rows ranks divide, the same on every rank."""
    way = config.parallel.tables
    tables = task.tables(model) if isinstance(task, HasEmbeddingTables) else ()
    large = [
        table
        for table in tables
        if is_divided(way, sum(4 * p.numel() for p in table.parameters()), world_size)
    ]
    if way == "auto" and large:
        missing = float(exchange.problem(_expected(config)) is not None)
        if (all_sum([missing])[0] if dist.is_initialized() else missing) > 0:
            return ()
    return large


def check_tables(task: Task, config: Config, world_size: int) -> None:
    """Raise `ValueError` unless ranks can divide tables as the configuration has it."""
    if config.parallel.tables != "rows":
        return
    if not isinstance(task, HasEmbeddingTables):
        raise ValueError(
            f"parallel.tables=rows: task {config.task.name} has no embedding tables whose rows ranks "
            "could divide: set parallel.tables=auto"
        )
    problem = exchange.problem(_expected(config)) if world_size > 1 else None
    if problem is not None:
        raise ValueError(f"parallel.tables=rows: {problem}; or set parallel.tables=fsdp")


def _expected(config: Config) -> str:
    """The kind of device that the ranks will have."""
    named = config.launch.device if config.trainer.dry_run else None
    gpu = torch.cuda.is_available() if named is None else named != "cpu"
    return "cuda" if gpu else "cpu"


def node_size(config: Config, world_size: int) -> int:
    """Ranks on a node: as configured, or as the launcher says; of a plan, eight of many."""
    if config.parallel.node_size is not None:
        return config.parallel.node_size
    if config.trainer.dry_run:
        return min(world_size, NODE)
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
