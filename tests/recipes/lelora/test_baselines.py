"""peft's methods under FSDP2 are what peft makes of them."""

import pytest
import torch

from recipes.lelora.config import PEFT, STATIC
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


@pytest.mark.parametrize("method", [*PEFT, *STATIC])
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
    if method in PEFT:
        assert dense == RANK * 16


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
