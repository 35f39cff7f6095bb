"""Where the ranks come from: decided once, from the configuration and the environment.

| seen | what happens |
|---|---|
| `RANK` and `WORLD_SIZE` (torchrun) | this process is that rank |
| a SLURM step with more than one task | this process is the task's rank |
| neither | one rank per visible GPU, or two CPU ranks; `launch.nproc` overrides |
| one rank | it runs in this process, so that a debugger works |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from configs.values import at_least
from parallel.mesh import ParallelConfig
from trainer.errors import ConfigError

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
    max_restarts: int = 0
    """After a failure, start the ranks again from the newest checkpoint, up to so many times without a
    new checkpoint in between."""

    def __post_init__(self) -> None:
        if self.nproc is not None:
            at_least("launch.nproc", self.nproc, 1)
        at_least("launch.max_restarts", self.max_restarts, 0)
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
        _refuse_restarts(launch, "torchrun starts the ranks: give it --max-restarts")
        return Place("torchrun", int(env["WORLD_SIZE"]))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PROCID" in env and tasks > 1:
        if launch.nproc is not None:
            raise ConfigError(
                f"launch.nproc={launch.nproc}, but this is one of {tasks} tasks of a SLURM step: "
                "leave launch.nproc unset under srun"
            )
        _refuse_restarts(launch, "SLURM starts the ranks: have it requeue the job")
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


def _refuse_restarts(launch: LaunchConfig, instead: str) -> None:
    """Only what starts ranks can start them again."""
    if launch.max_restarts:
        raise ConfigError(
            f"launch.max_restarts={launch.max_restarts}, but {instead}, with run.dir and "
            "trainer.resume=auto, and set launch.max_restarts=0"
        )


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
