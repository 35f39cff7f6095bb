"""The command line: one composed configuration (or a sweep of them) becomes one run (or several)."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recipes.task import DataError
from trainer import rundir, stop, worker
from trainer.chain import is_chain, run_chain
from trainer.checkpoint.continuity import DataIdentity, check_epochs, goes_on
from trainer.checkpoint.folder import Checkpoints, read_progress
from trainer.checkpoint.loader import find
from trainer.compose import run_jobs
from trainer.config import Config, build_config
from trainer.data import check_enough, fingerprint
from trainer.errors import CONFIG, DATA, DONE, STOPPED, ConfigError, RunError
from trainer.launch import CHAIN, decide, slurm_environment
from trainer.plan import make_plan
from trainer.plugins import tasks
from trainer.ranks import start_ranks, stopped_early
from trainer.run import check_task, make_task
from trainer.work import is_work


def run(arguments: Sequence[str]) -> int:
    """Do what `arguments` ask for; returns the exit code."""
    try:
        return run_jobs(arguments, run_job)
    except ConfigError as error:
        if _is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        return CONFIG


def run_job(plain: dict[str, Any], overrides: list[str], sweep: bool) -> int:
    """One run, from a composed configuration to an exit code."""
    try:
        return _run_job(plain, overrides, sweep)
    except RunError as error:
        code, text = error.code, str(error)
    except DataError as error:
        code, text = DATA, str(error)
    finally:
        rundir.unlock()
    if _is_first_rank():
        print(f"error: {text}", file=sys.stderr)
    return code


def _run_job(
    plain: dict[str, Any], overrides: list[str], sweep: bool, kind: str | None = None
) -> int:
    """`kind` says who started it, if nothing in the environment did."""
    config = build_config(plain)
    task_kind = tasks()[config.task.name]
    if is_chain(task_kind):
        return run_chain(config, plain, overrides, partial(_run_job, sweep=True, kind=CHAIN))
    gpus = torch.cuda.device_count()
    dry_run = config.trainer.dry_run
    place = decide(config.launch, config.parallel, os.environ, gpus, dry_run)
    payload = {"config": plain, "kind": kind or place.kind, "overrides": overrides}
    if place.kind == "slurm":
        os.environ |= slurm_environment(os.environ)
    if place.kind != "local" and not dry_run:
        return _without_restart(worker.run(payload))
    if dry_run and not _is_first_rank():
        return DONE
    task = make_task(config, place.world_size)
    if is_work(task_kind):
        return _start_work(config, task, payload, place.world_size, sweep)
    make_plan(
        config, place.world_size, None, task.axes
    )  # or say what is wrong, before data is read
    progress = _check_resume(config)
    if dry_run:
        from trainer.dry_run.dry_run import dry_run as print_plan  # what other runs do not need

        check_task(task)
        print_plan(config, overrides, task, place.world_size)
        return DONE
    if stop.requested():  # of a sweep, perhaps; before there is a folder
        return stopped_early()
    run_dir = _prepare(config)
    plain["run"]["dir"] = str(run_dir)
    check_task(task)
    samples, trainer = task.train_samples(), config.trainer
    check_enough(samples, trainer.batch_size)
    if progress is not None:
        check_epochs(progress, trainer.batch_size, trainer.epochs)
        goes_on(progress, DataIdentity(trainer.seed, fingerprint(samples)), trainer.change_data)
    if stop.requested():
        return stopped_early()
    return _start(config, payload, place.world_size, run_dir, sweep)


def _without_restart(code: int) -> int:
    """torchrun starts ranks again that end with anything but 0, which would undo a stop."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return DONE if code == STOPPED and restarts else code


def _start_work(
    config: Config, task: Any, payload: dict[str, Any], world_size: int, sweep: bool
) -> int:
    """A task without training: nothing to plan, no checkpoint to resume."""
    if config.trainer.dry_run:
        check_task(task)
        for name, line in task.describe().items():
            print(f"{name:12} {line}")
        return DONE
    if stop.requested():
        return stopped_early()
    run_dir = _prepare(config)
    payload["config"]["run"]["dir"] = str(run_dir)
    check_task(task)
    if stop.requested():
        return stopped_early()
    return _start(config, payload, world_size, run_dir, sweep)


def _start(
    config: Config, payload: dict[str, Any], world_size: int, run_dir: Path, sweep: bool
) -> int:
    """One rank runs here, for a debugger, unless this process has to outlive it."""
    if world_size == 1 and not sweep and not config.launch.max_restarts:
        return worker.run(payload)
    return start_ranks(payload, world_size, run_dir)


def _prepare(config: Config) -> Path:
    """Make and lock the run folder, and have signals leave their note in it."""
    run_dir = rundir.new_run_dir(config.run, config.recipe)
    rundir.lock(run_dir)
    note = run_dir / "stop"
    note.unlink(missing_ok=True)

    def ask_to_stop() -> None:
        note.touch()
        os.write(2, b"\nstopping after this step; once more stops at once\n")

    stop.install(ask_to_stop)
    return run_dir


def _check_resume(config: Config) -> dict[str, Any] | None:
    """What the checkpoint to resume from says, or why it cannot be used, before any rank starts."""
    if config.run.dir is None and config.trainer.resume in ("auto", "never"):
        return None
    checkpoints = Checkpoints(Path(config.run.dir or ".") / "checkpoints")
    found = find(config.trainer.resume, checkpoints)
    return read_progress(found) if found is not None else None


def _is_first_rank() -> bool:
    """Whether this process is the one that speaks."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
