"""Putting a plan's figures together: the model on meta, its groups, a probe, then arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from collectives.config import CollectivesConfig
from parallel.blocks import find_blocks
from parallel.experts.divide import divide
from parallel.experts.exchange import ExpertRanks
from parallel.recompute import recompute
from parallel.tables.divide import divide_tables
from parallel.tables.exchange import TableRanks
from parallel.tide.suitable import SMALLEST
from recipes.abilities import Foresees
from recipes.task import Samples, Task
from trainer.config import Config
from trainer.devices import Device
from trainer.dry_run.duration import Duration, duration
from trainer.dry_run.memory import Group, Memory, estimate, groups_of
from trainer.dry_run.probe import Probe, probe
from trainer.dry_run.wire import Wire, bytes_sent
from trainer.plan import Plan
from trainer.sharing import experts_of, node_size, tables_of


@dataclass(frozen=True)
class Forecast:
    """What a run would take, by rank and step."""

    parameters: int
    owned: int
    """Of them on a rank."""
    labels: float
    """What a step learns from, over all ranks."""
    flops: float
    """Of a step, over all ranks."""
    wire: Wire
    memory: Memory | None
    """None if the passes cannot be followed without data; `problem` says why."""
    duration: Duration | None
    """None without a device to run on, too."""
    problem: str | None = None
    rows: int = 0
    """Of the parameters, those in tables that ranks divide by rows."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """What the task knows besides."""


def forecast(
    config: Config, plan: Plan, task: Task, samples: Samples, device: Device | None
) -> Forecast:
    """Work everything out for the first micro-batch; `device` None: CPU ranks."""
    model: Any = task.build_model()
    experts, ranks = experts_of(task, config, model), ExpertRanks(config.parallel.experts)
    divide(experts, ranks, None)
    tables = tables_of(task, config, model, plan.world_size)
    everyone = TableRanks(plan.world_size)
    rows = sum(p.numel() for table in tables for p in table.parameters())
    dtype = getattr(torch, config.parallel.param_dtype)
    own = divide_tables(tables, everyone, None, dtype)
    groups = groups_of(model, config.parallel, experts, tables)
    for _, block in find_blocks(model):
        recompute(block, config.parallel.activation_checkpointing)
    model.to(dtype)
    for table in tables:
        table.to(torch.float32)
    host = task.collate([samples[i % len(samples)] for i in range(plan.micro_batch_size)])
    watched, problem = _watch(task, model, groups, host)
    to_experts, to_tables = ranks.foreseen, everyone.foreseen
    fullest, lines = watched, dict[str, str]()
    if isinstance(task, Foresees):
        lines = dict(task.foresee(host))
        fullest, problem = _watch(task, model, groups, task.largest(host))
    shards, settings = plan.weight_shards, resolved(config.collectives, device)
    node = node_size(config, plan.world_size)
    wire = bytes_sent(
        groups,
        plan.mesh,
        node,
        config.parallel,
        settings,
        plan.accumulation,
        to_experts,
        to_tables,
    )
    flops = task.flops(host)
    micros = plan.averaging_ranks * plan.accumulation  # each of a rank's own tokens
    parameters = sum(g.numel * g.experts for g in groups)
    kept = sum(p.numel() for p in own)
    found = Forecast(
        parameters=parameters + rows,
        owned=parameters // shards + kept,
        rows=rows,
        labels=task.count(host) * micros,
        flops=flops * micros,
        wire=wire,
        memory=None,
        duration=None,
        problem=problem,
        lines=lines,
    )
    if watched is None or fullest is None:
        return found
    memory = estimate(groups, fullest, shards, config.parallel, settings, plan.accumulation, kept)
    took = None
    if device is not None:
        name = settings.name
        took = duration(watched, flops, plan.accumulation, groups, shards, wire, name, device, kept)
    return replace(found, memory=memory, duration=took)


def _watch(
    task: Task, model: Any, groups: list[Group], host: Mapping[str, Any]
) -> tuple[Probe | None, str | None]:
    batch = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in host.items()
    }
    try:
        found = probe(model, [g.parameters for g in groups], lambda: task.loss(model, batch))
    except (NotImplementedError, RuntimeError) as error:  # the model looks at values
        return None, " ".join(str(error).split())[:160]
    return found, None


def resolved(config: CollectivesConfig, device: Device | None) -> CollectivesConfig:
    """The settings with what the kind of device decides filled in."""
    gpu = device is not None
    return replace(
        config,
        smallest=config.smallest if config.smallest is not None else SMALLEST * gpu,
        cast_ahead=gpu if config.cast_ahead is None else config.cast_ahead,
    )
