import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.trip import study
from benchmarks.trip.training import Batches, Data, Plan, sample_order, train
from parallel.weights import materialize
from recipes.trip import TripTask
from tests.recipes.ctr.test_trip import ratings
from trainer.optim import build_optimizer, learning_rate

CPU = torch.device("cpu")
# nothing is left to chance: all items that can be hidden are
SMALL = ["model.hidden_size=8", "model.max_history=6", "model.dropout=0", "optim.warmup=2",
         "optim.max_norm=0.1", "data.positive_from=3"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ratings(tmp_path_factory.mktemp("stack"), users=20, rows=400)


def alone(task, config, plan, lr, seed):
    """One model by one plain loop; the test part's log-odds."""
    model = task.build_model()
    materialize(model, CPU, task.init_weights, seed)
    config.optim.lr = lr
    optimizer = build_optimizer(model.parameters(), config.optim)
    data = Batches(task, task.train_samples(), CPU)
    steps = max(plan.evaluations, round(plan.epochs * data.size / plan.batch_size))
    for step, rows in enumerate(sample_order(data.size, steps, plan.batch_size, seed), 1):
        (task.loss(model, data[rows.long()]) / len(rows)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, steps)
        optimizer.step()
        optimizer.zero_grad()
    test = Batches(task, task.clicks(task.parts.test), CPU)
    with torch.no_grad():
        return task.logits(model, test[torch.arange(test.size)]).double().numpy()


@pytest.mark.parametrize(
    "model",
    [
        "trip model.masked_share=0.99",
        "trip model.masked_share=0.99 model.mask=learned model.rank_gate=true",
        "transformer model.relative=hstu model.mask=bidirectional",
        "target_attention_reconstruction model.masked_share=0.99 model.time=trte",
        *("mean_pooling", "din", "tin", "bst", "sasrec", "hstu"),
    ],
)
def test_every_member_of_a_stack_learns_what_it_learns_alone(folder, model):
    config = study.compose(model, [*SMALL, f"data.folder={folder}"])
    task = TripTask(task=config.task, model=config.model, data=config.data, seed=0)
    plan, members = Plan(0.5, 1, 32), [(1e-3, 0), (1e-3, 1), (3e-3, 0)]
    found = train(task, config, plan, members, Data.of(task, CPU), CPU)
    for trained, (lr, seed) in zip(found, members, strict=True):
        expected = alone(task, config, plan, lr, seed)
        # Adam's first steps divide by tiny numbers: what is rounded otherwise is made larger
        np.testing.assert_allclose(trained.logits_T, expected, atol=2e-4)
    assert np.abs(found[0].logits_T - found[1].logits_T).max() > 1e-2
    assert np.abs(found[0].logits_T - found[2].logits_T).max() > 1e-3


def test_every_member_draws_candidates_of_its_own(folder):
    words = [*SMALL, f"data.folder={folder}", "model.reconstruction_candidates=4"]
    config = study.compose("trip model.masked_share=0.99", words)
    task = TripTask(task=config.task, model=config.model, data=config.data, seed=0)
    members = [(0.0, 0), (0.0, 0)]  # nothing is learned: only what is drawn differs
    found = train(task, config, Plan(0.2, 1, 32), members, Data.of(task, CPU), CPU)
    assert np.array_equal(found[0].logits_T, found[1].logits_T)
    assert found[0].losses != found[1].losses
