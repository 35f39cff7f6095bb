import pytest
import torch

from trainer.optim import OptimConfig, build_optimizer, learning_rate


def rates(steps=100, **fields):
    config = OptimConfig(lr=1.0, **fields)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_schedules_warm_up_peak_and_end_where_they_should(schedule):
    values = rates(schedule=schedule, warmup=10, final=0.1, decay=0.5)
    assert values[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert max(values) == 1.0
    assert values[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in zip(values[10:], values[11:], strict=False))


def test_wsd_is_stable_until_its_decay():
    values = rates(schedule="wsd", warmup=0, final=0.0, decay=0.25)
    assert values[:75] == [1.0] * 75
    assert values[87] == pytest.approx(0.48)
    assert values[-1] == 0.0


def test_no_warmup_and_a_single_step():
    assert rates(steps=1, warmup=0, schedule="cosine", final=0.0) == pytest.approx([0.0])
    assert rates(steps=5, warmup=10)[-1] == 0.5


def test_vectors_do_not_decay_and_frozen_parameters_are_left_out():
    module = torch.nn.Linear(3, 3)
    frozen = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    optimizer = build_optimizer([*module.parameters(), frozen], OptimConfig(weight_decay=0.3))
    groups = [
        ([tuple(p.shape) for p in g["params"]], g["weight_decay"]) for g in optimizer.param_groups
    ]
    assert groups == [([(3, 3)], 0.3), ([(3,)], 0.0)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "cosin"}, "set optim.schedule=cosine"),
        ({"lr": -1}, "optim.lr=-1 is too small"),
        ({"betas": [0.9]}, "optim.betas"),
        ({"decay": 0.0}, "optim.decay"),
    ],
)
def test_bad_values_name_their_key(fields, words):
    with pytest.raises(ValueError, match=words):
        OptimConfig(**fields)
