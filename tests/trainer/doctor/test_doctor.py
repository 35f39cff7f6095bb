import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel.tide.reach import Reach
from tests.ranks import run_ranks
from trainer.doctor import gpus, machine, tide
from trainer.doctor.__main__ import _look
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
        "software", "ranks", "clocks", "run folder", "TIDE on a node", "TIDE over nodes", "network",
    ]  # fmt: skip
    said = {each.what: each.text for each in four[0]}
    assert said["TIDE on a node"] == "over shm between its ranks"
    assert said["TIDE over nodes"] == "over shm between all ranks"
    assert not is_fit(four[0])
    assert list((tmp_path / "runs").iterdir()) == []
    alone = run_ranks(2, look, tmp_path, 2)
    assert not {"network", "TIDE over nodes"} & set(states(alone[0]))


def test_no_gpu_is_a_problem_where_one_is_required(tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [_look(tmp_path, require_gpu=required) for required in (False, True)] == [0, 1]
    assert "mend what is BAD before a run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("built", "newest", "state", "words"),
    [
        ("13.0", (13, 2), WELL, "runs CUDA up to 13.2"),
        ("12.8", (13, 2), WELL, "runs CUDA up to 13.2"),
        ("12.8", (12, 4), WELL, "runs CUDA up to 12.4"),
        ("13.0", (12, 4), PROBLEM, "it runs CUDA 12.4, this torch is built for 13.0"),
        ("13.0", None, NOTE, "missing; this torch is built for CUDA 13.0"),
        (None, (12, 4), NOTE, "but this torch is built without CUDA"),
        (None, None, None, ""),
    ],
)
def test_the_driver_must_run_what_torch_was_built_for(built, newest, state, words, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(gpus, "newest_cuda", lambda: newest)
    found = list(gpus.driver())
    assert [each.state for each in found] == ([] if state is None else [state])
    assert words in "\n".join(lines(found)) if found else True


def test_the_nccl_that_runs_is_told_from_torchs(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(gpus, "running_version", lambda: (2, 32, 3))
    for problem, state in (("nccl4py does not load", NOTE), (None, WELL)):
        monkeypatch.setattr(gpus, "unusable", lambda problem=problem: problem)
        found = gpus.nccl()
        assert found.state == state
        assert found.text.startswith("NCCL 2.32.3 runs, torch was built with 2.28.9")


def test_network_cards_and_the_memory_they_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CARDS", tmp_path / "infiniband")
    assert "none does RDMA: nodes would talk over sockets" in lines([machine.cards()])[0]
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / "infiniband" / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    shown = "mlx5_0 400 Gb/sec, mlx5_2 400 Gb/sec"
    for limit, state in ((65536, NOTE), (machine.resource.RLIM_INFINITY, WELL)):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found = machine.cards()
        assert (found.state, found.text.startswith(shown)) == (state, True)


def disagree(first, second):
    found = [first, second][torch.distributed.get_rank()]
    return tide._agreed("TIDE on a node", found, "between its ranks")


@pytest.mark.parametrize(
    ("second", "state", "words"),
    [
        (Reach("nccl"), WELL, "over nccl between its ranks"),
        (Reach("symm_mem", instead="not nccl: too old"), NOTE, "nccl on 1 ranks, symm_mem on 1 ranks"),
        (Reach(None, "no peer access"), NOTE, "torch's collectives, for rank 1: no peer access"),
    ],
)  # fmt: skip
def test_ranks_must_agree_on_a_way(second, state, words):
    one, other = run_ranks(2, disagree, Reach("nccl"), second)
    assert one == other
    assert (one.state, words in lines([one])[0]) == (state, True)


def test_ranks_that_do_not_fill_their_nodes_stay_with_torch():
    for found in run_ranks(3, three_on_nodes_of_two):
        assert [each.what for each in found] == ["TIDE"]
        assert "are not spread evenly over nodes of 2" in found[0].remedy


def three_on_nodes_of_two():
    return list(tide.ways(2, CPU))


GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_gpus_are_looked_at(tmp_path):
    found = list(machine.look(tmp_path, require_gpu=True))
    assert {"driver", "GPUs", "links", "multicast", "NCCL", "network cards"} <= set(states(found))
    assert is_fit(found)


def look_from_gpu(folder):
    device = torch.device("cuda", torch.distributed.get_rank())
    return list(look_together([], Path(folder), 1, device))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_gpus_look_at_each_other(tmp_path, monkeypatch):
    """As two nodes of one GPU each."""
    monkeypatch.setenv("SPRINGTIDE_TEST_DEVICE", "cuda")
    one, other = run_ranks(2, look_from_gpu, tmp_path)
    assert one == other
    assert is_fit(one)
    known = states(one)
    if gpus.unusable() is None:
        assert known["puts and signals"] == known["TIDE over nodes"] == WELL
    else:
        assert known["TIDE over nodes"] == NOTE


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
