"""One fault at a named moment of one rank, set up in the rank's process before the product's code begins.

    Fault("kill", "shards", rank=1, at=2)      SIGKILL when rank 1 writes its shards for the second time

The product knows nothing of it: functions are wrapped where they are looked up. A fault happens once,
whatever is started again afterwards: its marker file says that it has.
"""

import errno
import functools
import importlib
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.processes import children, command_of

VARIABLE = "SPRINGTIDE_TESTS_FAULT"
"""Read by the tests' own wrapper of a rank (`tests.runs.helpers`) and by nothing else."""

PHASES = {
    "restore": ("trainer.run", "load"),
    "open": ("trainer.watch.metrics", "Metrics.open"),
    "data": ("trainer.data", "MicroBatches.__getitem__"),
    "agree": ("trainer.data", "all_sum"),
    "forward": ("recipes.pretrain", "PretrainTask.loss"),
    "all-gather": ("collectives.tide.all_gather", "Gather.start"),
    "gathered": ("collectives.tide.all_gather", "Gather.wait"),
    "backward": ("torch", "Tensor.backward"),
    "reduce-scatter": ("collectives.tide.reduce_scatter", "ReduceScatter.__call__"),
    "norm": ("trainer.loop", "global_norm"),
    "optimizer": ("torch.optim", "AdamW.step"),
    "report": ("trainer.watch.metrics", "Metrics.write"),
    "evaluation": ("recipes.pretrain", "PretrainTask.evaluate"),
    "copy": ("trainer.checkpoint.staging", "Staging.copy"),
    "room": ("trainer.checkpoint.folder", "Checkpoints.make_room"),
    "shards": ("torch.distributed.checkpoint.filesystem", "FileSystemWriter.write_data"),
    "metadata": ("torch.distributed.checkpoint.filesystem", "FileSystemWriter.finish"),
    "checksums": ("trainer.checkpoint.manifest", "describe_file"),
    "progress": ("trainer.checkpoint.saver", "write_durably"),
    "manifest": ("trainer.checkpoint.manifest", "write_manifest"),
    "commit": ("trainer.checkpoint.folder", "Checkpoints.commit"),
    "pointer": ("trainer.checkpoint.folder", "replace_durably"),
    "purge": ("trainer.checkpoint.folder", "Checkpoints.drop_old"),
    "purging": ("trainer.checkpoint.folder", "shutil.rmtree"),
    "page": ("trainer.watch.record", "write_page"),
    "goodbye": ("trainer.watch.watch", "Watch.close"),
    "shard of lists": ("recipes.slide.beam_export", "write_shard"),
    "decision": ("recipes.lelora.steering", "LeloraSteering.after_step"),
    "switch": ("recipes.lelora.switching", "Adapters._switch"),
    "switched": ("recipes.lelora.steering", "LeloraSteering._end_decision"),
}
"""Moments: what is called at them, as `module`, `attribute`."""
FIRST_RANK = frozenset(
    [
        "open",
        "report",
        "room",
        "metadata",
        "progress",
        "manifest",
        "commit",
        "pointer",
        "purge",
        "purging",
        "page",
    ]
)
"""Moments that only rank 0 has."""


@dataclass(frozen=True)
class Fault:
    """What happens, when, and to whom."""

    what: str
    """A key of `HAPPENINGS`, or the name of an error of the operating system: ENOSPC ..."""
    phase: str
    rank: int = 0
    at: int = 1
    """The how manieth time that the rank comes there."""
    marker: str = ""
    """A file that says that it has happened; empty: it happens in every process."""
    after: str = ""
    """The marker of one that has to have happened before this process began; empty: of none."""


def install():
    """Set up the faults that the environment names, those for this rank that have not happened."""
    for fault in unpack(os.environ.pop(VARIABLE, "[]")):
        done = fault.marker and Path(fault.marker).exists()
        waits = fault.after and not Path(fault.after).exists()
        if fault.rank == int(os.environ["RANK"]) and not done and not waits:
            _wrap(fault)


def in_turn(faults, folder):
    """The same, each in a run of its own: the next one after the one before it."""
    markers = [str(folder / f"happened-{number}") for number in range(len(faults))]
    return [
        replace(fault, marker=marker, after=before)
        for fault, marker, before in zip(faults, markers, ["", *markers], strict=False)
    ]


def pack(faults):
    """Faults as a value of `VARIABLE`."""
    return json.dumps([asdict(fault) for fault in faults])


def unpack(text):
    """The faults again."""
    return [Fault(**fields) for fields in json.loads(text)]


def _wrap(fault):
    module, path = PHASES[fault.phase]
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrapped(*args, **keywords):
        nonlocal calls
        calls += 1
        if calls == fault.at:
            if fault.marker:
                Path(fault.marker).touch()
            _happen(fault.what)
        return original(*args, **keywords)

    setattr(owner, name, wrapped)


def _happen(what):
    if what in HAPPENINGS:
        HAPPENINGS[what]()
    else:
        number = getattr(errno, what)
        raise OSError(number, os.strerror(number))


def _fail():
    raise RuntimeError("this rank was told to fail")


def _run_out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _damage():
    """One flipped bit in the newest checkpoint's first shard."""
    shards = sorted(Path("r/checkpoints").glob("step-*/__0_0.distcp"))
    content = bytearray(shards[-1].read_bytes())
    content[len(content) // 2] ^= 1
    shards[-1].write_bytes(content)


def _kill_wandb():
    """The process that wandb has beside this one."""
    service = [pid for pid in children(os.getpid()) if "wandb" in command_of(pid)]
    assert service, "wandb has no process"
    for pid in service:
        os.kill(pid, signal.SIGKILL)


def _set_clock(seconds):
    """What the machine's clock says from now on, to this process."""
    real = time.time
    time.time = lambda: real() + seconds


DAY = 86_400.0
HAPPENINGS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "hang": lambda: time.sleep(1000),
    "slow": lambda: time.sleep(3),
    "raise": _fail,
    "memory": _run_out_of_memory,
    "damage": _damage,
    "vanish": lambda: shutil.rmtree("r/checkpoints", ignore_errors=True),
    "remove data": lambda: Path("data.jsonl").unlink(),
    "change data": lambda: Path("data.jsonl").write_text('{"text": "other words"}\n'),
    "kill wandb": _kill_wandb,
    "clock back": lambda: _set_clock(-DAY),
    "clock ahead": lambda: _set_clock(DAY),
}
