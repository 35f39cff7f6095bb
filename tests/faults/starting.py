"""`python -m trainer` as ever, but for two things: its ranks are forked, and may have a fault in them.

The launcher, torch's elastic agent and all that comes after are the real ones; only the last line, in
which the agent starts a new interpreter for a rank, forks this process instead, which has imported
everything. A run of two ranks then takes two CPU seconds instead of twelve.
"""

import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.inject import VARIABLE, install, pack
from tests.ranks import forks
from tests.runs import helpers
from tests.runs.helpers import Forked, finish


class Rank:
    """A forked rank, with what the elastic agent asks of a `Popen`."""

    def __init__(self, env):
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(env)
            finally:
                os._exit(1)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return self.returncode


def _become(env):
    """What `python -P -m trainer.worker` would be, with a fault."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in a new interpreter
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    from trainer import rundir, stop, worker

    rundir._locks.clear()
    stop._received.clear()
    install()
    worker.main()


def _launcher(arguments, cwd, env, console):
    """The launcher's process."""
    helpers._fork_rank = lambda _handler, _command, environment: Rank(environment)
    helpers._program(["trainer", *arguments], cwd, env, console)


class Started(Forked):
    """See above."""

    def __init__(self, arguments, cwd, env):
        import tempfile

        self._console = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        words = list(map(str, arguments))
        self._process = forks.Process(target=_launcher, args=(words, cwd, env, self._console.name))
        self._process.start()
        self.pid = self._process.pid


def begin(*arguments, cwd, fault=None, env=None):
    """Start a run, with a fault (or a list of them) in its ranks."""
    faults = fault if isinstance(fault, list) else [fault] if fault is not None else []
    (Path(cwd) / "tmp").mkdir(exist_ok=True)
    return Started(
        arguments, cwd, {"TMPDIR": str(cwd / "tmp"), VARIABLE: pack(faults), **(env or {})}
    )


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
    while left := [*processes_in(cwd), *(cwd / "tmp").iterdir(), *orphans(before)]:
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.05)


def orphans(before):
    """Shared memory of torch whose maker is gone. Semaphores have no owner in their name; torch's
    data workers make none that have a name."""
    made = {file: re.match(r"torch_(\d+)_", file.name) for file in set(SHARED.iterdir()) - before}
    return [file for file, pid in made.items() if pid and not Path("/proc", pid[1]).exists()]


def processes_in(folder):
    """Ids of processes whose working directory is `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
