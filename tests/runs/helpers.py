"""Whole runs as a person starts them: a command, its console, its exit code, its folder.

A new interpreter imports for four seconds, so the same program is also forked from one that has:

`run` (`start`, `finish`)       all new interpreters: for the way there, and the first moments
`program` (`launch`, `finish`)  a forked launcher that forks its ranks: for signals, deaths, other
                                launchers, and all that ends before there are ranks
`train`                         forked ranks and no launcher: for what is in the folder afterwards
"""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.ranks import forks

SMALL = (
    "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=48", "model.num_heads=2",
    "model.num_kv_heads=1", "model.head_dim=16", "data.sequence_length=32", "trainer.batch_size=8",
    "trainer.eval_every=0", "trainer.workers=0", "logging.wandb.mode=disabled", "logging.every=1",
    "checkpoint.every=0",
)  # fmt: skip
"""A model and a step that take no time, reporting every step."""

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"},
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def start(*arguments, cwd, prefix=("-m", "trainer"), env=None, **keywords):
    """Start `python -m trainer ARGUMENTS`; console output is captured, both streams in one."""
    return subprocess.Popen(
        [sys.executable, *prefix, *map(str, arguments)],
        cwd=cwd,
        env={**ENVIRONMENT, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **keywords,
    )


def finish(process, timeout=180):
    """Wait for the end; returns exit code and console output."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{output}") from None
    return process.returncode, output


def run(*arguments, cwd, timeout=180, **keywords):
    """Start and finish."""
    return finish(start(*arguments, cwd=cwd, **keywords), timeout)


class Forked:
    """`python -m MODULE ARGUMENTS`, forked, with what tests ask of a `Popen`."""

    def __init__(self, arguments, cwd, env, module="trainer"):
        self._console = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        words = [module, *map(str, arguments)]
        self._process = forks.Process(target=_program, args=(words, cwd, env, self._console.name))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("trainer", timeout)
        return self._console.read(), None


def launch(*arguments, cwd, env=None, module="trainer"):
    """Start a forked launcher, whose ranks are forks of itself; also of `module` torch.distributed.run."""
    return Forked(arguments, cwd, env or {}, module)


def program(*arguments, cwd, env=None, timeout=180, **keywords):
    """Launch and finish."""
    return finish(launch(*arguments, cwd=cwd, env=env, **keywords), timeout)


def train(*arguments, cwd, ranks=2, env=None, timeout=180):
    """The same on `ranks` ranks, forked, too: they find what torchrun would have told them."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    everyone = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", **(env or {}),
    }  # fmt: skip
    each = [{**everyone, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return together(arguments, cwd, each, timeout)


def together(arguments, cwd, environments, timeout=180):
    """One forked process for each environment; returns the first bad exit code and all output."""
    processes = [Forked(arguments, cwd, env) for env in environments]
    try:
        ended = [finish(process, timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return next((code for code, _ in ended if code), 0), "".join(output for _, output in ended)


def _program(words, cwd, env, console):
    """What a new interpreter would be given, and then `python -m WORDS`."""
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    with open(console, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update({**ENVIRONMENT, **env})
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if torch.cuda.device_count() == 0:  # drivers do not survive a fork
        SubprocessHandler._popen = _fork_rank
    _run_module(*words)


class ForkedRank(multiprocessing.get_context("fork").Process):
    """What torch's launcher asks of a `Popen`."""

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode


def _fork_rank(handler, command, environment):
    """Where torch's launcher would start `python ... -m WORDS`: a fork that becomes it, with the faults
    that its environment asks for."""
    from tests.faults.inject import install
    from trainer import rundir, stop

    words = command[command.index("-m") + 1 :]

    def become():
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
        multiprocessing.set_start_method("fork", force=True)  # of data workers
        for number in stop.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        rundir._locks.clear()  # the launcher's own
        stop._received.clear()
        install()
        _run_module(*words)

    rank = ForkedRank(target=become)
    rank.start()
    return rank


def _run_module(module, *words):
    """`python -m MODULE WORDS`, in a process that may have imported it."""
    sys.argv = [module, *words]
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def wait_for(condition, timeout=90):
    """Poll until `condition()` is true; returns its value."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("what was waited for did not happen")


def metrics(run_dir, kind="train"):
    """Rows of metrics.jsonl of one kind."""
    file = Path(run_dir) / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = file.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["kind"] == kind]


def reached(run_dir, step):
    """Whether the run has reported this step."""
    return any(row["step"] >= step for row in metrics(run_dir))


def weights(run_dir, step):
    """The model of a checkpoint, as whole tensors, and the plain progress beside it."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    folder = Path(run_dir) / "checkpoints" / f"step-{step:08d}"
    state = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat = {}

    def walk(node, prefix):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}/")
            elif isinstance(value, torch.Tensor):
                flat[f"{prefix}{key}"] = value

    walk({key: state[key] for key in ("model", "optimizer")}, "")
    return flat, json.loads((folder / "trainer.json").read_text())
