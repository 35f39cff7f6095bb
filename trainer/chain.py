"""A task that is a row of others (`recipes.work.Chain`): each runs as it would alone, in its folder.

Whether a stage has something to do is its own business: one that is finished finds so and ends at once,
so a chain that was stopped goes on by the same command. A stage that keeps its best checkpoint
(`checkpoint.highest`, `checkpoint.lowest`) hands that one on.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from recipes.work import Stage
from trainer import rundir
from trainer.config import Config, build_config
from trainer.errors import DONE, ConfigError
from trainer.export import BEST, export
from trainer.plugins import NODES, tasks
from trainer.run import make_task

EXPORTED = "exported"
"""The folder of exported weights in that of a stage."""

Run = Callable[[dict[str, Any], list[str]], int]
"""Runs one composed configuration, to an exit code."""


def is_chain(task: Any) -> bool:
    """Whether a task, or its class, is one of these."""
    return hasattr(task, "stages")


def run_chain(config: Config, plain: dict[str, Any], overrides: list[str], run: Run) -> int:
    """Run all stages, or up to the first that does not end well; returns its exit code."""
    if {"RANK", "SLURM_PROCID"} & set(os.environ):
        raise ConfigError(
            f"task {config.task.name} starts the ranks of its stages on this machine: give it no "
            "launcher, or run its stages one by one (trainer.dry_run=true lists them)"
        )
    task: Any = make_task(config)
    dry_run = config.trainer.dry_run
    folder = (
        Path(config.run.dir or "runs/NAME")
        if dry_run
        else rundir.new_run_dir(config.run, config.recipe)
    )
    if not dry_run:
        rundir.lock(folder)
    stages = task.stages(folder)
    plans = [stage_config(plain, stage, folder) for stage in stages]  # all, before the first begins
    for number, (stage, its) in enumerate(zip(stages, plans, strict=True), start=1):
        print(f"\n{number} of {len(stages)}: {stage.name}, in {its['run']['dir']}", flush=True)
        if dry_run:
            print(f"  task={its['task']['name']}", *_words("task", its["task"]))
            continue
        code = run(its, overrides)
        if code != DONE:
            print(f"{stage.name} ended with exit code {code}", file=sys.stderr)
            return code
        if hasattr(tasks()[its["task"]["name"]], "export"):
            code = _export(
                Path(its["run"]["dir"]), build_config(its).checkpoint.best_by is not None
            )
            if code != DONE:
                return code
    return DONE


def stage_config(plain: Mapping[str, Any], stage: Stage, folder: Path) -> dict[str, Any]:
    """The composed configuration of one stage. Raises `ConfigError` for what it cannot be."""
    its = _laid_over(plain, {k: v for k, v in stage.nodes.items() if k != "task"})
    its["task"] = dict(stage.nodes["task"])
    its["recipe"] = f"{plain['recipe']}-{stage.name}"
    its["run"] = {**plain["run"], "dir": str(folder / stage.name)}
    kind = tasks()[its["task"]["name"]]
    for node in NODES:
        if node not in kind.configs:
            its[node] = {}
    try:
        build_config(its)
    except (ConfigError, OmegaConfBaseException) as error:
        words = str(error).splitlines()[0]
        raise ConfigError(
            f"stage {stage.name}: {words}: set it under task.stages.{stage.name}"
        ) from error
    return its


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping)
        joined[key] = _laid_over(joined[key], value) if both else value
    return joined


def _words(prefix: str, node: Mapping[str, Any]) -> list[str]:
    """`task.key=value` for all that a node says."""
    return [f"{prefix}.{key}={value}" for key, value in node.items() if key != "name"]


def _export(folder: Path, best: bool) -> int:
    """The best checkpoint, if the stage keeps one, or the newest.

    Anew, whatever was there: weights of an earlier step, perhaps.
    """
    shutil.rmtree(folder / EXPORTED, ignore_errors=True)
    return export([str(folder), str(folder / EXPORTED), *(["--step", BEST] if best else [])])
