"""Whole runs on TIDE: the numbers of torch's collectives, and the same ends."""

import os
import signal
import time

import pytest

from tests.processes import ranks_of
from tests.runs.helpers import (
    SMALL,
    finish,
    launch,
    metrics,
    program,
    reached,
    train,
    wait_for,
)

pytestmark = pytest.mark.slow


def figures(run_dir):
    return [(row["loss"], row["grad_norm"]) for row in metrics(run_dir)]


def test_a_run_and_its_resume_equal_stock_bit_for_bit(tmp_path):
    """A checkpoint moves between the two: written on one, resumed on the other."""
    common = [
        *SMALL,
        "trainer.resume=auto",
        "optim.schedule=constant",
        "trainer.micro_batch_size=2",
    ]
    for name, parts in (
        ("stock", [("stock", 12)]),
        ("tide", [("tide", 12)]),
        ("moved", [("tide", 5), ("stock", 12)]),
    ):
        for collectives, steps in parts:
            code, output = train(
                *common, f"collectives={collectives}", f"trainer.steps={steps}", f"run.dir={name}",
                cwd=tmp_path,
            )  # fmt: skip
            assert code == 0, output
            assert f"collectives  {collectives}" in output
    assert figures(tmp_path / "tide") == figures(tmp_path / "stock")
    assert figures(tmp_path / "moved") == figures(tmp_path / "stock")


def test_one_rank_stays_on_torchs_collectives_and_says_so(tmp_path):
    code, output = program(*SMALL, "launch.nproc=1", "trainer.steps=1", cwd=tmp_path)
    assert code == 0, output
    assert "3 groups on torch's collectives: it has one rank" in " ".join(output.split())


@pytest.mark.parametrize(("node_size", "victim", "blow"), [(2, 0, "SIGKILL"), (1, 1, "SIGSEGV")])
def test_a_killed_rank_ends_the_run_and_leaves_nothing(node_size, victim, blow, tmp_path):
    """Within a node a link closes, between nodes a connection does; a crash shows where it was."""
    before = set(os.listdir("/dev/shm"))
    where = (f"parallel.node_size={node_size}", "trainer.steps=100000", "run.dir=r")
    process = launch(*SMALL, *where, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 3))
    begin = time.monotonic()
    os.kill(ranks_of(process.pid)[victim], signal.Signals[blow])
    code, output = finish(process)
    assert code == 1, output
    assert f"rank {victim} was killed by {blow}" in output
    assert ("ranks/rank1.log" in output) == (blow == "SIGSEGV")
    log = (tmp_path / "r/ranks/rank1.log").read_text()
    assert ("Segmentation fault" in log and "in train" in log) == (blow == "SIGSEGV")
    assert time.monotonic() - begin < 50
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "springtide" in name}


def test_the_recipe_for_70b_cut_down_learns(tmp_path):
    """In bf16, with recomputed layers, as it is made for."""
    cut = [key for key in SMALL if not key.startswith("trainer.batch_size")]
    code, output = train(
        "+recipe=llama70b_fsdp_tide", *cut, "model.vocab_size=257", "trainer.batch_size=4",
        "trainer.steps=4", "optim.lr=1e-2", "optim.warmup=0", "run.dir=r", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    losses = [row["loss"] for row in metrics(tmp_path / "r")]
    assert losses[-1] < losses[0] - 0.2
