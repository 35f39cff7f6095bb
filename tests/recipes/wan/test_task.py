"""The task on one process, and its loss and gradients over ranks against one process."""

import pickle

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("diffusers")

from torch.distributed.tensor import DTensor

from models.wan.config import WanConfig
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import materialize
from recipes.abilities import Steers
from recipes.task import DataError
from recipes.wan.config import LatentsConfig, WanTaskConfig
from recipes.wan.task import WanTask
from tests.models.wan.small import SIZES
from tests.ranks import run_ranks


def task(model=None, data=None, **keys):
    data = {"frames": 2, "height": 4, "width": 6, "samples": 10, "holdout": 0.3, "max_words": 5} | (
        data or {}
    )
    return WanTask(
        task=WanTaskConfig(**keys), model=WanConfig(**(SIZES | (model or {}))),
        data=LatentsConfig(**data), seed=0,
    )  # fmt: skip


def built(wan):
    model = wan.build_model().to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        wan.init_weights(module)
    return model


def test_an_untrained_model_says_nothing():
    """Then the error is that of noise minus noise, which has variance 2; 24 of each video's patches."""
    wan = task()
    wan.check()
    model, samples = built(wan), wan.train_samples()
    assert (len(samples), len(wan.eval_samples())) == (7, 3)
    batch = wan.collate([samples[n] for n in range(7)])
    assert wan.count(batch) == 7 * 2 * 2 * 3
    assert wan.loss(model, batch).item() / wan.count(batch) == pytest.approx(2, abs=0.3)
    assert wan.flops(batch) > 0
    assert "high_noise: times 0.875 to 1" in wan.describe()["expert"]
    assert (
        "low_noise: times 0 to 0.9" in task(expert="low_noise", boundary=0.9).describe()["expert"]
    )


def test_every_step_has_other_noise_and_every_evaluation_the_same():
    wan = task()
    model, samples = built(wan), wan.train_samples()
    batch = wan.collate([samples[0], samples[1]])
    assert isinstance(wan, Steers)
    steering = wan.steering(None)
    losses, sums = [], []
    for step in range(3):
        losses.append(wan.loss(model, batch).item())
        sums.append(wan.evaluate(model, batch)["error"].item())
        steering.after_step(step + 1, torch.zeros(()))
    assert len(set(losses)) == 3
    assert len(set(sums)) == 1
    kept = {name: value.clone() for name, value in steering.state().items()}
    steering.after_step(0, torch.zeros(()))
    assert wan.loss(model, batch).item() == losses[0]
    steering.load(kept)
    assert int(steering.state()["steps"]) == 3


@torch.no_grad()
def test_an_evaluation_adds_up_over_batches():
    wan = task()
    model, samples = built(wan), wan.eval_samples()
    whole = wan.evaluate(model, wan.collate([samples[n] for n in range(3)]))
    parts = [wan.evaluate(model, wan.collate([samples[n]])) for n in range(3)]
    assert sum(p["error"].item() for p in parts) == pytest.approx(whole["error"].item())
    assert wan.summarize({name: float(v) for name, v in whole.items()})["loss"] > 1


def test_workers_that_start_afresh_can_make_batches():
    wan = task()
    wan.build_model()
    samples, make = pickle.loads(pickle.dumps((wan.train_samples(), wan.collate)))
    assert make([samples[0]])["count"] == 12


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data": {"height": 5}}, "latents of height 5 do not make whole patches of 2"),
        ({"data": {"frames": 17}}, "model.max_positions=16"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_any_rank_starts(keys, words):
    with pytest.raises(ValueError, match="set ") as error:
        task(**keys).check()
    assert words in str(error.value)


def test_files_must_fit_the_model(tmp_path):
    from recipes.wan.make_latents import main

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
    main([str(tmp_path), "--drawn", "4", *small, "--channels", "3"])
    files = {"files": [str(tmp_path / "*.safetensors")], "max_words": 6, "holdout": 0.0}
    task(data=files).check()
    for model, data, words in (
        ({"channels": 4}, {}, "latents have 3 channels, the model 4: set model.channels=3"),
        (
            {"text_size": 12},
            {},
            "its text has vectors of 10, the model reads 12: set model.text_size=10",
        ),
        ({}, {"max_words": 1}, "set data.max_words="),
    ):
        with pytest.raises(ValueError, match="set ") as error:
            task(model=model, data=files | data).check()
        assert words in str(error.value)
    with pytest.raises(DataError, match="all videos are held out"):
        task(data=files | {"holdout": 0.9999}).check()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert": "middle"}, "task.expert=middle is not one of all, high_noise, low_noise"),
        ({"density": "cosine"}, "task.density=cosine is not one of"),
        ({"boundary": 1.5}, "task.boundary=1.5: set task.boundary to 0.01 to 0.99"),
        ({"shift": 0.0}, "task.shift=0.0: set task.shift above 0"),
    ],
)
def test_values_that_cannot_be_are_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        WanTaskConfig(**keys)


def gradients(splits, checkpointing):
    """The loss of six videos, split over ranks at `splits`, and its gradients, after three steps."""
    wan, config = task(expert="all"), ParallelConfig(activation_checkpointing=checkpointing)
    world, rank = dist.get_world_size(), dist.get_rank()
    model = wan.build_model()
    parallelize(model, build_mesh(mesh_shape(config, world), "cpu"), config)
    materialize(model, torch.device("cpu"), wan.init_weights, seed=1)
    with torch.no_grad():  # a model that says 0 has no gradient but of its last projection
        model.proj_out.weight.add_(0.1)
    wan.steering(None).after_step(3, torch.zeros(()))
    samples, cuts = wan.train_samples(), [0, *splits, 6]
    set_last_micro_batch(model, last=True, every=False)
    loss = wan.loss(model, wan.collate([samples[n] for n in range(cuts[rank], cuts[rank + 1])]))
    (loss * world / (6 * 12)).backward()
    total = loss.detach().double()
    dist.all_reduce(total)
    whole = {n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy()
             for n, p in model.named_parameters()}  # fmt: skip
    return total.item() / 72, whole


def test_ranks_learn_what_one_process_does():
    """Wherever a video is, it has the same time and noise; in fp32, as norms are."""
    expected, wanted = run_ranks(1, gradients, (), "none")[0]
    for loss, grads in run_ranks(2, gradients, (4,), "block"):
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, value in grads.items():
            assert abs(value - wanted[name]).max() < 1e-5, name
    assert max(abs(value).max() for value in wanted.values()) > 0.01
