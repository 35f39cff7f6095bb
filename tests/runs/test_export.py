"""From a run to a folder that transformers loads, and back into a run."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs.helpers import SMALL, metrics, train, weights
from trainer.errors import CHECKPOINT, CONFIG, DONE
from trainer.export import export

pytestmark = pytest.mark.slow


def test_a_runs_weights_leave_it_and_come_back(tmp_path, monkeypatch, capsys):
    """Tied embeddings with a vocabulary that two ranks cannot share evenly."""
    small = [*SMALL, "model.vocab_size=301"]
    code, output = train(*small, "trainer.steps=3", "run.dir=r", "optim.lr=0.01", "optim.warmup=0",
                         cwd=tmp_path)  # fmt: skip
    assert code == 0, output

    monkeypatch.chdir(tmp_path)
    assert export(["r", "out", "--dtype", "float32"]) == DONE
    said = capsys.readouterr().out
    assert "step-00000003 of r is in out: 0.00 GiB in float32, token ids are byte values" in said
    loaded = AutoModelForCausalLM.from_pretrained("out")
    saved, _ = weights("r", 3)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, saved[f"model/{name}"]), name

    code, output = train(*small, "trainer.steps=4", "run.dir=again", "model.path=out", "optim.lr=0",
                         "model.load_weights=true", cwd=tmp_path)  # fmt: skip
    assert code == 0, output
    assert metrics("again")[3]["loss"] < metrics("r")[0]["loss"] - 0.1

    for arguments, expected, words in (
        (["r", "out"], CONFIG, "out exists and is not an empty folder: choose another"),
        (["r", "b", "--step", "2"], CHECKPOINT, "step-00000002 is not a complete checkpoint"),
        (
            ["r", "b", "--step", "best"],
            CHECKPOINT,
            "no best checkpoint, as far as step-00000003 knows",
        ),
        (["out", "b"], CONFIG, "out is not a run folder: config.yaml cannot be read"),
    ):
        assert export(arguments) == expected
        assert words in capsys.readouterr().err
    Path("r/checkpoints/step-00000003/__1_0.distcp").write_bytes(b"")
    assert export(["r", "b"]) == CHECKPOINT
    assert "__1_0.distcp (written by rank 1) has 0 bytes" in capsys.readouterr().err
    assert not Path("b").exists()
