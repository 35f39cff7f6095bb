"""The run folder: where everything that a run writes lives.

runs/tiny-20261129-101500/
    config.yaml      the resolved configuration, without secrets
    metrics.jsonl    every figure, the source of truth
    report.html      a page about the run; panels.json is what the task adds to it
    checkpoints/     step-00000100/ ... and `latest`, which names the newest complete one
    ranks/           what ranks other than 0 printed
    wandb/           offline until you sync it
    tensorboard/     with logging.tensorboard=true
    profile/         with trainer.profile.steps
    stalls/          stacks of ranks in a step that took too long
    nccl/            the last collectives before a timeout, on GPUs
"""

import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.errors import ConfigError
from trainer.launch import EXCHANGE

NAME = re.compile(r"[A-Za-z0-9._-]+")
_locks: list[IO[str]] = []


@dataclass(kw_only=True)
class RunDirConfig:
    """The `run` node."""

    root: str = "runs"
    """Folder that new run folders are made in."""
    dir: str | None = None
    """The run folder itself; null: a new one under `root`, named by recipe and time."""


def new_run_dir(config: RunDirConfig, recipe: str) -> Path:
    """The folder of this run, created; a name that another run has just taken is not reused."""
    if config.dir is not None:
        if not config.dir.strip():
            raise ConfigError("run.dir is empty: set run.dir to a folder, or to null for a new one")
        path = Path(config.dir)
        _make(path)
        return path.absolute()
    name = recipe if NAME.fullmatch(recipe) else "run"
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        path = Path(config.root) / (stem + suffix)
        if not path.exists() and _make(path, fresh=True):
            return path.absolute()
    raise ConfigError(f"no free name for a run folder under {config.root}: set run.dir")


def _make(path: Path, fresh: bool = False) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=not fresh)
    except FileExistsError:
        if fresh:
            return False
        raise ConfigError(f"run.dir={path} is a file: set run.dir to a folder") from None
    except OSError as error:
        raise ConfigError(
            f"run.dir={path} cannot be made ({error.strerror}): set run.dir"
        ) from error
    return True


def lock(path: Path) -> None:
    """Hold the run folder for this process. Raises `ConfigError` if another run has it."""
    try:
        file = (path / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"run.dir={path} cannot be written ({error.strerror}): set run.dir"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise ConfigError(
            f"run.dir={path} is in use by another run (process {owner}): set another run.dir"
        ) from None
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _locks.append(file)


def locked_by_launcher() -> bool:
    """Whether the process that started the ranks (or this one, before) already holds the lock."""
    return bool(_locks) or EXCHANGE in os.environ


def unlock() -> None:
    """Give back the locks of this process."""
    while _locks:
        _locks.pop().close()
