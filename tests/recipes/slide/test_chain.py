"""Which stages the chain has, and what each reads."""

from pathlib import Path

import pytest

from recipes.slide.chain import STAGES, SlideTask, SlideTaskConfig


def stages(**changes):
    task = SlideTask(task=SlideTaskConfig(**changes), model=None, data=None, seed=0)
    return {stage.name: stage.nodes["task"] for stage in task.stages(Path("run"))}


def test_reinforcement_is_a_stage_if_asked_for():
    without, found = stages(), stages(rl=True)
    assert list(found) == list(STAGES)
    assert list(without) == [name for name in STAGES if name != "list_rl"]
    assert found["list_rl"]["teacher"] == found["list_eval"]["models"]["student"]
    assert found["list_eval"]["models"]["improved"] == "run/list_rl/exported"
    assert "improved" not in without["list_eval"]["models"]


def test_with_folds_lists_are_those_of_teachers_without_the_user():
    found = stages(folds=3, stages={"gr_train": {"task": {"beams": 12}}})
    parts = [f"gr_train_fold{fold}" for fold in range(3)]
    assert list(found)[:6] == ["sid_build", "gr_train", *parts, "beam_export"]
    assert [found[part]["fold"] for part in parts] == [0, 1, 2]
    assert {found[part]["folds"] for part in parts} == {3}
    assert {found[name]["beams"] for name in ("gr_train", *parts)} == {12}
    assert "folds" not in found["gr_train"]
    assert found["beam_export"]["teachers"] == [f"run/{part}/exported" for part in parts]
    assert found["list_distill"]["teacher"] == "run/gr_train/exported"
    assert found["list_eval"]["models"]["teacher"] == "run/gr_train/exported"
    with pytest.raises(ValueError, match=r"folds=1: set task.folds to 2 or more, or to 0"):
        stages(folds=1)


def test_an_ensembles_teachers_differ_in_their_seed_and_make_the_lists_together():
    own = {"gr_train": {"task": {"beams": 12}, "trainer": {"steps": 9}}}
    task = SlideTask(task=SlideTaskConfig(ensemble=3, stages=own), model=None, data=None, seed=5)
    found = {stage.name: stage.nodes for stage in task.stages(Path("run"))}
    more = ["gr_train_seed1", "gr_train_seed2"]
    assert list(found)[:5] == ["sid_build", "gr_train", *more, "beam_export"]
    assert [found[name]["trainer"] for name in more] == [{"steps": 9, "seed": n} for n in (6, 7)]
    assert {found[name]["task"]["beams"] for name in more} == {12}
    all_of_them = [f"run/{name}/exported" for name in ("gr_train", *more)]
    assert found["beam_export"]["task"]["teachers"] == all_of_them
    assert found["list_eval"]["task"]["models"]["ensemble"] == all_of_them
    assert found["list_distill"]["task"]["teacher"] == all_of_them[0]
    assert "ensemble" not in stages()["list_eval"]["models"]
    with pytest.raises(ValueError, match=r"set task.folds=0, or task.ensemble=1"):
        stages(folds=2, ensemble=2)
