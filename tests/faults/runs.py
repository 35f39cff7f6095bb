"""Runs of `tests.runs.helpers` with faults in their ranks, of which nothing may be left."""

import re
import time
from pathlib import Path

from tests.faults.inject import VARIABLE, pack
from tests.processes import working_in
from tests.runs.helpers import finish, launch


def begin(*arguments, cwd, fault=None, env=None):
    """Start a run, with a fault (or a list of them) in its ranks."""
    faults = fault if isinstance(fault, list) else [fault] if fault is not None else []
    (Path(cwd) / "tmp").mkdir(exist_ok=True)
    set_up = {"TMPDIR": str(cwd / "tmp"), VARIABLE: pack(faults), **(env or {})}
    return launch(*arguments, cwd=cwd, env=set_up)


def run(*arguments, cwd, fault=None, env=None, timeout=120):
    """Start and finish; returns exit code and console. Nothing of it may be left."""
    before = set(SHARED.iterdir())
    process = begin(*arguments, cwd=cwd, fault=fault, env=env)
    code, output = finish(process, timeout)
    check_nothing_left(before, cwd)
    return code, output


SHARED = Path("/dev/shm")


def check_nothing_left(before, cwd, patience=10):
    """No process that works in this folder, no shared memory but `before`, no temporary file."""
    end = time.monotonic() + patience
    while left := [*working_in(cwd), *(cwd / "tmp").iterdir(), *orphans(before)]:
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.05)


def orphans(before):
    """Shared memory of torch whose maker is gone. Semaphores have no owner in their name; torch's
    data workers make none that have a name."""
    made = {file: re.match(r"torch_(\d+)_", file.name) for file in set(SHARED.iterdir()) - before}
    return [file for file, pid in made.items() if pid and not Path("/proc", pid[1]).exists()]
