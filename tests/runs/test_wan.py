"""The recipe for Wan 2.2, cut down: from a pipeline's folder, trained on two ranks, saved back, planned."""

import json

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import WanTransformer3DModel

from recipes.wan.make_latents import main
from tests.models.wan.small import SIZES, whole
from tests.runs.helpers import metrics, train
from trainer.cli import run
from trainer.errors import DONE
from trainer.export import export

pytestmark = pytest.mark.slow

RECIPE = "+recipe=wan22_fsdp_tide"
SHORT = (
    RECIPE, "trainer.batch_size=4", "trainer.micro_batch_size=1", "trainer.eval_every=3",
    "trainer.eval_samples=2", "trainer.workers=0", "logging.every=1",
    "logging.wandb.mode=disabled", "checkpoint.every=0", "optim.warmup=0", "optim.schedule=constant",
    "data.files=[latents/*.safetensors]", "data.max_words=6", "data.holdout=0.2",
    "model=wan_folder", "model.path=pipeline",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A pipeline's folder with two experts, and latents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.9}))
    for seed, name in enumerate(("transformer", "transformer_2")):
        whole(seed).save_pretrained(tmp_path / "pipeline" / name)
    small = (
        "--frames",
        "5",
        "--height",
        "32",
        "--width",
        "32",
        "--words",
        "6",
        "--text-size",
        "10",
    )
    main(["latents", "--drawn", "12", *small, "--channels", "3"])
    return tmp_path


def test_an_expert_is_trained_resumed_and_saved_back(place, capsys):
    for run_dir, keys in (
        ("straight", ["trainer.steps=6", "optim.lr=1e-3"]),
        ("resumed", ["trainer.steps=3", "optim.lr=1e-3", "task.expert=high_noise"]),
        ("resumed", ["trainer.steps=6", "optim.lr=1e-3", "trainer.resume=auto"]),
        ("kept", ["trainer.steps=1", "optim.lr=0", "task.expert=low_noise"]),
    ):
        code, output = train(*SHORT, *keys, f"run.dir={run_dir}", cwd=place)
        assert code == 0, output
        expert = "low_noise: times 0 to 0.9" if run_dir == "kept" else "high_noise: times 0.9 to 1"
        assert expert in output
    assert [row["loss"] for row in metrics("straight")] == [
        row["loss"] for row in metrics("resumed")
    ]

    before, after = (row["loss"] for row in metrics("straight", "eval"))
    assert after < before

    capsys.readouterr()
    assert export(["kept", "saved", "--dtype", "float32"]) == DONE
    assert "for transformer_2 of a pipeline" in capsys.readouterr().out
    given = WanTransformer3DModel.from_pretrained("pipeline/transformer_2")
    saved = WanTransformer3DModel.from_pretrained("saved")
    assert saved.config.num_layers == SIZES["num_layers"]
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name


def test_a_plan_fits_what_the_recipe_is_made_for(tmp_path, monkeypatch, capsys):
    """Eight layers on two GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    plan = (RECIPE, "trainer.dry_run=true", "launch.device=h200", "launch.nproc=2", "model.num_layers=8",
            "trainer.batch_size=2")  # fmt: skip
    assert run(plan) == 0
    shown = capsys.readouterr().out
    assert "does not fit" not in shown
    assert "parameters     3.04G, 1.52G on a rank" in shown
    assert "activations" in shown
