"""Which stages the chain has, and what each reads."""

from pathlib import Path

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
