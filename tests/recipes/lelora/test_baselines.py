"""peft's methods under FSDP2 are what peft makes of them."""

import pytest
import torch

from recipes.lelora.config import PEFT
from tests.ranks import run_ranks
from tests.recipes.lelora.toys import Run, write_base, write_texts


def against_peft(folder, method):
    """Logits at the start: of the base, of ours, and of peft's layers with our first weights."""
    model = {"path": f"{folder}/base", "load_weights": True, "config": {}}
    base = Run(folder, method="head", steps=1, model=model)
    run = Run(folder, method=method, run_dir=method, model=model)
    batch = run.task.collate([run.train_samples[n] for n in range(BATCH)])
    with torch.no_grad():
        at_base = run.task._logits(base.model, batch)
        at_start = run.task._logits(run.model, batch)
    trained = {n: p.numel() for n, p in run.model.named_parameters() if p.requires_grad}
    first = run.task.loss(run.model, batch).item()
    run.model.zero_grad()
    run.advance(24)
    last = run.task.loss(run.model, batch).item()
    weights = {
        n: p.full_tensor().detach().numpy()
        for n, p in run.model.named_parameters()
        if "layer.0" in n
    }
    return float((at_start - at_base).abs().max()), trained, first, last, weights


BATCH = 8
RANK = 2


@pytest.mark.parametrize(
    "method",
    [
        "lora",
        "adalora",
        pytest.param("dora", marks=pytest.mark.long),
        pytest.param("pissa", marks=pytest.mark.long),
        pytest.param("mica", marks=pytest.mark.long),
        pytest.param("milora", marks=pytest.mark.long),
    ],
)
def test_methods_begin_at_the_base_and_learn(tmp_path, method):
    write_texts(tmp_path)
    write_base(tmp_path)
    found = run_ranks(2, against_peft, str(tmp_path), method)
    difference, trained, first, last, weights = found[0]
    assert difference < 1e-5
    assert last < first
    heads = {name for name in trained if name.startswith("classifier")}
    assert len(heads) == 2
    assert all(".lora_" in n or ".adapter." in n or n in heads for n in trained)
    for name, tensor in found[1][4].items():
        assert (tensor == weights[name]).all(), name
    dense = trained.get("bert.encoder.layer.0.intermediate.dense.lora_A.default.weight")
    if method in PEFT and method != "adalora":
        assert dense == RANK * 16


def evas_directions(folder):
    """A of a layer, and all inputs that it saw, on one rank."""
    run = Run(folder, method="eva", targets=["*.layer.1.intermediate.dense"], exclude=[])
    layer = run.model.bert.encoder.layer[1].intermediate.dense
    seen = []
    handle = layer.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].flatten(0, -2))
    )
    run.model.eval()
    with torch.no_grad():
        for number in range(8):
            first = number * BATCH
            samples = [
                run.train_samples[(first + n) % len(run.train_samples)] for n in range(BATCH)
            ]
            run.task.loss(run.model, run.task.collate(samples))
    handle.remove()
    return layer.lora_A.default.weight.full_tensor().detach().numpy(), torch.cat(seen).numpy()


@pytest.mark.long
def test_evas_directions_are_those_in_which_inputs_vary(tmp_path):
    write_texts(tmp_path)
    a, x = run_ranks(1, evas_directions, str(tmp_path))[0]
    right = torch.linalg.svd(torch.from_numpy(x).double(), full_matrices=False)[2][:RANK]
    torch.testing.assert_close(torch.from_numpy(a).abs(), right.abs().float(), atol=1e-4, rtol=1e-3)


def allocated(folder):
    """AdaLoRA's steps here, and peft's own on a whole copy with the same gradients."""
    from peft.tuners.adalora.layer import RankAllocator

    from recipes.lelora.adalora import adalora_settings

    run = Run(folder, method="adalora", steps=20)
    steering = run.steering
    plain = {
        n: torch.nn.Parameter(p.full_tensor().detach().clone())
        for n, p in steering.parameters.items()
    }

    class Plain(torch.nn.Module):
        def named_parameters(self):
            return iter(plain.items())

    names = [t.name for t in run.task.adapted.targets]
    settings = adalora_settings(run.task.adapted.config, names, 20)
    theirs = RankAllocator(Plain(), settings, "default")
    pairs = []

    def follow(*_):  # registered after ours: parameters are masked already
        for name, parameter in steering.parameters.items():
            plain[name].data = (
                before[name] if "lora_E" in name else parameter.full_tensor().detach()
            )
            plain[name].grad = parameter.grad.full_tensor()
        theirs.update_and_allocate(Plain(), steering.done)
        pairs.append(all(torch.equal(plain[n].data, p.full_tensor().detach())
                         for n, p in steering.parameters.items()))  # fmt: skip

    before = {}

    def remember(*_):
        before.update({n: p.full_tensor().detach().clone() for n, p in steering.parameters.items()})

    after = steering._after
    steering._after = lambda *a: None
    hooks = run.optimizer._optimizer_step_post_hooks
    hooks.clear()
    run.optimizer.register_step_post_hook(remember)
    run.optimizer.register_step_post_hook(after)
    run.optimizer.register_step_post_hook(follow)
    start = steering.ranks()
    run.advance(20)
    return pairs, start, steering.ranks()


def test_adaloras_ranks_are_pefts(tmp_path):
    write_texts(tmp_path)
    for pairs, _, ranks in run_ranks(2, allocated, str(tmp_path)):
        assert len(pairs) == 20
        assert all(pairs)
        assert sum(ranks) == RANK * len(ranks), "the budget is reached"
        assert len(set(ranks)) > 1, "and matrices have different ranks"


@pytest.mark.parametrize("method", ["lora", "pissa", "mica", "dora"])
def test_first_weights_are_pefts(method):
    from peft import inject_adapter_in_model

    from models.lelora.budget import Shape
    from models.lelora.inject import Target
    from recipes.lelora.baselines import _first, settings
    from recipes.lelora.config import LeloraConfig

    config = LeloraConfig(method=method, rank=2, widths=[2], alpha=3.0)
    target = Target("some.layer", Shape(6, 5), False, None, "other")
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    made = _first(weight, target, config, seed=0)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(5, 6, bias=False)})
    with torch.no_grad():
        model["layer"].weight.copy_(weight)
    inject_adapter_in_model(settings(config, ["layer"]), model)
    theirs = dict(model["layer"].named_parameters())
    assert made.keys() == theirs.keys()
    if method != "lora":  # whose A is random
        for name in theirs:
            if method != "dora" or "magnitude" in name:
                torch.testing.assert_close(
                    made[name].abs(), theirs[name].abs(), atol=1e-5, rtol=1e-4
                )
    again = _first(weight, target, config, seed=0)
    assert all(torch.equal(made[name], again[name]) for name in made)
