"""Language models side by side are what transformers' model is, trained by torch's own AdamW."""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from benchmarks.lelora.ground import Ground, Spectrum
from benchmarks.lelora.methods import METHODS, form_of
from benchmarks.lelora.policy import by_chance, targets_of
from benchmarks.lelora.study import TAUGHT
from benchmarks.lelora.training import WARMUP, Plan, Run
from benchmarks.lelora.verses import Pairs, Verses, Writers
from models.lelora.inject import find_targets
from models.lelora.stacked import Whole
from tests.benchmarks.lelora.tiny import llama, packed_verses

STEPS, BATCH, RANK, LR = 10, 4, 2, 2e-2
FORMS = tuple(method for method in METHODS if method not in ("full", "head", "online", *TAUGHT))


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def verses(model):
    return Verses(packed_verses(model), rank=RANK, steps=STEPS, device=torch.device("cpu"))


def form(verses, method):
    setting = by_chance(verses.ground, 0) if method == "random" else None
    return form_of(verses.ground, method, [0], [setting])


def nats(model, weights, pairs):
    """Of each pair by transformers, with other weights."""
    ids_BT, at_BU, targets_BU = pairs
    logits_BTV = functional_call(model, weights, (ids_BT,)).logits
    wanted = logits_BTV.gather(1, at_BU[..., None].expand(-1, -1, logits_BTV.shape[-1]))
    found = torch.nn.functional.cross_entropy(
        wanted.flatten(0, 1), targets_BU.flatten(), reduction="none"
    )
    return found.view_as(targets_BU)


def weights_of(base, of, rest):
    """Whole weights of a form's only run, by transformers' names."""
    every = of.weights(torch.float32)
    whole = {
        f"{n}.weight": w[0, at]
        for names, w in zip(base.names, every, strict=True)
        for at, n in enumerate(names)
    }
    return {**rest, **whole, "lm_head.weight": rest[base.words]}


def alone(model, verses, of, rows_SB, lr=LR):
    """Trained with transformers' model and torch's AdamW; returns the nats of all test pairs."""
    base = verses.base
    rest = dict(base.rest)
    if isinstance(of, Whole):
        rest = {n: t.clone().requires_grad_() for n, t in rest.items()}
    every = [*of.parameters, *(t for t in rest.values() if t.requires_grad)]
    optimizer = torch.optim.AdamW(every, lr=1.0, weight_decay=0.0)
    for step in range(STEPS):
        pairs = verses.train[rows_SB[step]]
        each_BU = nats(model, weights_of(base, of, rest), pairs)
        loss = each_BU.sum() / (pairs[2] >= 0).sum()
        gradients = list(torch.autograd.grad(loss, every))
        own = len(of.parameters)
        gradients[:own] = of.masked(gradients[:own])
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        gradients = [g * min(1.0, 1.0 / (float(norm) + 1e-6)) for g in gradients]
        gradients[:own] = of.before_step(gradients[:own])
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = (
            lr * min((step + 1) / (WARMUP * STEPS), 1.0) * (1 - step / STEPS)
        )
        optimizer.step()
        of.after_step(gradients[:own])
    pairs = verses.parts["test"][torch.arange(len(verses.parts["test"]))]
    with torch.no_grad():
        return nats(model, weights_of(base, of, rest), pairs).sum(1).double()


def trained(verses, forms, dtype=torch.float32, lr=LR):
    """The same side by side."""
    runs = [Run(0, lr)] * len(forms)
    writers = Writers(verses.base, verses.train, Plan(STEPS, BATCH), forms, runs, dtype)
    writers.train()
    return writers, writers.score(verses.parts["test"])[0]


def test_the_untouched_model_is_transformers(model, verses):
    part = verses.parts["test"]
    untouched = Writers(
        verses.base, verses.train, Plan(1, 1), [form(verses, "head")], [Run(0, 0.0)], torch.float32
    )
    nats_PX, right_PX, targets_X = untouched.score(part)
    pairs = part[torch.arange(len(part))]
    with torch.no_grad():
        theirs = nats(model, dict(model.named_parameters()), pairs).sum(1)
    torch.testing.assert_close(nats_PX[0], theirs.double(), atol=1e-4, rtol=1e-4)
    assert torch.equal(targets_X, part.lengths_X - part.first_X)
    assert (right_PX[0] <= targets_X).all()
    (scored,) = verses.scored(untouched, "test")
    assert sum(scored.kept["nats"]) / sum(scored.kept["targets"]) == pytest.approx(
        scored.loss, abs=1e-5
    )
    assert len(scored.kept["nats"]) == 7


def test_every_method_beside_the_others_is_what_it_is_alone(model, verses):
    writers, nats_PX = trained(verses, [form(verses, method) for method in FORMS])
    begun = Writers(
        verses.base, verses.train, Plan(1, 1), [form(verses, "head")], [Run(0, 0.0)], torch.float32
    ).score(verses.parts["test"])[0]
    rows_SB = writers.rows_SPB[:, 0]
    for place, method in enumerate(FORMS):
        theirs = alone(model, verses, form(verses, method), rows_SB)
        assert (theirs - begun[0]).abs().max() > 0.05, method
        torch.testing.assert_close(nats_PX[place], theirs, atol=3e-3, rtol=1e-4, msg=method)


def test_everything_trains(model, verses):
    writers, nats_PX = trained(verses, [form(verses, "full")], lr=LR / 10)
    theirs = alone(model, verses, form(verses, "full"), writers.rows_SPB[:, 0], LR / 10)
    torch.testing.assert_close(nats_PX[0], theirs, atol=3e-3, rtol=1e-4)


def test_sixteen_bits_are_near(verses):
    """Small updates are not lost below the weights' last bits."""
    forms = ("lora", "dora", "frozen", "pissa")
    _, wide = trained(verses, [form(verses, method) for method in forms])
    _, narrow = trained(verses, [form(verses, method) for method in forms], torch.bfloat16)
    assert ((wide - narrow).mean(1).abs() < 0.02 * wide.mean(1)).all()


def test_matrices_are_those_that_the_recipe_finds(model, verses):
    theirs = {t.name: t for t in find_targets(model, ["all-linear"], [])}
    ours = targets_of(verses.ground)
    assert {t.name for t in ours} == set(theirs)
    assert all(t == theirs[t.name] for t in ours)


@pytest.mark.parametrize(
    ("method", "grows"),
    [("lora", 2), ("rslora", 4), ("pissa", 2), ("frozen", 2), ("full", 1)],
)
def test_a_rate_means_more_at_a_higher_rank(model, method, grows):
    """As docs/lelora.md says: from rank 1 to rank 4."""
    changes = []
    for rank in (1, 4):
        verses = Verses(
            packed_verses(model), rank=rank, steps=100, device=torch.device("cpu"), pairs=8
        )
        of = form(verses, method)
        before = [w.detach().clone() for w in of.weights(torch.float32)]
        writers = Writers(
            verses.base, verses.train, Plan(100, BATCH), [of], [Run(0, 1e-4)], torch.float32
        )
        for _ in range(3):
            writers.step()
        after = of.weights(torch.float32)
        squares = [(x - y).detach().square().sum() for x, y in zip(before, after, strict=True)]
        changes.append(float(sum(squares)) ** 0.5)
    assert changes[1] / changes[0] == pytest.approx(grows, rel=0.15)


@pytest.mark.parametrize("method", [*FORMS, "full"])
def test_a_step_waits_for_nothing(verses, method):
    """Tensors without values could not be read by the host: the step can be recorded."""
    base, ground, train = verses.base, verses.ground, verses.train

    def meta(tensors):
        return [x.to("meta") for x in tensors]

    rest = dict(zip(base.rest, meta(base.rest.values()), strict=True))
    base = replace(base, matrices=meta(base.matrices), rest=rest)
    pairs = Pairs(
        *meta([train.ids_XT, train.first_X, train.lengths_X, train.chapters_X]), train.targets
    )
    spectra = [Spectrum(*meta(vars(s).values())) for s in ground.spectra]
    there = Ground(base, spectra, lambda: meta(ground.inputs), RANK, STEPS)
    setting = by_chance(ground, 0) if method == "random" else None
    writers = Writers(base, pairs, Plan(STEPS, BATCH), [form_of(there, method, [0, 1], [setting] * 2)],
                      [Run(0, LR)] * 2, torch.bfloat16)  # fmt: skip
    writers.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_recorded_step_is_the_step(model):
    verses = Verses(packed_verses(model), rank=RANK, steps=STEPS, device=torch.device("cuda"))
    for method in (*FORMS, "full"):
        recorded, found = trained(verses, [form(verses, method)], torch.bfloat16)
        assert recorded.graph is not None
        plain = Writers(verses.base, verses.train, Plan(STEPS, BATCH), [form(verses, method)],
                        [Run(0, LR)], torch.bfloat16)  # fmt: skip
        for _ in range(STEPS):
            plain.step()
        again = plain.score(verses.parts["test"])[0]
        torch.testing.assert_close(found, again, atol=2e-2, rtol=2e-2, msg=method)
