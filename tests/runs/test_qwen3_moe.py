"""The recipe for Qwen3's mixtures, cut down: from a folder, trained on two ranks, saved back, planned."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.runs.helpers import metrics, train
from trainer.cli import run
from trainer.errors import DONE
from trainer.export import export

pytestmark = pytest.mark.slow

RECIPE = "+recipe=qwen3_30b_a3b_fsdp_tide"
SMALL = (
    RECIPE, "data.sequence_length=64", "trainer.batch_size=4", "trainer.eval_every=2",
    "trainer.eval_samples=4", "trainer.workers=0", "logging.wandb.mode=disabled",
    "logging.every=1", "checkpoint.every=0", "optim.warmup=0",
)  # fmt: skip


def test_a_folder_is_trained_on_and_saved_back(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
            max_position_embeddings=128,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "given")
    folder = ("model=folder", "model.path=given")
    for run_dir, keys in (("kept", ["optim.lr=0"]), ("learnt", ["optim.lr=3e-3"])):
        code, output = train(*SMALL, *folder, *keys, "trainer.steps=4", f"run.dir={run_dir}",
                             cwd=tmp_path)  # fmt: skip
        assert code == 0, output
        assert "expert_load" in output
    monkeypatch.chdir(tmp_path)
    losses = [row["loss"] for row in metrics("learnt")]
    assert losses[-1] < losses[0] - 0.1

    assert export(["kept", "saved", "--dtype", "float32"]) == DONE
    assert "in float32, token ids are byte values" in capsys.readouterr().out
    tokens = torch.randint(257, (2, 20))
    back, notes = AutoModelForCausalLM.from_pretrained("saved", output_loading_info=True)
    assert not notes["missing_keys"]
    assert torch.equal(back(tokens).logits, model.eval()(tokens).logits)


def test_a_plan_fits_what_the_recipe_is_made_for(tmp_path, monkeypatch, capsys):
    """Six layers on two GPUs; tests/models/test_causal_lm.py counts the parameters of all."""
    (tmp_path / "text.txt").write_text("a line of text, again and again\n" * 9_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPRINGTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    plan = (RECIPE, "trainer.dry_run=true", "launch.device=h200", "data.files=[text.txt]",
            "data.holdout=0", "trainer.steps=1", "launch.nproc=2", "model.num_layers=6")  # fmt: skip
    assert run(plan) == 0
    shown = capsys.readouterr().out
    assert "does not fit" not in shown
    assert "parameters     4.36G, 2.18G on a rank" in shown
