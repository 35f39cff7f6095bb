import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from trainer.doctor import machine
from trainer.doctor.cluster import differences, look_together, skew
from trainer.doctor.finding import NOTE, PROBLEM, WELL, Finding, is_fit, lines

CPU = torch.device("cpu")
NAMES = ["software", "GPUs", "collectives", "run folder", "shared memory", "extras", "wandb"]


def states(findings):
    return {each.what: each.state for each in findings}


def test_a_machine_without_gpus_is_told_so_and_can_still_run(tmp_path, capfd):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.doctor", "--runs", tmp_path / "runs"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note  GPUs" in done.stdout
    assert "TIDE over shm between CPU ranks" in done.stdout
    assert done.stdout.endswith("runs can start here\n")
    assert not (tmp_path / "runs").exists()


def test_everything_is_looked_at(tmp_path):
    found = list(machine.look(tmp_path))
    assert [each.what for each in found if each.what in NAMES] == NAMES
    assert is_fit(found)


@pytest.mark.parametrize(
    ("change", "what", "state", "words"),
    [
        ((machine, "PYTHONS", ((3, 8), (3, 9))), "software", PROBLEM, "use Python 3.8 to 3.9"),
        ((os, "access", lambda place, how: False), "run folder", PROBLEM, "set run.root or run.dir"),
        ((machine, "SHARED", 10.0**6), "shared memory", NOTE, "docker run --shm-size"),
        ((machine, "find_spec", lambda name: None), "extras", NOTE, "springtide[dashboard,data,tensorboard]"),
        ((machine, "has_key", lambda: True), "wandb", WELL, "there is a key"),
    ],
)  # fmt: skip
def test_what_is_not_well_has_a_remedy(change, what, state, words, tmp_path, monkeypatch):
    monkeypatch.setattr(*change)
    (found,) = [each for each in machine.look(tmp_path) if each.what == what]
    assert found.state == state
    assert words in lines([found])[0]


def test_a_torch_that_changed_is_a_problem(tmp_path, monkeypatch):
    def changed():
        raise RuntimeError("torch changed something: springtide supports torch 2.11 to 2.13")

    monkeypatch.setattr(machine, "check_private_apis", changed)
    assert "BAD   software" in lines(machine.look(tmp_path))[0]


def look(folder, local_size):
    own = [Finding("software", PROBLEM if torch.distributed.get_rank() == 1 else WELL, "text")]
    return list(look_together(own, Path(folder), local_size, CPU))


def test_ranks_look_at_each_other(tmp_path):
    """Two virtual nodes of two; all ranks come to the same, and hear of what is bad elsewhere."""
    four = run_ranks(4, look, tmp_path / "runs", 2)
    assert all(found == four[0] for found in four)
    assert [each.what for each in four[0]][:1] == ["software"]
    assert [each.what.split(",")[0] for each in four[0]][1:] == [
        "software", "ranks", "clocks", "run folder", "network",
    ]  # fmt: skip
    assert not is_fit(four[0])
    assert list((tmp_path / "runs").iterdir()) == []
    alone = run_ranks(2, look, tmp_path, 2)
    assert "network" not in states(alone[0])


def about(**changes):
    base = {
        "Python": "3.12.1",
        "torch": "2.13.0",
        "NCCL": "NCCL 2.31.0",
        "device": "H200",
        "memory": 140,
    }
    return base | changes


def test_differences_between_ranks_are_named():
    assert list(differences([about(), about()])) == []
    (found,) = differences([about(), about(), about(torch="2.11.0")])
    assert (found.what, found.state) == ("torch", PROBLEM)
    assert "2.13.0 on 0, 1; 2.11.0 on 2" in found.text
    (found,) = differences([about(), about(device="H100")])
    assert found.state == NOTE


def test_clocks_that_disagree():
    assert skew([0.0, 0.002, -0.001]).state == WELL
    assert "3.0 ms apart" in skew([0.0, 0.002, -0.001]).text
    found = skew([0.0, 5.0, 0.1])
    assert found.state == NOTE
    assert "rank 1 is ahead" in found.text
