"""The policy's probabilities are what they say, and its gradient finds what is better."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.lelora.actions import (
    Logits,
    Space,
    allowed_widths,
    entropy,
    log_prob,
    masked,
    most_likely,
    sample,
    warm_logits,
)
from models.lelora.features import NUM_FEATURES, Faring, features, standardised, static_features
from models.lelora.inject import find_targets
from models.lelora.learner import Experience, Learner, entropy_weight, group_advantages
from models.lelora.policy import NETS, build_policy, load_policy, save_policy
from tests.models.lelora.toys import llama

SPACE = Space((0, 2), (0.5, 1.0), windows=False)
ALGOS = ("reinforce", "ppo", "grpo")


def any_logits(space, M, seed):
    generator = torch.Generator().manual_seed(seed)
    W, S, C = len(space.widths), space.starts, len(space.scales)
    shapes = ((M,), (M, W), (M, W, S), (M, C))
    return Logits(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def every_action(space):
    """One of each kind that differs in what it does."""
    yield (1, 0, 0, 0)
    for width, start, scale in product(range(len(space.widths)), range(space.starts),
                                       range(len(space.scales))):  # fmt: skip
        if space.widths[width] or not (start or scale):
            yield (0, width, start, scale)


@given(st.integers(0, 9999), st.booleans())
def test_probabilities_of_all_actions_are_one(seed, windows):
    space = Space((0, 2, 4), (0.5, 1.0), windows)
    logits = any_logits(space, 1, seed)
    if seed % 2:
        logits = masked(logits, allowed_widths(space, [3]))
    logs = torch.stack([log_prob(logits, space, torch.tensor([a]))[0] for a in every_action(space)])
    torch.testing.assert_close(logs.exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    expected = -(logs.exp() * logs)[logs > -torch.inf].sum()
    torch.testing.assert_close(entropy(logits, space)[0], expected)


def test_samples_come_as_often_as_they_should():
    logits = any_logits(SPACE, 1, 3)
    many = Logits(*(t.expand(20_000, *t.shape[1:]) for t in logits))
    generator = torch.Generator().manual_seed(0)
    found = sample(many, generator)
    closed = found[:, 1] == 0
    found[closed, 2:] = 0
    found[found[:, 0] == 1, 1:] = 0
    for action in every_action(SPACE):
        share = (found == torch.tensor(action)).all(1).double().mean()
        expected = log_prob(logits, SPACE, torch.tensor([action]))[0].exp()
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 20_000) ** 0.5 + 1e-9, (
            action
        )


def test_what_a_matrix_cannot_have_is_never_drawn():
    space = Space((0, 2, 4, 8), (1.0,), windows=True)
    allowed = allowed_widths(space, [3] * 500)
    logits = masked(any_logits(space, 500, 0), allowed)
    found = sample(logits, torch.Generator().manual_seed(0))
    assert found[:, 1].max() == 1
    assert most_likely(logits)[:, 1].max() <= 1
    assert torch.isfinite(log_prob(logits, space, found)).all()


@pytest.mark.parametrize("net", NETS)
def test_a_policy_begins_without_an_opinion_and_near_its_warm_start(net):
    space = Space((0, 2, 4, 8, 16), (0.625, 1.0, 1.6), windows=False)
    policy = build_policy(space, warm_logits(space, 4, 0.97, None), net, 16, 2, seed=0)
    allowed = allowed_widths(space, [100] * 5)
    logits, value = policy(torch.randn(5, NUM_FEATURES), allowed)
    torch.testing.assert_close(logits.hold_M.sigmoid(), torch.full((5,), 0.97))
    assert (logits.width_MW.softmax(1)[:, 2] > 0.88).all()
    assert (logits.scale_MC.softmax(1)[:, 1] > 0.88).all()
    assert value == 0
    assert most_likely(logits).tolist() == [[0, 2, 0, 1]] * 5


@pytest.mark.parametrize("net", NETS)
def test_matrices_have_no_order(net):
    policy = build_policy(SPACE, warm_logits(SPACE, 2, 0.5, None), net, 16, 2, seed=0)
    for head in (policy.width, policy.scale):
        torch.nn.init.normal_(head.weight)
    seen, allowed = torch.randn(6, NUM_FEATURES), allowed_widths(SPACE, [9] * 6)
    turned = torch.randperm(6)
    once, again = policy(seen, allowed).logits, policy(seen[turned], allowed).logits
    torch.testing.assert_close(once.width_MW[turned], again.width_MW)
    assert (once.width_MW.std(0) > 1e-3).all()


def play(algo, seed, learn=True, rounds=150):
    """Ten matrices; the last window pays, for half of them only scale 0.5 pays. The mean pay at the end."""
    space = Space((2, 4), (0.5, 1.0), windows=True)
    policy = build_policy(space, warm_logits(space, 2, 0.2, None), "mlp", 16, 1, seed)
    learner = Learner(policy, allowed_widths(space, [9] * 10), algo, lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    seen = torch.zeros(10, NUM_FEATURES)
    seen[:5, 0], seen[5:, 0] = 1.0, -1.0

    def pay(actions):
        acted = actions[:, 0] == 0
        scale = torch.where(seen[:, 0] > 0, actions[:, 3] == 0, actions[:, 3] == 1)
        return (acted & (actions[:, 2] == 7)).float() + 0.5 * (acted & scale).float()

    paid = []
    for _ in range(rounds):
        with torch.no_grad():
            logits, _ = policy(seen, learner.allowed_MW)
        group = []
        for _ in range(4 if algo == "grpo" else 1):
            actions = sample(logits, generator)
            group.append((actions, log_prob(logits, space, actions), pay(actions)))
        paid.append(float(group[0][2].mean()))
        if algo == "grpo":
            advantages = group_advantages([float(p.mean()) for _, _, p in group])
            told = [torch.full((10,), a) for a in advantages]
        else:
            told = [standardised(p[:, None])[:, 0] for _, _, p in group]
        if learn:
            learner.update([Experience(seen, a, logs, t, float(p.mean()))
                            for (a, logs, p), t in zip(group, told, strict=True)], 0.003)  # fmt: skip
    return sum(paid[-30:]) / 30


@pytest.mark.parametrize("algo", ALGOS)
def test_the_better_window_is_found(algo):
    """Chance pays 0.3; credit is noisy, and shared by all matrices in grpo's case."""
    learnt = play(algo, 0, rounds={"grpo": 300, "ppo": 50}.get(algo, 150))
    assert learnt > play(algo, 0, learn=False) + 0.3


@pytest.mark.parametrize("algo", ALGOS)
def test_a_learner_goes_on_as_if_it_had_not_stopped(algo):
    space = Space((0, 2, 4), (0.5, 1.0), windows=False)

    def learner():
        policy = build_policy(space, warm_logits(space, 2, 0.5, None), "transformer", 16, 1, 0)
        return Learner(policy, allowed_widths(space, [9] * 4), algo, lr=1e-2, periods=3)

    def lesson(number):
        generator = torch.Generator().manual_seed(number)
        seen = torch.randn(4, NUM_FEATURES, generator=generator)
        actions = sample(any_logits(space, 4, number), generator)
        return [
            Experience(
                seen, actions, torch.full((4,), -1.0), torch.randn(4, generator=generator), 0.3
            )
        ]

    through, stopped = learner(), learner()
    for number in range(6):
        through.update(lesson(number), 0.01)
        stopped.update(lesson(number), 0.01)
        if number in (0, 3):
            state, fresh = stopped.state(), learner()
            shapes = {name: tensor.shape for name, tensor in fresh.state().items()}
            assert shapes == {name: tensor.shape for name, tensor in state.items()}
            fresh.load(state)
            stopped = fresh
    ours, theirs = through.state(), stopped.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_features_are_finite_for_any_matrix():
    targets = find_targets(llama(), ["all-linear"], [])
    M = len(targets)
    spectra = [torch.zeros(t.shape.components) for t in targets]
    spectra[1] = torch.ones(targets[1].shape.components)
    static = static_features(targets, spectra)
    zeros, nan = torch.zeros(M), torch.full((M,), torch.nan)
    faring = Faring(
        zeros, zeros, nan, zeros, zeros, zeros + 1, zeros, zeros, 0.0, 0.0, 0.0, 1.0, 0.0
    )
    found = features(static, faring)
    assert found.shape == (M, NUM_FEATURES)
    assert torch.isfinite(found).all()


def test_features_are_about_the_spread_of_a_spectrum_and_not_its_size():
    targets = find_targets(llama(), ["all-linear"], [])
    generator = torch.Generator().manual_seed(0)
    spectra = [torch.rand(t.shape.components, generator=generator).sort(descending=True)[0]
               for t in targets]  # fmt: skip
    once = static_features(targets, spectra)
    again = static_features(targets, [10 * s for s in spectra])
    torch.testing.assert_close(once, again)


def test_a_policy_is_stored_with_what_it_can_choose(tmp_path):
    warm = warm_logits(SPACE, 2, 0.5, None)
    policy = build_policy(SPACE, warm, "mlp", 16, 1, seed=0)
    save_policy(tmp_path / "p.safetensors", policy, {"runs": 64})
    other = build_policy(SPACE, warm, "mlp", 16, 1, seed=1)
    assert load_policy(tmp_path / "p.safetensors", other) == {"runs": 64}
    assert all(
        torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True)
    )
    wider = Space((0, 2, 4), (0.5, 1.0), windows=False)
    for space, net, words in ((wider, "mlp", "set lelora.widths"),
                              (SPACE, "transformer", "set lelora.policy.net")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            load_policy(tmp_path / "p.safetensors",
                        build_policy(space, warm_logits(space, 2, 0.5, None), net, 16, 1, 0))  # fmt: skip
    (tmp_path / "q.safetensors").write_text("no policy")
    with pytest.raises(ValueError, match="no policy that can be read"):
        load_policy(tmp_path / "q.safetensors", policy)


def test_weights_of_entropy_and_groups():
    assert entropy_weight([0.01, 0.001], 0.5) == pytest.approx(0.01**0.5 * 0.001**0.5)
    assert entropy_weight([0.01, 0.0], 1.0) == 0
    assert group_advantages([1.0, 1.0]) == [0, 0]
    assert group_advantages([0.0, 2.0]) == [-1, 1]
