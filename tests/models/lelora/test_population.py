"""Runs side by side are the runs that they would be alone."""

import copy

import pytest
import torch
from torch import nn

from models.lelora.inject import find_targets, inject, refresh
from models.lelora.population import Member, Population, losses
from models.lelora.spectrum import decompose
from models.lelora.switch import switch
from tests.models.lelora.toys import whole

LRS = (1e-2, 3e-2, 1e-3)
STEPS = 8


def encoder():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, num_hidden_layers=2, hidden_size=16, intermediate_size=24,
                        num_attention_heads=2, max_position_embeddings=16, num_labels=3,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                        initializer_range=0.2)  # fmt: skip
    return BertForSequenceClassification(config).eval()


def batches(number=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        {"tokens": torch.randint(30, (6, 7), generator=generator),
         "labels": torch.randint(3, (6,), generator=generator)}
        for _ in range(number)
    ]  # fmt: skip


def each(model, batch):
    logits = model(input_ids=batch["tokens"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def atoms_of(model, targets):
    return [
        decompose(model.get_submodule(t.name).weight, range(t.shape.components)) for t in targets
    ]


def members(targets):
    """Different components, widths (none, too), scales and learning rates."""
    kinds = ([[0, 1, 2], [5], []], [1.0, 0.625, 1.6])
    return [
        Member([kinds[0][(run + n) % 3] for n in range(len(targets))],
               [kinds[1][(run + 2 * n) % 3] for n in range(len(targets))], lr)
        for run, lr in enumerate(LRS)
    ]  # fmt: skip


def alone(model, targets, atoms, member):
    """The same run with the adapters, the optimizer and the clipping that training uses."""
    inject(model, targets, "dir_ab", 4, 4)
    model.classifier.requires_grad_(True)
    for target, atom, components, scale in zip(
        targets, atoms, member.components, member.scales, strict=True
    ):
        adapter = model.get_submodule(target.adapter)
        adapter.reset_parameters()
        moments = {name: {} for name in adapter.trained}
        switch("dir_ab", whole(adapter), moments, components, scale, atom.pick)
        refresh(adapter, 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=member.lr, betas=(0.9, 0.999), weight_decay=0.0)
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        each(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = member.lr * (1 - number / STEPS)
        optimizer.step()
    with torch.no_grad():
        return model(input_ids=batches()[0]["tokens"]).logits


def test_each_run_is_what_it_would_be_alone():
    base = encoder()
    targets = find_targets(base, ["query", "value", "dense"], ["pooler.dense"])
    atoms, runs = atoms_of(base, targets), members(targets)
    expected = [alone(copy.deepcopy(base), targets, atoms, member) for member in runs]
    start = base(input_ids=batches()[0]["tokens"]).logits
    population = Population(base, targets, [a.pick for a in atoms], runs, ["classifier"])
    together = population.by_run(base(input_ids=batches()[0]["tokens"].repeat(3, 1)).logits)
    torch.testing.assert_close(together, start.expand(3, -1, -1), atol=1e-6, rtol=1e-5)
    for number, batch in enumerate(batches()):
        loss = population.by_run(each(base, population.repeated(batch))).mean(1).sum()
        population.step(loss, 1 - number / STEPS)
    with torch.no_grad():
        found = population.by_run(base(**{"input_ids": batches()[0]["tokens"].repeat(3, 1)}).logits)
    for ours, theirs in zip(found, expected, strict=True):
        assert (theirs - start).abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    apart = losses(population, batches(2), each).mean(1)
    assert apart.shape == (3,)
    assert len(set(apart.tolist())) == 3


def test_a_run_does_not_depend_on_those_beside_it():
    def first_of(number):
        base = encoder()
        targets = find_targets(base, ["query"], [])
        runs = members(targets)[:number]
        population = Population(base, targets, [a.pick for a in atoms_of(base, targets)], runs,
                                ["classifier"])  # fmt: skip
        for batch in batches():
            population.step(population.by_run(each(base, population.repeated(batch))).mean(1).sum())
        return losses(population, batches(2), each).mean(1)[0]

    torch.testing.assert_close(first_of(1), first_of(3), atol=1e-6, rtol=1e-5)


def test_a_head_with_more_than_linear_layers_is_refused():
    base = encoder()
    base.classifier = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    targets = find_targets(base, ["query"], [])
    with pytest.raises(ValueError, match="the head classifier has LayerNorm"):
        Population(base, targets, [a.pick for a in atoms_of(base, targets)], members(targets),
                   ["classifier"])  # fmt: skip
