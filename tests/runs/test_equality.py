"""The same numbers however a run is split, stopped or resumed."""

import random
import shutil
import signal

import pytest
import torch

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
    weights,
)

pytestmark = pytest.mark.slow


def losses(run_dir):
    return [row["loss"] for row in metrics(run_dir)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    code, output = program(*SMALL, "launch.nproc=1", "trainer.steps=20", "run.dir=one", cwd=folder)
    assert code == 0, output
    return losses(folder / "one")


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, []),
        (2, ["trainer.micro_batch_size=1", "collectives=stock"]),
        (1, ["trainer.micro_batch_size=2", "trainer.workers=2"]),
        (4, ["parallel.node_size=2", "parallel.reshard_after_forward=2"]),
        (4, ["parallel.replicate=2", "parallel.activation_checkpointing=selective"]),
        (2, ["trainer.micro_batch_size=2", "parallel.reduce_every_micro_batch=true"]),
        (2, ["parallel.sequence.size=2"]),
        (
            4,
            [
                "parallel.sequence.size=2",
                "parallel.replicate=2",
                "trainer.micro_batch_size=2",
                "parallel.activation_checkpointing=selective",
                "collectives=stock",
            ],
        ),
    ],
)
def test_losses_equal_one_process_for_20_steps(one_process, ranks, changes, tmp_path):
    code, output = train(
        *SMALL, *changes, "trainer.steps=20", "run.dir=r", ranks=ranks, cwd=tmp_path
    )
    assert code == 0, output
    assert len(one_process) == 20
    assert losses(tmp_path / "r") == pytest.approx(one_process, abs=1e-5)


def test_a_killed_run_started_again_ends_with_the_same_weights(tmp_path):
    """kill -9 of one rank at a random step; the rest is a matter of the same command again."""
    common = [*SMALL, "trainer.steps=30", "checkpoint.every=4", "trainer.resume=auto"]
    code, output = train(*common, "run.dir=whole", cwd=tmp_path)
    assert code == 0, output
    step = random.Random().randint(2, 24)
    process = launch(*common, "run.dir=killed", cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "killed", step))
    ranks = ranks_of(process.pid)
    victim = random.Random().choice(sorted(ranks))
    import os

    os.kill(ranks[victim], signal.SIGKILL)
    code, output = finish(process)
    assert code == 1, output
    assert f"rank {victim} was killed by SIGKILL" in output
    assert "Traceback" not in output
    code, output = train(*common, "run.dir=killed", cwd=tmp_path)
    assert code == 0, output
    expected, progress = weights(tmp_path / "whole", 30)
    got, same = weights(tmp_path / "killed", 30)
    assert progress["samples"] == same["samples"] == 240
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected), f"killed at step {step}"
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_resuming_on_another_number_of_ranks(tmp_path):
    """Two ranks, then two that share sequences, then three: the losses of one process all the way."""
    common = [*SMALL, "run.dir=r", "trainer.resume=auto", "trainer.batch_size=12"]
    for ranks, steps, shared in ((2, 4, 1), (2, 6, 2), (3, 9, 1)):
        words = [f"trainer.steps={steps}", f"parallel.sequence.size={shared}"]
        code, output = train(*common, *words, ranks=ranks, cwd=tmp_path)
        assert code == 0, output
    alone = [*SMALL, "run.dir=a", "trainer.batch_size=12", "launch.nproc=1"]
    # The schedule knows the number of steps, so the reference must be extended in the same way.
    for steps in (4, 6, 9):
        code, output = program(
            *alone, f"trainer.steps={steps}", "trainer.resume=auto", cwd=tmp_path
        )
        assert code == 0, output
    assert losses(tmp_path / "r") == pytest.approx(losses(tmp_path / "a"), abs=1e-5)
    assert [row["step"] for row in metrics(tmp_path / "r")] == list(range(1, 10))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, ["model.vocab_size=257"]),
        (2, ["model.vocab_size=32001", "model.tie_embeddings=false"]),
        # 16-wide heads and a hidden size of 3 x 16: rows that no number of ranks divides
        (4, ["model.hidden_size=6", "model.intermediate_size=3", "model.num_layers=1"]),
    ],
)
def test_awkward_shapes_train(ranks, changes, tmp_path):
    code, output = train(
        *SMALL, *changes, "trainer.steps=3", "run.dir=r", ranks=ranks, cwd=tmp_path
    )
    assert code == 0, output
    assert losses(tmp_path / "r")[-1] < losses(tmp_path / "r")[0] + 0.1


def test_five_documents_on_four_ranks(tmp_path):
    for number in range(2, 8):  # number 4 is held out
        (tmp_path / f"{number}.txt").write_text(f"document number {number}")
    common = [*SMALL, "data.files=[*.txt]", "data.packing=none", "data.holdout=0.3",
              "trainer.steps=4", "trainer.eval_every=2", "run.dir=r", "trainer.batch_size=4"]  # fmt: skip
    code, output = train(*common, ranks=4, cwd=tmp_path)
    assert code == 0, output
    assert len(metrics(tmp_path / "r")) == 4
    assert "eval at step 4" in output


def test_epochs_end_a_run_on_all_ranks_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 32 * 20)
    common = ["data.files=[a.txt]", "data.holdout=0", "trainer.epochs=2"]
    code, output = train(*SMALL, *common, "run.dir=r", cwd=tmp_path)
    assert code == 0, output
    assert len(metrics(tmp_path / "r")) == 2 * 21 // 8
    code, output = program(*SMALL, *common, "trainer.batch_size=100", "run.dir=s", cwd=tmp_path)
    assert code == 3
    assert "21 samples do not fill one batch of 100" in output


def test_settings_given_on_resume_win_over_the_checkpoint(tmp_path):
    """The loss of a step with another weight decay differs from that of a plain resume."""
    common = [*SMALL, "run.dir=r", "trainer.resume=auto", "optim.lr=0.1", "optim.schedule=constant"]
    code, output = train(*common, "trainer.steps=2", cwd=tmp_path)
    assert code == 0, output
    shutil.copytree(tmp_path / "r", tmp_path / "s")
    code, output = train(*common, "trainer.steps=5", cwd=tmp_path)
    assert code == 0, output
    changed = ["run.dir=s", "optim.weight_decay=5.0", "trainer.steps=5"]
    code, output = train(*common, *changed, cwd=tmp_path)
    assert code == 0, output
    assert losses(tmp_path / "s")[:3] == losses(tmp_path / "r")[:3]
    assert losses(tmp_path / "s")[3:] != losses(tmp_path / "r")[3:]
