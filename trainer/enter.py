"""A run's folder, as its ranks enter it."""

import time
from pathlib import Path

import torch.distributed as dist

from collectives.host import all_sum, broadcast
from trainer import rundir, stop
from trainer.config import Config
from trainer.errors import ConfigError, RunError
from trainer.process import redirect_output


def enter_run_dir(config: Config) -> Path:
    """Agree on the run folder, lock it unless our launcher has, and keep the console for rank 0."""
    problem, path = None, None
    if dist.get_rank() == 0:
        try:
            path = rundir.new_run_dir(config.run, config.recipe)
            if not rundir.locked_by_launcher():
                rundir.lock(path)
                (path / "stop").unlink(missing_ok=True)
        except RunError as error:
            problem = error
    problem, path = broadcast((problem, path))
    if problem is not None:
        raise problem
    assert path is not None
    unseen = all_sum([float(not _sees(path / ".lock"))])[0]
    if unseen:
        raise ConfigError(
            f"{unseen:.0f} ranks do not see the run folder {path} of rank 0: set run.dir to a folder "
            "that every node sees"
        )
    stop.watch_file(path / "stop")
    if dist.get_rank() != 0:
        redirect_output(path / "ranks" / f"rank{dist.get_rank()}.log")
    return path


def _sees(file: Path) -> bool:
    """Whether a file that another node has made is there; file systems may take a moment."""
    for _ in range(50):
        if file.exists():
            return True
        time.sleep(0.1)
    return False
