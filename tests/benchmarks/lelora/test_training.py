"""Runs side by side are those of the recipe, whatever the method."""

import pytest
import torch

from benchmarks.lelora.classification import input_directions, probe_of
from benchmarks.lelora.classifying import Classifiers
from benchmarks.lelora.data import Data, Part
from benchmarks.lelora.encoder import Encoder
from benchmarks.lelora.ground import Ground, in_order, spectra_of
from benchmarks.lelora.methods import core_rank, form_of, mica_rank, parameters, start
from benchmarks.lelora.training import Plan, Run
from models.lelora.allocated import Allocated, Falling
from models.lelora.stacked import Magnitudes, Products, Rows
from recipes.lelora.brain import Setting
from tests.ranks import run_ranks
from tests.recipes.lelora.toys import BATCH, write_base, write_texts
from tests.recipes.lelora.toys import Run as Recipe

STEPS, RANK, LR, LENGTH = 20, 2, 2e-2, 8
HEAD_LR, PROBE = 5e-3, 50
RANKS = {"mica": 4, "loraxs": 8}
"""At which these train as much as the others, or nearly."""
METHODS = ("lora", "rslora", "dora", "pissa", "milora", "mica", "eva", "adalora", "loraxs", "frozen",
           "full", "head")  # fmt: skip


def recipes(folder, methods):
    """Weights at the start, logits after training, and the batches, of the recipe's own runs."""
    found = {}
    for method in methods:
        run = Recipe(
            folder, lr=LR, method=method, run_dir=method, steps=STEPS,
            targets=["query", "key", "value", "dense"], rank=RANKS.get(method, RANK),
            widths=[RANKS.get(method, RANK)],
            model={"path": f"{folder}/base", "load_weights": True, "config": {}, "pooling": "mean"},
            task={"probe": PROBE, "head_lr": HEAD_LR}, exclude=[],
        )  # fmt: skip
        for group in run.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)
        first = {n: t.numpy() for n, t in run.weights().items()}
        whole = {
            n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().numpy().copy()
            for n, t in run.model.state_dict().items()
        }
        run.advance(STEPS)
        batch = run.task.collate([run.train_samples[n] for n in range(BATCH)])
        with torch.no_grad():
            logits = run.task._logits(run.model, batch).numpy()
        samples = [run.train_samples[n] for n in range(len(run.train_samples))]
        found[method] = first, whole, logits, samples
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    write_texts(folder)
    write_base(folder)
    return run_ranks(1, recipes, str(folder), METHODS)[0]


def part_of(samples):
    ids = torch.zeros(len(samples), LENGTH, dtype=torch.int32)
    for row, (tokens, _) in enumerate(samples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    lengths = torch.tensor([len(tokens) for tokens, _ in samples])
    return Part(ids, lengths, torch.tensor([label for _, label in samples]))


def ground_of(theirs, device="cpu"):
    _, whole, _, samples = theirs["head"]
    named = {
        n.removeprefix("bert."): torch.tensor(t).to(device)
        for n, t in whole.items()
        if n.startswith("bert.")
    }
    base = Encoder.of({n: t for n, t in named.items() if t.is_floating_point()}, heads=2)
    part = part_of(samples)
    shown = Part(*(x.to(device) for x in vars(part).values()))
    inputs = input_directions(base, shown, 8 * BATCH)
    probe = probe_of(base, shown, 3, PROBE)
    ground = Ground(base, spectra_of(base), lambda: inputs, RANK, STEPS)
    return ground, Data(part, part, part, 3), probe


def grouped(ground, first, suffix):
    """peft's tensors of all layers, group by group."""
    return [
        torch.stack([torch.tensor(first[f"{layer}.{suffix}"]) for layer in names])
        for names in ground.names
    ]


def begun(ground, method, first):
    """Our form, with peft's draws where it has drawn."""
    base = ground.base.matrices
    if method == "adalora":
        falling = Falling(3, RANK, STEPS, STEPS // 10, STEPS // 2, 1)
        pair = (grouped(ground, first, "lora_A.default"), grouped(ground, first, "lora_B.default"))
        return Allocated(base, [pair], falling, 2.0 * RANK)
    if method in ("lora", "rslora", "dora"):
        like = start(ground, method, 0, None)
        rows = Rows(grouped(ground, first, "lora_A.default.weight"), like.b_LMR, like.gate_LR)
        return (Magnitudes if method == "dora" else Products)(base, [rows])
    return form_of(ground, method, [0], [None])


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_of_the_recipe(theirs, method):
    ground, data, probe = ground_of(theirs)
    first, whole, logits, samples = theirs[method]
    steps = torch.arange(STEPS * BATCH).view(STEPS, 1, BATCH) % len(samples)
    forms = [begun(ground, method, first)]
    together = Classifiers(ground.base, data, Plan(STEPS, BATCH, head_lr=HEAD_LR), forms, [Run(0, LR)],
                        torch.float32, probe, rows_SPB=steps)  # fmt: skip
    together.share_S.fill_(1.0)
    for ours, name in zip(probe, ("weight", "bias"), strict=True):
        found = torch.tensor(whole[f"classifier.{name}"])
        torch.testing.assert_close(ours, found, atol=1e-3, rtol=1e-3)
    before = together.logits(
        together.matrices(), together.rest, data.train[torch.arange(BATCH)[None]]
    )
    together.train()
    with torch.no_grad():
        found = together.logits(
            together.matrices(), together.rest, data.train[torch.arange(BATCH)[None]]
        )
    assert (found - before).abs().max() > 0.05
    torch.testing.assert_close(found[0], torch.tensor(logits), atol=2e-3, rtol=2e-3)


def test_all_methods_train_as_much(theirs):
    """But DoRA's lengths, and what is rounded down."""
    ground, _, _ = ground_of(theirs)
    budget = parameters(ground, "lora")
    assert (mica_rank(ground), core_rank(ground)) == (RANKS["mica"], RANKS["loraxs"])
    for method in ("rslora", "pissa", "milora", "eva", "frozen", "adalora"):
        assert parameters(ground, method) == budget
    assert parameters(ground, "mica") == budget
    assert 0.9 * budget < parameters(ground, "loraxs") <= budget
    assert parameters(ground, "frozen-half") == budget // 2


def test_widths_and_scales_are_of_the_matrices_that_they_name(theirs):
    """The order of a setting is the model's; matrices are grouped by their shapes."""
    ground, _, _ = ground_of(theirs)
    names = in_order(ground)
    widths = tuple(n % 4 for n in range(len(names)))
    scales = tuple(0.5 + n for n in range(len(names)))
    rows = start(ground, "learned", 0, Setting(widths, (-1,) * len(names), scales))
    for group, of_group in enumerate(ground.names):
        for at, name in enumerate(of_group):
            place = names.index(name)
            gate = rows.gate_LR[group][at]
            assert int((gate > 0).sum()) == widths[place]
            assert set(gate.tolist()) <= {0.0, scales[place]}


def test_methods_beside_each_other_are_what_they_are_alone(theirs):
    ground, data, probe = ground_of(theirs)
    setting = Setting(tuple(n % 3 for n in range(12)), (-1,) * 12, (1.25,) * 12)
    asked = [
        ("lora", None),
        ("adalora", None),
        ("learned", setting),
        ("mica", None),
        ("head", None),
    ]

    def trained(chosen):
        forms = [form_of(ground, method, [3, 4], [of, of]) for method, of in chosen]
        runs = [Run(3, 1e-2), Run(4, 2e-2)] * len(chosen)
        together = Classifiers(
            ground.base, data, Plan(STEPS, BATCH), forms, runs, torch.float32, probe
        )
        together.train()
        return together.score(data.test.first(20)).loss_P

    every = trained(asked).view(-1, 2)
    assert len(set(every.flatten().tolist())) == every.numel()
    for place, one in enumerate(asked):
        torch.testing.assert_close(trained([one]), every[place], atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_recorded_step_in_16_bits_is_the_step(theirs):
    _, data, probe = ground_of(theirs)
    ground, _, probe = ground_of(theirs, "cuda")
    data = Data(*(Part(*(x.cuda() for x in vars(of).values())) for of in
                  (data.train, data.validation, data.test)), data.labels)  # fmt: skip

    def trained(method, recorded, dtype):
        form = form_of(ground, method, [0, 1], [None, None])
        runs = [Run(0, 1e-2), Run(1, 1e-2)]
        together = Classifiers(ground.base, data, Plan(STEPS, BATCH), [form], runs, dtype, probe)
        if recorded:
            together.train()
        else:
            for _ in range(STEPS):
                together.step()
        return together.score(data.test).loss_P

    for method in ("lora", "dora", "adalora", "loraxs", "mica", "full", "head"):
        plain = trained(method, recorded=False, dtype=torch.float16)
        torch.testing.assert_close(
            trained(method, True, torch.float16), plain, atol=2e-2, rtol=2e-2
        )
        torch.testing.assert_close(
            trained(method, True, torch.float32), plain, atol=5e-2, rtol=5e-2
        )
