"""Many models at once train as each would alone, on what the recipe's tasks would give them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.slide import columns
from benchmarks.slide.fleet import Member, Schedule, train
from benchmarks.slide.sets import Prepared
from models.slide.config import SlideConfig
from parallel.weights import materialize
from recipes.slide.gr_train import GrTrainConfig, GrTrainTask
from recipes.slide.list_distill import Distilled, ListDistillConfig, ListDistillTask
from recipes.slide.shards import Rows
from tests.benchmarks.slide.small import planted
from trainer.optim import OptimConfig, build_optimizer, learning_rate

CPU = torch.device("cpu")
OPTIM = OptimConfig(lr=1e-2, warmup=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    original, file = planted(folder)
    found = Prepared.of(file)
    assert found.inputs == original.inputs
    return found


def teacher(data, codes="steps", dropout=0.0):
    model = SlideConfig(
        hidden_size=16, num_layers=1, num_heads=2, max_history=6, codes=codes, dropout=dropout
    )
    task = GrTrainTask(
        task=GrTrainConfig(sids="packed", beams=10), model=model, data=data.config, seed=0
    )
    task.data = data
    return task


def student(data, **changes):
    task = ListDistillTask(
        task=ListDistillConfig(sids="packed", lists="packed", **changes),
        model=SlideConfig(hidden_size=16, num_layers=1, num_heads=2, max_history=6, list_length=4),
        data=data.config,
        seed=0,
    )
    task.data = data
    return task


def member(data, seed, codes="steps", device=CPU):
    task = teacher(data, codes)
    made, lengths = columns.of_windows(task, device)
    return Member(f"{codes}{seed}", task, OPTIM, seed, made, lengths,
                  columns.batches_of(task, device))  # fmt: skip


def constant(running):
    """The last evaluation is the best."""
    return {"ndcg@10": float(running.done)}


SCHEDULE = Schedule(lengths=(4, 7), batch_size=8, steps=9, evaluations=3)


def test_a_fleet_trains_each_model_as_a_plain_loop_would(data):
    members = [member(data, 0), member(data, 1, "heads"), member(data, 2)]
    members[2].name, members[2].by_target = "by_target", True
    targets = members[2].columns["weights"].sum() * data.ids.levels
    mean = float(targets / len(members[2].lengths_R) * SCHEDULE.batch_size)
    found = train(members, SCHEDULE, constant, CPU, torch.float32)
    for one in members:
        model = one.task.build_model()
        materialize(model, CPU, one.task.init_weights, one.seed)
        optimizer = build_optimizer(model.parameters(), OPTIM)
        orders = SCHEDULE.orders(one.lengths_R, torch.Generator().manual_seed(one.seed))
        used = [0] * len(orders)
        samples = one.task.train_samples()
        for step, number in enumerate(SCHEDULE.sequence(members[0].lengths_R, 0), start=1):
            rows = orders[number][used[number]].tolist()
            used[number] += 1
            batch = one.task.collate([samples[row] for row in rows])
            count = mean if one.by_target else batch["count"]
            (one.task.loss(model, batch) / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(OPTIM, step, SCHEDULE.steps)
            optimizer.step()
            optimizer.zero_grad()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(found[one.name].weights[name], weight, rtol=1e-3, atol=1e-5)


def test_batches_are_of_rows_that_fit_and_every_row_comes(data):
    lengths = torch.tensor([2, 3, 4, 5, 6, 7] * 20)
    schedule = replace(SCHEDULE, steps=60)
    orders = schedule.orders(lengths, torch.Generator().manual_seed(0))
    numbers = schedule.sequence(lengths, 0)
    assert len(numbers) == 60
    assert sum(n == 0 for n in numbers) == 30
    for number, (low, high) in enumerate([(0, 4), (5, 7)]):
        rows = orders[number]
        assert len(rows) >= numbers.count(number)
        assert all(low <= lengths[row] <= high for row in rows.flatten().tolist())
        assert len(rows[:8].unique()) == 60  # one pass, and the beginning of the next


def test_the_best_evaluation_is_kept(data):
    seen = []

    def second_is_best(running):
        seen.append([m.detach().clone() for m in running.masters])
        return {"ndcg@10": [0.1, 0.9, 0.2][len(seen) - 1]}

    one = member(data, 0)
    found = train([one], SCHEDULE, second_is_best, CPU, torch.float32)[one.name]
    assert found.best["step"] == 6
    for kept, weight in zip(seen[1], found.weights.values(), strict=True):
        assert torch.equal(kept, weight)


@pytest.mark.parametrize(
    "how", [{}, {"order": "reverse"}, {"weights": "log"}, {"weights": "score"}]
)
def test_students_read_what_the_recipe_collates(data, how):
    generator, split = np.random.default_rng(0), data.split
    users, targets = (x[::7] for x in split.prefixes())
    histories = [split.history(u, e)[-6:] for u, e in zip(users, targets, strict=True)]
    items = np.stack([generator.permutation(96)[:5] for _ in users])
    scores = np.sort(generator.normal(size=items.shape).astype(np.float32))[:, ::-1]
    rows = Rows(
        users, targets, users * 0, histories, split.sequences.items_E[targets], items, scores
    )
    task = student(data, **how)
    samples = Distilled(rows, np.arange(len(users)), 4, 6, task.config, "")
    same(task, [samples[n] for n in range(len(users))], columns.of_lists(task, rows, CPU))


def test_direct_lists_are_what_the_recipe_collates(data):
    task = student(data, source="real")
    samples = task.train_samples()
    same(task, [samples[n] for n in range(len(samples))], columns.of_followed(task, CPU))


def same(task, samples, made):
    found, _ = made
    batch = columns.batches_of(task, CPU)(found, 10)
    expected = task.collate(samples)
    T = expected["tokens_BT"].shape[1]
    for name in ("tokens_BT", "slots_BT"):
        assert torch.equal(batch[name][:, :T], expected[name])
    N = expected["weights_BN"].shape[1]
    torch.testing.assert_close(batch["weights_BN"][:, :N], expected["weights_BN"])
    assert float(batch["count"]) == pytest.approx(expected["count"], rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_branches_of_a_graph_train_what_single_launches_do(data):
    device = torch.device("cuda")
    found = [
        train([member(data, 0, device=device), member(data, 1, "heads", device)],
              SCHEDULE, constant, device, torch.float32, graphs)
        for graphs in (True, False)
    ]  # fmt: skip
    for name in found[0]:
        for key, weight in found[0][name].weights.items():
            torch.testing.assert_close(weight, found[1][name].weights[key], rtol=1e-3, atol=1e-4)
