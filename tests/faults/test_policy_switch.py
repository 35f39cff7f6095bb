"""Killed while a policy decides which adapters train, and while they are switched."""

import json

import pytest
import torch

from tests.faults.inject import Fault, in_turn
from tests.faults.runs import run
from tests.recipes.lelora.toys import write_texts
from tests.runs.helpers import metrics, weights
from tests.runs.test_lelora import LELORA

pytestmark = pytest.mark.slow
# without a probe, which fits these few texts so well that nothing is switched after it
WORDS = (
    "+recipe=lelora_classify", "data=labelled", "data.files=[texts.tsv]", "model.hidden_size=16",
    "model.intermediate_size=24", "model.num_heads=2", "+model.config.initializer_range=0.2", *LELORA,
    "task.probe=0", "trainer.steps=5", "checkpoint.every=1", "trainer.resume=auto", "run.dir=r",
    "launch.timeout=10",
)  # fmt: skip
BLOWS = [
    Fault("kill", "decision", 1, at=2),  # decisions are after steps 2, 4 and so on
    Fault(
        "kill", "switch", 0, at=15
    ),  # thirteen at the start; one adapter is switched, the next is not
    Fault("kill", "switched", 1, at=1),
]


def decided(run_dir):
    lines = (run_dir / "decisions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_killed_around_its_decisions_decides_as_if_it_had_not_been(tmp_path):
    for name in ("whole", "struck"):
        (tmp_path / name).mkdir()
        write_texts(tmp_path / name)
    code, output = run(*WORDS, cwd=tmp_path / "whole")
    assert code == 0, output
    blows = in_turn(BLOWS, tmp_path)
    code, output = run(*WORDS, "launch.max_restarts=3", cwd=tmp_path / "struck", fault=blows)
    assert code == 0, output
    assert "Traceback" not in output
    assert output.count("was killed by SIGKILL") == output.count("starting again from ") == 3
    whole, struck = tmp_path / "whole" / "r", tmp_path / "struck" / "r"
    assert decided(struck) == decided(whole)
    assert decided(whole)
    assert [r["loss"] for r in metrics(struck)] == [r["loss"] for r in metrics(whole)]
    ours, theirs = weights(struck, 5)[0], weights(whole, 5)[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
