"""A run that is struck again and again, and compared after every blow with one that never was.

    campaign = Campaign(folder, whole, steps=48)           # `whole`: the run to compare with (conftest.py)
    campaign.strike(Fault("kill", "shards", rank=1))       # and the next one, from where that left it
    campaign.finish()                                      # equal bit for bit, every row of figures

Each blow ends the run; the same command starts it again with the next one.
"""

import re
from dataclasses import replace

import torch

from tests.faults.inject import Fault
from tests.faults.runs import run
from tests.runs.helpers import SMALL, metrics, weights
from trainer.checkpoint.folder import Checkpoints
from trainer.verify import problem

EVERY = 2
"""Steps between two checkpoints."""
EVALUATE = 4
"""Steps between two evaluations; how long a run is divides by it."""
LONGEST = 48
"""Steps of the undisturbed run that tests share: no figure depends on how many are to come."""
COMMON = (
    *SMALL, "model.num_layers=1", f"checkpoint.every={EVERY}", f"trainer.eval_every={EVALUATE}",
    "trainer.eval_samples=4", "trainer.resume=auto", "run.dir=r", "launch.timeout=10",
    "optim.schedule=constant", "checkpoint.lowest=loss",
)  # fmt: skip


def undisturbed(folder, steps, *changes):
    """The run to compare with, all of whose checkpoints stay."""
    folder.mkdir()
    words = [f"trainer.steps={steps}", "checkpoint.keep=1000", *changes]
    code, output = run(*COMMON, *words, cwd=folder)
    assert code == 0, output
    return folder / "r"


class Campaign:
    """See above."""

    def __init__(self, folder, reference, steps, *changes):
        assert steps % EVALUATE == 0, "the last step has an evaluation"
        folder.mkdir()
        self.folder, self.reference, self.run_dir = folder, reference, folder / "r"
        self.words = [*COMMON, f"trainer.steps={steps}", *changes]
        self.steps, self.blows = steps, 0

    def strike(self, fault, *changes, timeout=60):
        """Go on until the fault has ended the run; returns exit code and console."""
        self.blows += 1
        marker = self.folder / f"blow-{self.blows}"
        fault = replace(fault, marker=str(marker))
        code, output = run(
            *self.words, *changes, cwd=self.folder, fault=fault, timeout=timeout
        )  # fmt: skip
        assert marker.exists(), f"{fault} did not happen:\n{output}"
        assert code not in (0, 2), f"{fault} went unnoticed:\n{output}"
        check_one_error(fault, code, output)
        self.compare(fault)
        return code, output

    def compare(self, after):
        """Whatever there is of the run is what the undisturbed one had at that step."""
        for checkpoint in Checkpoints(self.run_dir / "checkpoints").complete():
            assert problem(checkpoint) is None, after
        newest = Checkpoints(self.run_dir / "checkpoints").newest()
        if newest is not None:
            same_checkpoint(self.run_dir, self.reference, int(newest.name[5:]), after)
        for kind, names in (("train", ("loss", "grad_norm", "skipped")), ("eval", None)):
            expected = {row["step"]: row for row in metrics(self.reference, kind)}
            for row in metrics(self.run_dir, kind):
                same = expected[row["step"]]
                for name in names or [key for key in same if key != "time"]:
                    assert row[name] == same[name], f"{name} at step {row['step']} after {after}"

    def finish(self):
        """Go on to the end without another blow."""
        code, output = run(*self.words, cwd=self.folder)
        assert code == 0, output
        self.check_end()

    def check_end(self):
        """The run has come to its end, and everything of it is there once."""
        self.compare("the end")
        assert [row["step"] for row in metrics(self.run_dir)] == list(range(1, self.steps + 1))
        steps = [row["step"] for row in metrics(self.run_dir, "eval")]
        assert steps == list(range(EVALUATE, self.steps + 1, EVALUATE))
        losses = {row["step"]: row["loss"] for row in metrics(self.run_dir, "eval")}
        checkpoints = Checkpoints(self.run_dir / "checkpoints")
        assert checkpoints.best() == checkpoints.of_step(min(losses, key=lambda step: losses[step]))


def same_checkpoint(run_dir, reference, step, after):
    """Weights, moments and progress of a step are equal bit for bit."""
    expected, progress = weights(reference, step)
    got, same = weights(run_dir, step)
    assert same == {**progress, "tracker": same["tracker"]}, after
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), f"{name} of step {step} after {after}"


def check_one_error(fault: Fault, code, output):
    """The cause is said once, in words that a person can act on, and nothing else is."""
    assert output.count("Traceback (most recent call last)") <= 1, output
    if fault.what == "kill":
        assert code == 1, output
        assert f"rank {fault.rank} was killed by SIGKILL" in output, output
        assert "Traceback" not in output, output
    elif fault.what in ("raise", "memory") and code == 4:  # while a checkpoint was written
        assert re.findall("^error: cannot (?:write|read) ", output, re.M), output
    elif fault.what in ("raise", "memory"):
        assert code == 1, output
        assert len(re.findall(rf"^rank {fault.rank} failed:", output, re.M)) == 1, output
    elif fault.what.startswith("E"):
        assert "Traceback" not in output, output
        assert len(re.findall("^error: ", output, re.M)) == 1, output
