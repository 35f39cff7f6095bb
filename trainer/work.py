"""A task that trains nothing (`recipes.work.Work`), on one rank, as `trainer.loop` is for others."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rich.console import Console

from collectives.host import all_sum
from recipes.abilities import HasPanels
from trainer import stop
from trainer.config import Config
from trainer.enter import enter_run_dir
from trainer.errors import DONE, STOPPED
from trainer.launch import EXCHANGE, Invocation
from trainer.run import check_task, make_task
from trainer.watch.header import free_gib, print_header, short_path, versions
from trainer.watch.peak import device_name
from trainer.watch.record import Record
from trainer.watch.redact import redact, redact_override
from trainer.watch.watch import resume_command


def is_work(task: Any) -> bool:
    """Whether a task, or its class, is one of these."""
    return hasattr(task, "work")


def work(config: Config, invocation: Invocation, device: torch.device) -> int:
    """Do what is left of the task's work, and report; returns the exit code."""
    run_dir = enter_run_dir(config)
    task: Any = make_task(config)
    check_task(task)
    record = _open(config, invocation, task, run_dir, device) if dist.get_rank() == 0 else None
    begun, code, why = time.monotonic(), DONE, None
    try:
        figures = task.work(run_dir, device, stop.requested)
        if all_sum([float(figures is None)])[0]:
            code = STOPPED
        if record is not None:
            _report(
                record, task, figures or {}, code, time.monotonic() - begun, invocation, run_dir
            )
    except BaseException as error:
        code, why = getattr(error, "code", 1), f"{type(error).__name__}: {error}"
        raise
    finally:
        if record is not None:
            record.write({"kind": "end", "step": 0, "code": code, "why": why})
            record.close(code, page=code in (DONE, STOPPED) or EXCHANGE not in os.environ)
    return code


def _open(
    config: Config, invocation: Invocation, task: Any, run_dir: Path, device: torch.device
) -> Record:
    """The header, and the files of rank 0."""
    plain = redact(asdict(config))
    OmegaConf.save(plain, run_dir / "config.yaml")
    ranks, name = dist.get_world_size(), device_name(device)
    given = " ".join(
        redact_override(word) for word in invocation.overrides if not word.startswith("+recipe=")
    )
    lines = {
        "task": f"{config.task.name}  {given}".rstrip(),
        "ranks": f"{f'{ranks} x ' if ranks > 1 else ''}{name}, {invocation.kind}",
        **task.describe(),
        "run folder": f"{short_path(run_dir)} ({free_gib(run_dir):,.0f} GiB free)",
        "versions": versions(),
    }
    print_header(Console(), lines)
    record = Record(config.logging, run_dir, print, None)
    record.open(plain, 0)
    row = {"kind": "start", "step": 0, "started": time.time(), "ranks": ranks, "device": name}
    record.write({**row, "steps": 0, "skipped": 0, "resumed": None})
    return record


def _report(
    record: Record,
    task: Any,
    figures: dict[str, float],
    code: int,
    seconds: float,
    invocation: Invocation,
    run_dir: Path,
) -> None:
    if isinstance(task, HasPanels):
        record.panels(task.panels)
    if code == STOPPED:
        print("stopped; what is whole stays")
        print(f"go on with: {resume_command(invocation, run_dir)}")
        return
    if figures:
        record.write({"kind": "eval", "step": 0, **figures})
        widest = max(map(len, figures))
        print("\n".join(f"{name:{widest}}  {value:.6g}" for name, value in figures.items()))
    print(f"done in {seconds:.0f} s; everything is in {short_path(run_dir)}")
