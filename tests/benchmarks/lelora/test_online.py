"""Policies that decide during runs side by side decide and train as the recipe's own runs do."""

import pytest
import torch

from benchmarks.lelora.classifying import Classifiers
from benchmarks.lelora.data import Data, Part
from benchmarks.lelora.encoder import Encoder
from benchmarks.lelora.ground import Ground, spectra_of
from benchmarks.lelora.online import Online, meta_rows
from benchmarks.lelora.training import Plan, Run, orders
from models.lelora.padded import Padded
from recipes.lelora.config import LeloraConfig, PolicyConfig
from tests.benchmarks.lelora.test_training import HEAD_LR, PROBE, part_of
from tests.ranks import run_ranks
from tests.recipes.lelora.toys import BATCH, write_base, write_texts
from tests.recipes.lelora.toys import Run as Recipe

STEPS, LR = 32, 2e-2
POLICY = {"hold": 0.5, "dim": 8, "layers": 1, "lr": 1e-2}
SETTINGS = {"rank": 2, "widths": [0, 1, 2, 4], "period": 5, "first": 5, "until": 0.75,
            "meta_share": 0.2, "meta_samples": 18, "min_reliability": -1.0, "fold_rank": 8}  # fmt: skip
CASES = {"free": {"max_switched": 1.0}, "careful": {"max_switched": 0.3},
         "back": {"max_switched": 1.0, "rollback": 0.0}}  # fmt: skip
"""The last one goes back as soon as two periods were for the worse."""
LRS = {"free": LR, "careful": LR, "back": 0.03}


def recipes(folder):
    """What the recipe's own runs begin with, decide and come to."""
    found = {}
    for case, more in CASES.items():
        run = Recipe(
            folder, lr=LRS[case], method="lelora", run_dir=case, steps=STEPS, policy=POLICY,
            targets=["query", "key", "value", "dense"], exclude=[],
            model={"path": f"{folder}/base", "load_weights": True, "config": {}, "pooling": "mean"},
            task={"probe": PROBE, "head_lr": HEAD_LR}, **SETTINGS, **more,
        )  # fmt: skip
        for group in run.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)
        run.steering.adapters.row_steps.beta2 = 0.999
        run.steering.adapters.row_steps.horizon = 6000.0
        for adapter in run.steering.adapters.adapters:
            adapter.young_steps = 6000
        first = {
            n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().numpy().copy()
            for n, t in run.model.state_dict().items()
        }
        run.advance(STEPS)
        batch = run.task.collate([run.train_samples[n] for n in range(BATCH)])
        with torch.no_grad():
            logits = run.task._logits(run.model, batch).numpy()
        train = run.train_samples
        every = [train.samples[n] for n in range(len(train.samples))]
        rows = run.steering.journal.rows
        found[case] = first, logits, every, train.numbers.tolist(), rows
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    write_texts(folder)
    write_base(folder)
    return run_ranks(1, recipes, str(folder))[0]


def beside(theirs, case, seeds, device="cpu", dtype=torch.float32, constant=True):
    """Runs of these seeds, on the recipe's texts; seed 0 is the recipe's."""
    first, _, every, numbers, _ = theirs[case]
    named = {n.removeprefix("bert."): torch.tensor(t).to(device) for n, t in first.items()}
    named = {n: t for n, t in named.items() if t.is_floating_point() and ".adapter." not in n}
    base = Encoder.of({n: t for n, t in named.items() if not n.startswith("classifier")}, heads=2)
    part = Part(*(x.to(device) for x in vars(part_of(every)).values()))
    ground = Ground(base, spectra_of(base), list, SETTINGS["rank"], STEPS)
    probe = named["classifier.weight"], named["classifier.bias"]
    config = LeloraConfig(**SETTINGS, **CASES[case], policy=PolicyConfig(**POLICY))
    apart = {seed: meta_rows(config, len(part), seed) for seed in seeds}
    assert sorted({*range(len(part))} - {*apart[0]}) == numbers
    plan = Plan(STEPS, BATCH, head_lr=HEAD_LR)
    rows_SPB = orders(seeds, len(part), plan, apart)
    turn = torch.arange(STEPS * BATCH).view(STEPS, BATCH) % len(numbers)
    rows_SPB[:, seeds.index(0)] = torch.tensor(numbers)[turn]
    form = Padded(base.matrices, len(seeds), max(config.widths), config.fold_rank)
    runs = [Run(seed, LRS[case]) for seed in seeds]
    data = Data(part, part, part, 3)
    together = Classifiers(base, data, plan, [form], runs, dtype, probe, rows_SPB)
    if constant:
        together.share_S.fill_(1.0)
    head = [together.head_PCD, together.bias_PC]
    online = Online(together, form, ground, config, runs, len(part), head)
    return together, online, data, torch.tensor(numbers)


@pytest.mark.parametrize("case", CASES)
def test_a_policy_decides_as_in_the_recipe(theirs, case):
    _, logits, _, _, rows = theirs[case]
    together, online, data, numbers = beside(theirs, case, [0])
    together.train()
    ours = online.steerings[0].journal.rows
    assert len(ours) == len(rows) > 4
    assert sum(row.get("switched", 0) for row in rows) > 1
    if case == "back":
        assert any(row["went_back"] for row in rows)
    for row, like in zip(ours, rows, strict=True):
        for key in ("step", "widths", "scales", "cost", "went_back", "switched", "rows", "refused"):
            assert row.get(key) == like.get(key), (row["step"], key)
        for key in ("loss", "reward", "reliability", "entropy", "credit_gap"):
            if key in like:
                assert row[key] == pytest.approx(like[key], abs=2e-2, rel=2e-2), (row["step"], key)
        if "credit" in like:
            torch.testing.assert_close(
                torch.tensor(row["credit"]), torch.tensor(like["credit"]), atol=1e-3, rtol=2e-2
            )
    with torch.no_grad():
        texts = data.train[numbers[:BATCH][None]]
        found = together.logits(together.matrices(), together.rest, texts)
    torch.testing.assert_close(found[0], torch.tensor(logits), atol=1e-2, rtol=1e-2)


def test_runs_beside_each_other_decide_what_they_decide_alone(theirs):
    both, alone = (beside(theirs, "free", seeds) for seeds in ([3, 0, 4], [0]))
    for together, *_ in (both, alone):
        together.train()
    one, other = both[0].notes[1], alone[0].notes[0]
    assert one["widths"] == other["widths"]
    assert one["scales"] == other["scales"]
    assert both[0].notes[0]["widths"] != one["widths"]
    texts = both[2].test.first(20)
    torch.testing.assert_close(both[0].score(texts).loss_P[1], alone[0].score(texts).loss_P[0])


def test_nothing_of_the_meta_samples_is_trained_and_the_rest_is_in_its_order():
    plan = Plan(7, 5)
    apart = {0: [1, 4, 5], 1: [0, 2, 9]}
    whole, found = orders([0, 1], 20, plan), orders([0, 1], 20, plan, apart)
    for run in (0, 1):
        rows = found[:, run].flatten().tolist()
        assert not set(rows) & set(apart[run])
        same = [row for row in whole[:, run].flatten().tolist() if row not in apart[run]]
        assert rows[: len(same)] == same


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_recorded_step_is_right_after_switches(theirs):
    plain, _, data, _ = beside(theirs, "free", [0, 3])
    plain.train()
    wide, *_ = beside(theirs, "free", [0, 3], "cuda")
    wide.train()
    assert wide.graph is not None
    assert [notes["widths"] for notes in wide.notes] == [notes["widths"] for notes in plain.notes]
    one = wide.score(Part(*(x.cuda() for x in vars(data.test).values()))).loss_P
    torch.testing.assert_close(one, plain.score(data.test).loss_P, atol=2e-2, rtol=2e-2)
