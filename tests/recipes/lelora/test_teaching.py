"""Where the best allocation is known, a policy finds it from rounds of noisy runs at a full budget."""

import pytest
import torch

from models.lelora.budget import Shape, total_cost
from models.lelora.features import NUM_FEATURES
from recipes.lelora.brain import Brain, Setting
from recipes.lelora.config import LeloraConfig, PolicyConfig
from recipes.lelora.contest import compared
from recipes.lelora.population import teach_by

M, RUNS, ROUNDS, SAMPLES = 24, 48, 6, 16
SHAPES = [Shape(64, 64) if n % 3 else Shape(128, 64) for n in range(M)]
NEED = [8.0 if n % 3 == 1 else 1.0 for n in range(M)]
"""A third of the matrices is worth much, and half of these (the deep ones) even more."""
NEED = [need * (2.0 if n >= M // 2 else 1.0) for n, need in enumerate(NEED)]
SCALE = [1.6 if n % 3 == 2 else (0.625 if n % 3 == 0 else 1.0) for n in range(M)]
"""The best of each matrix, whatever its width."""


def loss(setting):
    """Falls with every row, less and less, where it is needed."""
    return sum(n / (1 + w) for n, w in zip(NEED, setting.widths, strict=True)) / sum(NEED)


def misscaled(setting):
    """Mean square of how far scales are from the best, in doublings."""
    scales = torch.tensor(setting.scales) / torch.tensor(SCALE)
    return float(scales.log2().square().mean())


def brain_of(method="lelora", seed=0, actions=("rank",)):
    policy = PolicyConfig(lr=1e-2, dim=32, layers=1)
    config = LeloraConfig(method=method, rank=4, widths=[0, 1, 2, 4, 8, 16], policy=policy,
                          population=RUNS if method == "lelora" else 0, actions=list(actions))  # fmt: skip
    return Brain(config, SHAPES, [f"layer.{n}" for n in range(M)], seed)


def features():
    found = torch.zeros(M, NUM_FEATURES)
    for n in range(M):
        found[n, n % 3] = 1.0
        found[n, 3] = n / M
        found[n, 4:8] = torch.randn(4, generator=torch.Generator().manual_seed(n))  # says nothing
    return found


def judge_by(worth, error, seen=None):
    """Runs whose loss is `worth`, known up to `error`; `seen` is told the settings of each call."""
    noise = torch.Generator().manual_seed(1)

    def judge(numbers, settings, check):
        if seen is not None:
            seen.append((list(numbers), list(settings), check))
        run_P1 = error * torch.randn(len(settings), 1, generator=noise)
        of_PX = 0.05 * torch.randn(len(settings), SAMPLES, generator=noise)
        return torch.tensor([[worth(setting)] for setting in settings]) + run_P1 + error * of_PX

    return judge


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
    brain, calls = brain_of(), []
    course = teach_by(judge_by(loss, 0.005, calls), brain, features(), runs=RUNS, rounds=ROUNDS)
    for number, (numbers, settings, check) in enumerate(calls[:-1]):
        assert numbers == [number] * RUNS
        assert not check
        spent = [brain.cost(setting) / brain.budget for setting in settings]
        assert min(spent) > 0.95, "all cost alike"
        assert max(spent) <= 1
    uniform, found = loss(brain.first), loss(brain.begin(features()))
    numbers, settings, check = calls[-1]
    assert (numbers, check) == ([ROUNDS + n // 2 for n in range(RUNS)], True)
    assert settings == [brain.begin(features()), brain.first] * (RUNS // 2)
    assert course.contest.better
    assert course.contest.gain == pytest.approx(uniform - found, abs=4 * course.contest.error)
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


def test_scales_are_found_as_well_as_ranks():
    brain = brain_of(actions=("rank", "scale"))

    def worth(setting):
        return loss(setting) + 0.2 * misscaled(setting)

    course = teach_by(judge_by(worth, 0.005), brain, features(), runs=RUNS, rounds=ROUNDS)
    found = brain.begin(features())
    assert course.contest.better
    assert misscaled(found) < 0.5 * misscaled(brain.first)
    best = Setting(tuple(best_widths(brain.budget)), (-1,) * M, (1.0,) * M)
    assert (loss(brain.first) - loss(found)) / (loss(brain.first) - loss(best)) > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_clearly_better_is_not_taken(seed):
    """Where nothing matters, the policy is what it was before, also at half the budget."""
    brain = brain_of(seed=seed, actions=("rank", "scale"))
    before = {name: tensor.clone() for name, tensor in brain.state().items()}
    course = teach_by(judge_by(lambda _: 1.0, 0.01), brain, features(), runs=RUNS, rounds=2)
    assert not course.contest.better
    assert brain.begin(features()) == brain.first
    assert all(torch.equal(tensor, before[name]) for name, tensor in brain.state().items())
    brain.budget //= 2
    assert brain.begin(features()) == Setting((2,) * M, (-1,) * M, (1.0,) * M)


def test_the_error_of_a_contest_is_that_of_new_pairs_and_new_samples():
    generator = torch.Generator().manual_seed(0)

    def drawn(pairs, samples):
        of_pair, of_sample = (torch.randn(n, generator=generator) for n in (pairs, samples))
        return 0.3 * of_pair[:, None] + 2.0 * of_sample

    found = [compared(drawn(24, 100)) for _ in range(400)]
    spread = torch.tensor([each.gain for each in found]).std()
    mean_error = torch.tensor([each.error for each in found]).mean()
    assert float(mean_error / spread) == pytest.approx(1, abs=0.1)
    assert sum(each.better for each in found) < 0.05 * len(found)
    assert not compared(torch.full((24, 1), 5.0)).better, "one sample says nothing"
    assert not compared(torch.full((3, 4), float("nan"))).better
