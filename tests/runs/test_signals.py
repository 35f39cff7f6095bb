"""SIGTERM and Ctrl-C at any moment: finish what must be finished, save, exit 75, say how to go on."""

import os
import signal
import time

import pytest

from tests.processes import catches, ranks_of
from tests.runs.helpers import (
    SMALL,
    finish,
    launch,
    metrics,
    program,
    reached,
    start,
    train,
    wait_for,
)

pytestmark = pytest.mark.slow
LONG = ["trainer.steps=100000", "run.dir=r"]


def checkpoints(folder):
    return sorted(p.name for p in (folder / "r" / "checkpoints").glob("*"))


def check_stopped(code, output, folder):
    """Exit 75, a complete checkpoint of the last step reported, and the way on."""
    assert code == 75, output
    assert "resume with: python -m trainer" in output
    assert "Traceback" not in output
    last = metrics(folder / "r")[-1]["step"]
    assert checkpoints(folder) == ["latest", f"step-{last:08d}"]
    return last


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (signal.SIGTERM, []),
        (signal.SIGINT, ["trainer.workers=2"]),
        (signal.SIGTERM, ["launch.nproc=1"]),
    ],
)
def test_a_signal_while_training(number, changes, tmp_path):
    process = launch(*SMALL, *LONG, *changes, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 5))
    process.send_signal(number)
    last = check_stopped(*finish(process), tmp_path)
    again = program if "launch.nproc=1" in changes else train
    code, output = again(
        *SMALL, *LONG, *changes, f"trainer.steps={last + 2}", "trainer.resume=auto", cwd=tmp_path
    )
    assert code == 0, output
    assert f"step {last}, from" in output
    assert [row["step"] for row in metrics(tmp_path / "r")] == list(range(1, last + 3))


def test_ctrl_c_on_a_terminal_reaches_the_launcher_only_once(tmp_path):
    """A terminal signals the whole foreground group; the ranks must not take it for a second one."""
    process = start(*SMALL, *LONG, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: reached(tmp_path / "r", 3))
    os.killpg(process.pid, signal.SIGINT)
    check_stopped(*finish(process), tmp_path)


def test_a_signal_to_one_rank_stops_all(tmp_path):
    process = launch(*SMALL, *LONG, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 3))
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    check_stopped(*finish(process), tmp_path)


def test_a_file_stops_a_run_too(tmp_path):
    process = launch(*SMALL, *LONG, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 3))
    (tmp_path / "r" / "stop").touch()
    check_stopped(*finish(process), tmp_path)


@pytest.mark.parametrize("delay", [0.0, 3.0, 5.0])
def test_a_signal_while_starting(delay, tmp_path):
    """From the first moment on; nothing has been trained yet, or hardly anything."""
    process = start(*SMALL, *LONG, cwd=tmp_path)
    wait_for(lambda: catches(process.pid, signal.SIGTERM))  # Python itself has to start first
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert "start again with the same command" in output or "resume with" in output


def test_a_signal_while_evaluating(tmp_path):
    changes = ["trainer.eval_every=4", "trainer.eval_batch_size=1", "data.holdout=0.5"]
    process = launch(*SMALL, *LONG, *changes, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 4))
    time.sleep(0.5)  # an evaluation of the whole held-out half takes minutes
    process.send_signal(signal.SIGTERM)
    last = check_stopped(*finish(process), tmp_path)
    assert last == 4
    assert metrics(tmp_path / "r", "eval") == []
    # Going on begins with the evaluation that was interrupted, made short here.
    code, output = train(
        *SMALL, *LONG, *changes, "trainer.steps=4", "trainer.eval_samples=2", "trainer.resume=auto",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert [row["step"] for row in metrics(tmp_path / "r", "eval")] == [4]


def test_a_signal_while_saving(tmp_path):
    """The save under way is finished, and not made twice."""
    process = launch(*SMALL, *LONG, "checkpoint.every=2", "model.hidden_size=512",
                     "checkpoint.keep=1", cwd=tmp_path)  # fmt: skip
    folder = tmp_path / "r" / "checkpoints"
    wait_for(lambda: any(folder.glob(".saving-*")))
    process.send_signal(signal.SIGTERM)
    check_stopped(*finish(process), tmp_path)


@pytest.mark.skipif("not __import__('shutil').which('g++')", reason="needs a C++ compiler")
def test_a_signal_while_compiling(tmp_path):
    process = launch(
        *SMALL, *LONG, "parallel.compile=true", cwd=tmp_path,
        env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "inductor").exists())
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert "Traceback" not in output


def test_a_second_signal_stops_at_once(tmp_path):
    changes = ["trainer.eval_every=4", "trainer.eval_batch_size=1", "data.holdout=0.5"]
    process = launch(*SMALL, *LONG, *changes, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 2))
    ranks = ranks_of(process.pid)
    process.send_signal(signal.SIGSTOP)  # so that both arrive before the first is answered
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    begin = time.monotonic()
    code, output = finish(process)
    assert code == 1, output
    assert time.monotonic() - begin < 20
    assert "stopped at once, without saving" in output
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()))
