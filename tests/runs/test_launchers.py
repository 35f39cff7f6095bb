"""Other launchers start the ranks: torchrun on two nodes, the tasks of a SLURM step, two runs at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import children
from tests.runs.helpers import (
    SMALL,
    finish,
    launch,
    metrics,
    program,
    reached,
    start,
    together,
    train,
    wait_for,
)

pytestmark = pytest.mark.slow
TORCHRUN = "torch.distributed.run"


def test_torchrun_on_two_nodes_makes_one_run(tmp_path):
    """Two agents on this machine, two ranks each, all of them new interpreters: one run folder, one
    console, one configuration."""
    port = 20_000 + os.getpid() % 20_000
    common = [
        "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1", "-m", "trainer", *SMALL, "trainer.steps=4", "parallel.replicate=2",
    ]  # fmt: skip
    nodes = [start(*common, cwd=tmp_path, prefix=("-m", TORCHRUN)) for _ in range(2)]
    ended = [finish(node) for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    output = "".join(text for _, text in ended)
    assert output.count("done: 4 steps") == 1
    assert "4 x CPU, torchrun; replicate 2 x shard 2" in output
    [folder] = (tmp_path / "runs").iterdir()
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == [
        "checkpoints", "config.yaml", "metrics.jsonl", "ranks", "report.html",
    ]  # fmt: skip
    assert sorted(p.name for p in (folder / "ranks").iterdir()) == [
        "rank1.log", "rank2.log", "rank3.log",
    ]  # fmt: skip
    assert len(metrics(folder)) == 4


@pytest.mark.long
def test_torchrun_goes_on_with_fewer_nodes(tmp_path):
    """Of two agents one is killed with its rank: the other starts again, alone, from the checkpoint."""
    port = 20_000 + (os.getpid() + 13) % 20_000
    common = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=15", "-m", "trainer", *SMALL, "trainer.steps=100000",
        "checkpoint.every=2", "trainer.resume=auto", "run.dir=r", "launch.timeout=10",
    ]  # fmt: skip
    first = launch(*common, cwd=tmp_path, module=TORCHRUN)
    wait_for(lambda: any(f":{port:04X} " in Path(f"/proc/net/{kind}").read_text()
                         for kind in ("tcp", "tcp6")))  # it is the one where they meet  # fmt: skip
    other = launch(*common, cwd=tmp_path, module=TORCHRUN)

    def ranks():
        return [row["ranks"] for row in metrics(tmp_path / "r", "start")]

    wait_for(lambda: ranks()[-1:] == [2])  # perhaps the first one had begun alone
    wait_for(lambda: metrics(tmp_path / "r", "save"))
    for pid in (other.pid, *children(other.pid)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: ranks()[-1] == 1, timeout=180)
    seen = metrics(tmp_path / "r")[-1]["step"]
    wait_for(lambda: reached(tmp_path / "r", seen + 4))
    (tmp_path / "r" / "stop").touch()
    code, output = finish(first)
    assert (code, "stopped after step" in output) == (0, True), output
    assert metrics(tmp_path / "r", "start")[-1]["resumed"].startswith("step-")
    steps = [row["step"] for row in metrics(tmp_path / "r")]
    assert steps == list(range(1, len(steps) + 1))


def test_torchrun_prints_a_wrong_key_once(tmp_path):
    code, output = program(
        "--standalone", "--nproc-per-node=2", "-m", "trainer", "paralel.shard=2", cwd=tmp_path,
        module=TORCHRUN,
    )  # fmt: skip
    assert code != 0
    assert output.count("did you mean parallel.shard?") == 1
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_under_torchrun_trains_nothing(tmp_path):
    code, output = train(*SMALL, "trainer.dry_run=true", cwd=tmp_path)
    assert code == 0, output
    assert output.count("sequences") == 1
    assert not (tmp_path / "runs").exists()


def test_files_named_like_our_packages_do_not_stand_in_for_them(tmp_path):
    """Ranks do not import from the folder that the command was given in; `springtide` does not either."""
    (tmp_path / "models.py").write_text("raise ImportError('the wrong models')")
    command = Path(sys.executable).parent / "springtide"
    if not command.is_file():
        pytest.skip("not installed as a command")
    done = subprocess.run(
        [command, *SMALL, "trainer.steps=1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_with_other_data_are_refused(tmp_path):
    port = 20_000 + (os.getpid() + 7) % 20_000
    nodes = []
    for rank, text in enumerate(("x" * 1000, "y" * 3000)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.txt").write_text(text)
        nodes.append(
            launch(
                "--nnodes=2",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                "--local-addr=127.0.0.1",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                "-m",
                "trainer",
                *SMALL,
                "data.files=[a.txt]",
                "data.holdout=0",
                f"run.dir={tmp_path}/r",
                cwd=tmp_path / str(rank),
                module=TORCHRUN,
            )
        )
    output = "".join(finish(node)[1] for node in nodes)
    assert "ranks found different training data" in output


def test_torchruns_sigterm_saves(tmp_path):
    process = launch(
        "--standalone", "--nproc-per-node=2", "-m", "trainer", *SMALL, "trainer.steps=100000",
        "run.dir=r", cwd=tmp_path, module=TORCHRUN,
    )  # fmt: skip
    wait_for(lambda: reached(tmp_path / "r", 3))
    process.send_signal(signal.SIGTERM)
    _, output = finish(process)
    assert "resume with: the same command with run.dir=r trainer.resume=auto" in output
    last = metrics(tmp_path / "r")[-1]["step"]
    assert (tmp_path / "r" / "checkpoints" / f"step-{last:08d}" / "trainer.json").is_file()


def test_the_tasks_of_a_slurm_step_are_the_ranks(tmp_path):
    """Two tasks on two nodes; the job around the step is larger, and must not matter."""
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    tasks = [{**step, "SLURM_PROCID": rank, "SLURM_NODEID": rank} for rank in ("0", "1")]
    code, output = together([*SMALL, "trainer.steps=4", "run.dir=r"], tmp_path, tasks)
    assert code == 0, output
    assert "2 x CPU, slurm; shard 2" in output
    assert output.count("done: 4 steps") == 1
    assert len(metrics(tmp_path / "r")) == 4


def test_two_runs_at_once_on_one_machine(tmp_path):
    """Started in the same second: neither port nor folder collides."""
    runs = [launch(*SMALL, "trainer.steps=4", f"trainer.seed={n}", cwd=tmp_path) for n in range(2)]
    for process in runs:
        code, output = finish(process)
        assert code == 0, output
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all(len(metrics(folder)) == 4 for folder in folders)


def test_a_sweep_runs_each_value_in_a_folder_of_its_own(tmp_path):
    code, output = program(
        "--multirun", "optim.lr=1e-3,2e-3", *SMALL, "trainer.steps=2", "launch.nproc=1",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert output.count("done: 2 steps") == 2


def test_under_torchrun_a_failing_rank_shows_its_traceback_once(plugin, tmp_path):
    code, output = program(
        "--standalone", "--nproc-per-node=2", "-m", "trainer", "task=faulty", "model=faulty",
        "data=faulty", *SMALL, "task.fault=raise", cwd=tmp_path, module=TORCHRUN, env=plugin,
    )  # fmt: skip
    assert code == 1, output
    assert output.count("RuntimeError: this rank was told to fail") == 1, output
