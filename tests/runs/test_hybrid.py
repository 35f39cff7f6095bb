"""A hybrid model as a whole run: resumed, exported, run by transformers, and trained on from there."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.hybrid.config import HybridConfig
from models.hybrid.hf import read_folder
from models.hybrid.model import Hybrid, whole
from tests.models.hybrid.cases import packed
from tests.runs.helpers import metrics, program, train, weights
from trainer.errors import DONE
from trainer.export import export

pytestmark = pytest.mark.slow

SMALL = (
    "+recipe=hybrid_1f3s", "model.hidden_size=32", "model.intermediate_size=48", "model.num_heads=4",
    "model.head_dim=8", "model.expert_size=16", "model.block=8", "model.window=16",
    "data.sequence_length=64", "trainer.batch_size=8", "trainer.micro_batch_size=2",
    "trainer.eval_every=0", "trainer.workers=0", "logging.wandb.mode=disabled", "logging.every=1",
    "checkpoint.every=0", "parallel.activation_checkpointing=block",
)  # fmt: skip


def test_a_hybrid_run_is_resumed_and_exported_and_goes_on_from_there(tmp_path, monkeypatch, capsys):
    # The balance is one of each micro-batch, and four ranks have other micro-batches than two.
    afmoe = (*SMALL, "model.sparse=sliding_window", "optim.warmup=0", "task.balance=0")
    for folder, steps, ranks, experts in (
        ("straight", 4, 2, 1), ("r", 2, 2, 1), ("r", 4, 2, 1), ("divided", 2, 4, 4), ("divided", 4, 2, 2),
    ):  # fmt: skip
        code, output = train(*afmoe, f"trainer.steps={steps}", f"run.dir={folder}",
                             f"parallel.experts={experts}", "trainer.resume=auto",
                             "optim.schedule=constant", cwd=tmp_path, ranks=ranks)  # fmt: skip
        assert code == 0, output
        assert (f"experts divided by {experts}" in output) == (experts > 1)
    monkeypatch.chdir(tmp_path)
    straight, resumed, divided = (
        [row["loss"] for row in metrics(run)] for run in ("straight", "r", "divided")
    )
    assert straight == resumed
    assert divided == pytest.approx(straight, abs=2e-4)
    assert straight[-1] < straight[0] - 0.2
    alone, parted = (weights(run, 4)[0] for run in ("r", "divided"))
    assert alone.keys() == parted.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, parted[name], rtol=0, atol=2e-3, msg=name)

    assert export(["divided", "out", "--dtype", "float32"]) == DONE
    assert "in float32, token ids are byte values" in capsys.readouterr().out
    saved, _ = weights("divided", 4)
    ours = Hybrid(HybridConfig(path="out").shape(read_folder("out"), 257))
    ours.load_state_dict(
        {name.removeprefix("model/"): t for name, t in saved.items() if name.startswith("model/")}
    )
    tokens, documents = packed((50,), 257)
    theirs = AutoModelForCausalLM.from_pretrained("out")
    torch.testing.assert_close(
        theirs(tokens[None]).logits[0], ours(tokens, whole(documents)).logits_TV,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip

    code, output = train(
        "+recipe=hybrid_1f3s", "model=hybrid_folder", "model.path=out", *SMALL[8:],
        "trainer.steps=1", "run.dir=again", "optim.lr=0", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert metrics("again")[0]["loss"] < straight[0] - 0.2


def test_a_plan_for_gpus_needs_none(tmp_path):
    code, output = program(
        "+recipe=hybrid_1f3s", "model=hybrid2b", "parallel=fsdp_bf16", "data.sequence_length=32768",
        "parallel.activation_checkpointing=block", "trainer.dry_run=true", "trainer.batch_size=8",
        "launch.nproc=8", "launch.device=h200", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert "parameters     1.96G" in output
    assert "activations" in output
