"""The ranks of this machine: started with torch's elastic launcher, and again after failures.

A rank that dies ends the attempt: the others are given a few seconds, then killed. With
`launch.max_restarts` the next attempt goes on from the newest checkpoint (`trainer.restart` decides).
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainer import stop
from trainer.errors import DONE, FAILED, STOPPED
from trainer.launch import EXCHANGE, PAYLOAD
from trainer.restart import Restarts
from trainer.watch.aftermath import note_failure

GRACE = 5
"""Seconds that torch gives ranks to end by themselves, where it can be told; else more."""
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""What Python reports the stack of, on standard error, which is a file for all ranks but the first."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    code: int
    why: str
    """The root cause of a failure; empty if there is none, or it has been said already."""


def start_ranks(payload: dict[str, Any], nproc: int, run_dir: Path) -> int:
    """Start `nproc` ranks, again while that is asked for and helps; returns the exit code.

    A signal to this process leaves a note in the run folder that all ranks see at their next
    batch; a second one ends this process, and the kernel its ranks.
    """
    restarts = Restarts(payload["config"]["launch"]["max_restarts"], run_dir / "checkpoints")
    while True:
        if stop.requested():
            return stopped_early()
        begun = time.time()
        ended = _attempt(payload, nproc, run_dir)
        if ended.why:
            print(ended.why, file=sys.stderr, flush=True)
            note_failure(run_dir, ended.code, ended.why, begun)
        again = None if stop.requested() else restarts.after(ended.code)
        if again is None:
            return ended.code
        print(again.said, file=sys.stderr, flush=True)
        if again.resume is not None:
            config = payload["config"]
            changed = {**config, "trainer": {**config["trainer"], "resume": again.resume}}
            payload = {**payload, "config": changed}


def stopped_early() -> int:
    """Say that there was nothing to save; returns the exit code."""
    print("stopped before the first step; nothing to save: start again with the same command")
    return STOPPED


def _attempt(payload: dict[str, Any], nproc: int, run_dir: Path) -> Ended:
    """Start the ranks once and wait for them."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    _silence_elastic()
    with tempfile.TemporaryDirectory(prefix="springtide-") as scratch:
        (Path(scratch) / PAYLOAD).write_text(json.dumps(payload))
        os.environ[EXCHANGE] = scratch
        os.environ[stop.LAUNCHER] = str(os.getpid())
        _record_flights(run_dir)
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
        # Only torch newer than 2.11 has some of these; older ones then wait longer for stragglers.
        optional: dict[str, Any] = {"signals_to_handle": "", "shutdown_timeout": GRACE}
        known = {f.name for f in fields(ElasticConfig)}
        # The launcher shares this server, and on one node need not vote on who is there.
        port, server = _private_port()
        store = TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=server,
        )  # fmt: skip
        config = ElasticConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=run_dir.name,
            rdzv_backend="static",
            rdzv_endpoint=f"localhost:{store.port}",
            rdzv_configs={"rank": 0},
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            **{name: value for name, value in optional.items() if name in known},
        )
        try:
            # -P: a file of the user's named like one of our packages must not stand in for it.
            elastic_launch(config, sys.executable)("-P", "-m", "trainer.worker")
        except ChildFailedError as error:
            return _explain(error.failures, Path(scratch))
        finally:
            for name in (EXCHANGE, stop.LAUNCHER):
                os.environ.pop(name, None)
    return Ended(DONE, "")


def _private_port() -> tuple[int, int]:
    """A free port that only this machine reaches, and the descriptor of the socket that listens there.

    Free: two runs on one machine do not collide. torch's own server would listen to the network.
    """
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(4096)
    return server.getsockname()[1], server.detach()


def _record_flights(run_dir: Path) -> None:
    """Have NCCL's last collectives written into the run folder when one of them times out.

    torchfrtrace, which comes with torch, reads them. What the environment says already, stands.
    """
    import torch

    if torch.cuda.is_available():
        (run_dir / "nccl").mkdir(exist_ok=True)
        for name, value in (
            ("TORCH_FR_BUFFER_SIZE", "2000"),
            ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
            ("TORCH_FR_DUMP_TEMP_FILE", str(run_dir / "nccl" / "rank_")),
        ):
            os.environ.setdefault(name, value)


def _silence_elastic() -> None:
    """The launcher's own logs repeat what `_explain` says once."""
    import logging

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def _explain(failures: Mapping[int, Any], scratch: Path) -> Ended:
    """The exit code of a failed job, and its root cause, if that is not said yet.

    A rank that a signal killed leaves no record, and its peers fail because it is gone; otherwise
    the rank that failed first is the cause. What torch had to kill, seconds later, is none.
    """
    first_second = min(failure.timestamp for failure in failures.values())
    killed = [
        (rank, failure)
        for rank, failure in sorted(failures.items())
        if failure.exitcode < 0 and failure.timestamp <= first_second + GRACE // 2
    ]
    if killed:
        rank, failure = killed[0]
        name = signal.Signals(-failure.exitcode).name
        hint = f": where it was, ranks/rank{rank}.log says" if rank and name in CRASHES else ""
        hint = " (often the kernel, out of memory)" if name == "SIGKILL" else hint
        return Ended(FAILED, f"rank {rank} was killed by {name}{hint}")
    records = [json.loads(file.read_text()) for file in scratch.glob("rank-*.json")]
    if records:
        first = min(records, key=lambda record: record["time"])
        return Ended(int(first["code"]), str(first["text"]))
    codes = [failure.exitcode for failure in failures.values()]
    return Ended(STOPPED if STOPPED in codes else codes[0], "")
