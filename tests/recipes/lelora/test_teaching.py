"""Where the best allocation is known, a policy finds it from rounds of noisy runs at a full budget."""

import torch

from models.lelora.budget import Shape, total_cost
from models.lelora.features import NUM_FEATURES
from recipes.lelora.brain import Brain, Setting
from recipes.lelora.config import LeloraConfig, PolicyConfig
from recipes.lelora.population import teach_by

M, RUNS, ROUNDS = 24, 48, 6
SHAPES = [Shape(64, 64) if n % 3 else Shape(128, 64) for n in range(M)]
NEED = [8.0 if n % 3 == 1 else 1.0 for n in range(M)]
"""A third of the matrices is worth much, and half of these (the deep ones) even more."""
NEED = [need * (2.0 if n >= M // 2 else 1.0) for n, need in enumerate(NEED)]


def loss(setting):
    """Falls with every row, less and less, where it is needed."""
    return sum(n / (1 + w) for n, w in zip(NEED, setting.widths, strict=True)) / sum(NEED)


def brain_of(method="lelora", seed=0):
    policy = PolicyConfig(lr=1e-2, dim=32, layers=1)
    config = LeloraConfig(method=method, rank=4, widths=[0, 1, 2, 4, 8, 16], policy=policy,
                          population=RUNS if method == "lelora" else 0, actions=["rank"])  # fmt: skip
    return Brain(config, SHAPES, [f"layer.{n}" for n in range(M)], seed)


def features():
    found = torch.zeros(M, NUM_FEATURES)
    for n in range(M):
        found[n, n % 3] = 1.0
        found[n, 3] = n / M
        found[n, 4:8] = torch.randn(4, generator=torch.Generator().manual_seed(n))  # says nothing
    return found


def best_widths(budget):
    """By giving rows one by one where they help most for what they cost: the loss is convex."""
    widths, costs = [0] * M, [s.outputs + s.inputs for s in SHAPES]
    while True:
        fitting = [m for m in range(M) if budget >= costs[m] and widths[m] < 16]
        if not fitting:
            return widths

        def gain(m):
            return NEED[m] * (1 / (1 + widths[m]) - 1 / (2 + widths[m])) / costs[m]

        chosen = max(fitting, key=gain)
        widths[chosen] += 1
        budget -= costs[chosen]


def test_the_best_allocation_is_nearly_found_within_the_full_budget():
    brain, noise = brain_of(), torch.Generator().manual_seed(1)

    def judge(number, decisions):
        assert all(brain.cost(d.setting) <= brain.budget for d in decisions)
        spent = [brain.cost(d.setting) / brain.budget for d in decisions]
        assert min(spent) > 0.95, "all cost alike"
        return [
            loss(d.setting) + 0.005 * float(torch.randn((), generator=noise)) for d in decisions
        ]

    teach_by(judge, brain, features(), runs=RUNS, rounds=ROUNDS)
    uniform, found = loss(brain.first), loss(brain.begin(features()))
    best = Setting(tuple(best_widths(brain.budget)), (-1,) * M, (1.0,) * M)
    assert total_cost("dir_ab", SHAPES, best.widths) <= brain.budget
    assert uniform - loss(best) > 0.03, "there is something to find"
    chance = brain_of("random", 3)
    by_chance = [
        loss(chance.decide_afresh(features(), chance.generator).setting) for _ in range(50)
    ]
    assert found < min(by_chance)
    assert (uniform - found) / (uniform - loss(best)) > 0.6
    brain.budget //= 2
    half = brain.begin(features())
    assert brain.cost(half) <= brain.budget
    best_half = Setting(tuple(best_widths(brain.budget)), (-1,) * M, (1.0,) * M)
    uniform = loss(brain._first())
    assert (uniform - loss(half)) / (uniform - loss(best_half)) > 0.5
