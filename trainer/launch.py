"""Where the ranks come from: decided once, from the configuration and the environment.

| seen | what happens |
|---|---|
| `RANK` and `WORLD_SIZE` (torchrun) | this process is that rank |
| a SLURM step with more than one task | this process is the task's rank |
| neither | one rank per visible GPU, or two CPU ranks; `launch.nproc` overrides |
| one rank | it runs in this process, so that a debugger works |
"""

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from configs.values import at_least
from parallel.mesh import ParallelConfig
from trainer import stop
from trainer.errors import FAILED, STOPPED, ConfigError

EXCHANGE = "SPRINGTIDE_EXCHANGE"
"""Environment variable with the private folder that a launcher and its ranks share: the composed
configuration goes one way, process ids and records of failures the other."""
PAYLOAD = "config.json"


@dataclass(kw_only=True)
class LaunchConfig:
    """The `launch` node."""

    nproc: int | None = None
    """Ranks on this machine; null: one per visible GPU, or two on the CPU."""
    device: str | None = None
    """What trainer.dry_run plans for: h200, h100, a100 ... or cpu; null: the GPUs of this machine."""
    timeout: float = 600.0
    """Seconds after which a collective that does not complete ends the job."""

    def __post_init__(self) -> None:
        if self.nproc is not None:
            at_least("launch.nproc", self.nproc, 1)
        if not 1 <= self.timeout <= 10**7:
            raise ValueError(
                f"launch.timeout={self.timeout}: set launch.timeout to 1 to 10000000 s"
            )


CHAIN = "stage of a chain"
"""The kind of a run that is one of `trainer.chain`: its folder is inside that of the chain."""


@dataclass(frozen=True)
class Invocation:
    """How a run was asked for, for headers and for the line that says how to resume."""

    kind: str
    overrides: list[str]


@dataclass(frozen=True)
class Place:
    """What starts the ranks, and how many there are."""

    kind: str
    """`local` (we start them), `torchrun` or `slurm` (this process is one of them)."""
    world_size: int


def decide(
    launch: LaunchConfig,
    parallel: ParallelConfig,
    env: Mapping[str, str],
    gpus: int,
    dry_run: bool = False,
) -> Place:
    """Which kind of launch this is. Raises `ConfigError` for contradictions.

    `dry_run` plans for more GPUs than there are.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        local = int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
        if launch.nproc not in (None, local):
            raise ConfigError(
                f"launch.nproc={launch.nproc}, but torchrun started {local} ranks on this machine: "
                "leave launch.nproc unset under torchrun"
            )
        return Place("torchrun", int(env["WORLD_SIZE"]))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PROCID" in env and tasks > 1:
        if launch.nproc is not None:
            raise ConfigError(
                f"launch.nproc={launch.nproc}, but this is one of {tasks} tasks of a SLURM step: "
                "leave launch.nproc unset under srun"
            )
        return Place("slurm", tasks)
    if launch.nproc is not None:
        if 0 < gpus < launch.nproc and not dry_run:
            raise ConfigError(
                f"launch.nproc={launch.nproc}, but {gpus} GPUs are visible: set launch.nproc={gpus} "
                "or less, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        return Place("local", launch.nproc)
    if gpus:
        return Place("local", gpus)
    wanted = parallel.replicate * parallel.sequence.size
    wanted *= parallel.shard or 1
    return Place("local", wanted if wanted > 1 or parallel.shard == 1 else 2)


def slurm_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, from those of the SLURM *step*.

    The step's, not the job's: a step may be smaller than its job. Rank 0 listens on a port that
    job and step decide, so that two jobs on one host do not meet.
    """
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    tasks_per_node = _expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = int(env.get("SLURM_NODEID", "0"))
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks_per_node[min(node, len(tasks_per_node) - 1)]),
        "MASTER_ADDR": env.get("MASTER_ADDR", _first_host(nodes)),
        "MASTER_PORT": env.get("MASTER_PORT", str(20_000 + (job * 7 + step) % 20_000)),
    }


def _first_host(nodes: str) -> str:
    """`gpu[03-05,09].cluster,login1` -> `gpu03.cluster`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert match is not None, nodes
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _expand_counts(text: str) -> list[int]:
    """`8(x2),4` -> [8, 8, 4]."""
    counts = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def start_ranks(payload: dict[str, Any], nproc: int, run_dir: Path) -> int:
    """Start `nproc` ranks of this machine with torch's elastic launcher; returns the exit code.

    A signal to this process leaves a note in the run folder that all ranks see at their next
    batch; a second one ends this process, and the kernel its ranks. A rank that dies ends the
    job: the others are given a few seconds, then killed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    if stop.requested():
        return stopped_early()
    _silence_elastic()
    with tempfile.TemporaryDirectory(prefix="springtide-") as scratch:
        (Path(scratch) / PAYLOAD).write_text(json.dumps(payload))
        os.environ[EXCHANGE] = scratch
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
        # Only torch newer than 2.11 has some of these; older ones then wait longer for stragglers.
        optional: dict[str, Any] = {"signals_to_handle": "", "shutdown_timeout": 5}
        known = {f.name for f in fields(ElasticConfig)}
        # A free port: two runs on one host do not collide. The launcher shares this server, and on one
        # node need not vote on who is there.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
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
            code, text = _explain(error.failures, Path(scratch))
            if text:
                from trainer.watch.aftermath import note_failure

                print(text, file=sys.stderr)
                note_failure(run_dir, code, text)
            return code
        finally:
            os.environ.pop(EXCHANGE, None)
    return 0


def _silence_elastic() -> None:
    """The launcher's own logs repeat what `_explain` says once."""
    import logging

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def stopped_early() -> int:
    """Say that there was nothing to save; returns the exit code."""
    print("stopped before the first step; nothing to save: start again with the same command")
    return STOPPED


def _explain(failures: Mapping[int, Any], scratch: Path) -> tuple[int, str]:
    """The exit code of a failed job, and its root cause, if that is not said yet.

    A rank that a signal killed leaves no record, and its peers fail because it is gone; otherwise
    the rank that failed first is the cause.
    """
    killed = [(rank, f) for rank, f in sorted(failures.items()) if f.exitcode < 0]
    if killed:
        rank, failure = killed[0]
        name = signal.Signals(-failure.exitcode).name
        hint = " (often the kernel, out of memory)" if name == "SIGKILL" else ""
        return FAILED, f"rank {rank} was killed by {name}{hint}"
    records = [json.loads(file.read_text()) for file in scratch.glob("rank-*.json")]
    if not records:
        codes = [failure.exitcode for failure in failures.values()]
        return (STOPPED if STOPPED in codes else codes[0]), ""
    first = min(records, key=lambda record: record["time"])
    return int(first["code"]), str(first["text"])
