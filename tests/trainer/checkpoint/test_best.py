"""Which checkpoint is the best, that it stays, and that whoever asks gets it."""

import json
import math
import re
from pathlib import Path

import pytest

from models.causal_lm import CausalLMConfig
from recipes.pretrain import PretrainConfig
from recipes.text.config import TextConfig
from tests.ranks import run_ranks
from tests.runs.helpers import SMALL, metrics, train
from tests.trainer.checkpoint.test_saver import CPU, parts, progress
from trainer.checkpoint.best import Best, agree_if_better, better, known_best
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.folder import Checkpoints, read_progress
from trainer.checkpoint.saver import Saver
from trainer.config import Config, TrainerConfig
from trainer.errors import CONFIG, DONE, ConfigError
from trainer.export import export
from trainer.plan import make_plan
from trainer.verify import verify

LOWEST, HIGHEST = CheckpointConfig(lowest="loss"), CheckpointConfig(highest="loss")


def follow(config, values):
    """The steps that were the best when they came."""
    best, steps = None, []
    for step, value in enumerate(values, start=1):
        if found := better(config, best, step, {"loss": value, "other": 0.0}):
            best = found
            steps.append(step)
    return steps


def test_only_what_is_better_than_all_before_is_the_best():
    values = [math.nan, 3.0, 3.0, math.inf, 2.0, math.nan, 2.5, -math.inf, 4.0]
    assert follow(LOWEST, values) == [2, 5]
    assert follow(HIGHEST, values) == [2, 9]
    assert follow(CheckpointConfig(), values) == []


def test_a_figure_that_there_is_not_is_one_error():
    with pytest.raises(ConfigError, match=r"lowest=loss, but .* have mse, recall: set .*lowest"):
        better(LOWEST, None, 1, {"recall": 1.0, "mse": 2.0})
    with pytest.raises(ConfigError, match=r"no figures: set checkpoint.highest=null"):
        better(HIGHEST, None, 1, {})
    with pytest.raises(ValueError, match=r"highest=a and checkpoint.lowest=b.*set one of them"):
        CheckpointConfig(highest="a", lowest="b")


def agree():
    import torch.distributed as dist

    rank = dist.get_rank()
    found = agree_if_better(LOWEST, None, 7, {"loss": float(rank)})
    try:
        agree_if_better(LOWEST, found, 8, {"other": 0.0} if rank == 0 else {"loss": 0.0})
    except ConfigError as error:
        return found.value, str(error)
    return None


def test_ranks_whose_figures_differ_agree():
    assert len({answer for answer in run_ranks(2, agree)}) == 1


def test_what_is_known_is_of_the_same_figure_and_in_this_folder(tmp_path):
    best = Best("loss", highest=False, step=3, value=0.1)
    kept = json.loads(json.dumps({"best": best.entry()}))
    here = Checkpoints(tmp_path)
    assert known_best(LOWEST, kept, here) is None  # another run's folder
    here.of_step(3).mkdir()
    (here.of_step(3) / "manifest.json").write_text("{}")
    assert known_best(LOWEST, kept, here) == best
    assert known_best(HIGHEST, kept, here) is None
    assert known_best(CheckpointConfig(lowest="other"), kept, here) is None
    assert known_best(LOWEST, {"best": None}, here) is None


def save_with_best(folder, background):
    saver = Saver(CheckpointConfig(keep=1, lowest="loss", background=background), folder)
    names = []
    for step, best in ((2, 2), (4, 2), (6, 2), (8, 8), (10, 8)):
        known = {"best": Best("loss", False, best, 1.0).entry()}
        saver.save(*parts(step), {**progress(step), **known}, CPU)
        saver.wait()
        names.append(sorted(path.name[-2:] for path in saver.checkpoints.complete()))
    return names, saver.checkpoints.best().name


@pytest.mark.parametrize("background", [True, False])
def test_the_best_stays_until_a_better_one_is_on_the_disk(background, tmp_path):
    for names, best in run_ranks(2, save_with_best, tmp_path, background):
        assert names == [["02"], ["02", "04"], ["02", "06"], ["08"], ["08", "10"]]
        assert best == "step-00000008"


def test_evaluations_that_never_come_are_an_error_before_any_rank():
    config = Config(
        task=PretrainConfig(), model=CausalLMConfig(), data=TextConfig(), checkpoint=LOWEST,
        trainer=TrainerConfig(eval_every=0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"lowest=loss, but trainer.eval_every=0 .*: set"):
        make_plan(config, 1, None, frozenset())


@pytest.mark.slow
def test_a_run_keeps_its_best_over_a_resume_and_hands_it_out(tmp_path, monkeypatch, capsys):
    """By the highest loss the first evaluation, which falls on no checkpoint's step, is the best."""
    words = [
        *SMALL, "trainer.eval_every=2", "trainer.eval_samples=8", "checkpoint.keep=1", "optim.lr=0.01",
        "optim.warmup=0", "run.dir=r",
    ]  # fmt: skip
    code, output = train(
        *words, "checkpoint.highest=lost", "trainer.steps=4", ranks=1, cwd=tmp_path
    )
    assert code == CONFIG
    assert output.count("checkpoint.highest=lost, but evaluations of this run have") == 1

    words.append("checkpoint.highest=loss")
    for steps, resume in ((5, "never"), (9, "auto")):
        code, output = train(
            *words, f"trainer.steps={steps}", f"trainer.resume={resume}", cwd=tmp_path
        )
        assert code == 0, output
    checkpoints = Checkpoints(tmp_path / "r" / "checkpoints")
    assert [path.name[-1] for path in checkpoints.complete()] == ["2", "9"]
    evaluated = {row["step"]: row["loss"] for row in metrics(tmp_path / "r", "eval")}
    assert read_progress(checkpoints.newest())["best"] == {
        "figure": "loss", "highest": True, "step": 2, "value": evaluated[2],
    }  # fmt: skip
    assert "step-00000002 (best)" in (tmp_path / "r" / "report.html").read_text()

    # An evaluation that comes after its step was saved, as one does that a stop interrupted.
    again = [word for word in words if not word.startswith(("trainer.eval_every", "checkpoint.hi"))]
    steps = ["trainer.steps=4", "run.dir=late", "trainer.resume=auto"]
    for more in (["trainer.eval_every=0"], ["trainer.eval_every=2", "checkpoint.lowest=loss"]):
        code, output = train(*again, *steps, *more, ranks=1, cwd=tmp_path)
        assert code == 0, output
    late = Checkpoints(tmp_path / "late" / "checkpoints")
    assert late.best() == late.newest() == late.of_step(4)

    monkeypatch.chdir(tmp_path)
    assert export(["r", "out", "--step", "best"]) == DONE
    assert "step-00000002 of r is in out" in capsys.readouterr().out
    assert verify(Path("r")) == DONE
    assert re.search(r"^step-00000002  sound, .*  \(best\)$", capsys.readouterr().out, re.M)
