import mmap
import os
from pathlib import Path

import pytest
import torch

from parallel.mesh import ParallelConfig, SequenceConfig
from trainer import ranks
from trainer.errors import ConfigError
from trainer.launch import LaunchConfig, Place, decide, slurm_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
SLURM = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,09],login1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)",
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "99",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nproc", "parallel", "env", "gpus", "expected"),
    [
        (None, {}, {}, 0, Place("local", 2)),
        (None, {}, {}, 8, Place("local", 8)),
        (None, {}, {}, 1, Place("local", 1)),
        (3, {}, {}, 0, Place("local", 3)),
        (2, {}, {}, 8, Place("local", 2)),
        (None, {"shard": 4}, {}, 0, Place("local", 4)),
        (None, {"shard": 1}, {}, 0, Place("local", 1)),
        (None, {"replicate": 2, "sequence": SequenceConfig(size=2)}, {}, 0, Place("local", 4)),
        (None, {}, TORCHRUN, 8, Place("torchrun", 16)),
        (8, {}, TORCHRUN, 8, Place("torchrun", 16)),
        (None, {}, SLURM, 8, Place("slurm", 12)),
        # an interactive allocation: one task, whatever the job has
        (None, {}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0, Place("local", 2)),
        (None, {}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 4, Place("local", 4)),
    ],
)
def test_who_starts_the_ranks(nproc, parallel, env, gpus, expected):
    assert decide(LaunchConfig(nproc=nproc), ParallelConfig(**parallel), env, gpus) == expected


@pytest.mark.parametrize(
    ("nproc", "env", "gpus", "message"),
    [
        (4, TORCHRUN, 8, "torchrun started 8 ranks on this machine"),
        (4, SLURM, 8, "one of 12 tasks of a SLURM step"),
        (4, {}, 2, "launch.nproc=4, but 2 GPUs are visible: set launch.nproc=2"),
    ],
)
def test_contradictions_are_refused(nproc, env, gpus, message):
    with pytest.raises(ConfigError, match=message):
        decide(LaunchConfig(nproc=nproc), ParallelConfig(), env, gpus)


def test_slurm_variables_of_the_step_become_torchs():
    assert slurm_environment(SLURM) == {
        "RANK": "9", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03", "MASTER_PORT": str(20_000 + (4711 * 7 + 2) % 20_000),
    }  # fmt: skip
    for nodes, first in (
        ("one", "one"),
        ("rack[1-2]n[03-04],x", "rack1n03"),
        ("gpu-[001-004,9].cluster", "gpu-001.cluster"),
    ):
        assert slurm_environment(SLURM | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_nccl_is_asked_for_its_last_collectives_by_names_that_torch_knows(tmp_path, monkeypatch):
    """Where there are GPUs; what the environment says already, stands."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    ranks._record_flights(tmp_path)
    assert not any(name in os.environ for name in names)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(names[0], "7")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    ranks._record_flights(tmp_path)
    assert [os.environ[name] for name in names] == ["7", "1", f"{tmp_path}/nccl/rank_"]
    assert (tmp_path / "nccl").is_dir()
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found:
        assert found.find(b"TORCH_FR_BUFFER_SIZE") > 0
        assert found.find(b"TORCH_FR_DUMP_TEMP_FILE") > 0
