"""Decisions between steps: the same on all ranks, after a resume, and within the budget."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.recipes.lelora.toys import STEPS, Run, write_texts

SHOWN = ("step", "widths", "starts", "scales", "cost", "budget", "went_back")
WAYS = {
    "reinforce": {},
    "ppo": {"policy": {"algo": "ppo", "periods": 3}},
    "grpo": {"policy": {"algo": "grpo", "candidates": 2}},
    "path": {"credit": "path"},
    "windows": {"actions": ["rank", "scale", "window"], "param": "svd_ab"},
    "left": {"param": "left", "window": "principal", "fold_rank": 16},
    "gaussian": {"window": "gaussian"},
    "random": {"method": "random"},
}


def rows_and_weights(folder, settings, name="run"):
    run = Run(folder, run_dir=name, **settings).advance(STEPS)
    weights = {name: tensor.numpy() for name, tensor in run.weights().items()}
    return run.steering.journal.rows, weights, run.steering.brain.budget


def shown(rows):
    return [{key: row[key] for key in SHOWN} for row in rows]


@pytest.mark.parametrize("way", ["reinforce", "grpo"])
def test_one_and_two_ranks_decide_the_same(tmp_path, way):
    write_texts(tmp_path)
    alone = run_ranks(1, rows_and_weights, str(tmp_path), WAYS[way], "alone")[0]
    pair = run_ranks(2, rows_and_weights, str(tmp_path), WAYS[way], "pair")
    assert shown(alone[0]) == shown(pair[0][0]) == shown(pair[1][0])
    for name, tensor in alone[1].items():
        np.testing.assert_allclose(tensor, pair[0][1][name], atol=2e-4, rtol=2e-3)
        assert np.array_equal(pair[0][1][name], pair[1][1][name]), name
    file = [
        json.loads(line)
        for line in (tmp_path / "pair" / "decisions.jsonl").read_text().splitlines()
    ]
    assert shown(json.loads(json.dumps(pair[0][0]))) == shown(file)


@pytest.mark.parametrize(
    "way",
    [
        "windows",
        "random",
        pytest.param("left", marks=pytest.mark.long),
        pytest.param("gaussian", marks=pytest.mark.long),
    ],
)
def test_every_way_decides_within_the_budget(tmp_path, way):
    write_texts(tmp_path)
    rows, _, budget = run_ranks(1, rows_and_weights, str(tmp_path), WAYS[way])[0]
    decided = [row["step"] for row in rows if "held" in row or row["went_back"]]
    assert decided[:4] == [5, 10, 15, 20]
    assert all(row["cost"] <= budget for row in rows)
    assert len({tuple(row["scales"]) for row in rows}) > 1, "something was decided"
    assert len({tuple(row["widths"]) for row in rows}) > 1
    assert all(math.isfinite(row["loss"]) for row in rows if "loss" in row)
    if way not in ("random",):
        assert any(row.get("learnt") for row in rows)


def resumed(folder, settings, at):
    """Weights at the end of a run, and of one that was stopped after `at` steps and begun again."""
    through = Run(folder, run_dir="through", **settings).advance(STEPS)
    first = Run(folder, run_dir="again", **settings).advance(at)
    model = {n: t.clone() for n, t in first.weights().items()}
    moments = first.optimizer.state_dict()
    state = {n: t.clone() for n, t in first.steering.state().items()}
    second = Run(folder, run_dir="again", **settings)
    assert {n: t.shape for n, t in second.steering.state().items()} == {
        n: t.shape for n, t in state.items()
    }
    tensors = dict([*second.model.named_parameters(), *second.model.named_buffers()])
    with torch.no_grad():
        for name, tensor in model.items():
            target = tensors[name]
            (target.to_local() if hasattr(target, "to_local") else target).copy_(tensor)
    second.optimizer.load_state_dict(moments)
    second.steering.load(state)
    second.step = at
    second.advance(STEPS - at)
    same = all(torch.equal(t, second.weights()[n]) for n, t in through.weights().items())
    policies = through.steering.brain.state(), second.steering.brain.state()
    same_policy = all(torch.equal(t, policies[1][n]) for n, t in policies[0].items())
    return (
        same,
        same_policy,
        shown(through.steering.journal.rows),
        shown(second.steering.journal.rows),
    )


@pytest.mark.parametrize(
    "way",
    [
        "reinforce",
        "grpo",
        pytest.param("ppo", marks=pytest.mark.long),
        pytest.param("path", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, way):
    """In the middle of a period, with rows that have just arrived."""
    write_texts(tmp_path)
    same, same_policy, through, again = run_ranks(1, resumed, str(tmp_path), WAYS[way], 18)[0]
    assert json.loads(json.dumps(through)) == json.loads(json.dumps(again))
    assert same
    assert same_policy


def poisoned(folder):
    run = Run(folder, rollback=0.0, until=1.0, policy={"train": False})
    run.advance(20)
    good, setting = run.weights(), run.steering.good_setting
    run.advance(5, poison_at=(25,))
    row = run.steering.journal.rows[-1]
    after = run.weights()
    same = all(torch.equal(good[n], after[n]) for n in good if "adapter" not in n)
    return row, same or row["step"], run.steering.adapters.setting == setting


def test_what_goes_wrong_is_taken_back(tmp_path):
    """The classifier is spoilt right before a decision, so that the loss more than doubles."""
    write_texts(tmp_path)
    row, _, same_setting = run_ranks(1, poisoned, str(tmp_path))[0]
    assert row["went_back"]
    assert same_setting
    assert "held" not in row, "and nothing is decided then"


def exploded(folder):
    run = Run(folder, policy={"train": False}).advance(10)
    with torch.no_grad():
        next(run.model.classifier.parameters()).to_local().fill_(torch.nan)
    run.step = 14
    run.steering.after_step(15, torch.tensor(1.0))
    finite = all(torch.isfinite(t).all() for t in run.weights().values() if t.is_floating_point())
    return run.steering.journal.rows[-1]["went_back"], finite


def test_weights_that_are_not_finite_are_taken_back(tmp_path):
    write_texts(tmp_path)
    assert run_ranks(1, exploded, str(tmp_path))[0] == (True, True)


def cut(folder, method):
    run = Run(folder, method=method, prune_at=0.5, prune_to=0.5).advance(STEPS)
    rows = [(row["step"], row["cost"], row["budget"]) for row in run.steering.journal.rows]
    return rows, run.steering.brain.budget


@pytest.mark.parametrize("method", ["frozen", "random"])
def test_the_budget_falls_once(tmp_path, method):
    write_texts(tmp_path)
    found, whole = run_ranks(1, cut, str(tmp_path), method)[0]
    assert all(cost <= budget for _, cost, budget in found)
    assert all((budget == whole // 2) == (step >= 16) for step, _, budget in found)
    assert 0 < found[-1][1] <= whole // 2
    if method == "frozen":
        assert [step for step, _, _ in found] == [16]


def disagreeing(folder):
    import torch.distributed as dist

    run = Run(folder)
    if dist.get_rank() == 1:
        run.steering.adapters.adapters[0].fold_b_MC.fill_(0.5)
    try:
        run.advance(5)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_with_other_adapters_stops_the_run(tmp_path):
    write_texts(tmp_path)
    for said in run_ranks(2, disagreeing, str(tmp_path)):
        assert "after step 5, rank 1 has other adapters than rank 0" in said


def on_another_base(folder):
    state = Run(folder).advance(6).steering.state()
    other = Run(folder, model={"config": {"initializer_range": 0.1}})
    try:
        other.steering.load(state)
    except ValueError as error:
        return str(error), len(list(Path(folder).glob("spectra-*")))
    return "", 0


def test_adapters_of_another_base_are_refused_and_spectra_are_kept_by_base(tmp_path):
    write_texts(tmp_path)
    said, files = run_ranks(1, on_another_base, str(tmp_path))[0]
    assert "its adapters belong to another base model" in said
    assert files == 2


def in_bf16(folder):
    """Logits before and after a switch, with layers that are cast and recomputed."""
    parallel = {"param_dtype": "bfloat16", "activation_checkpointing": "block"}
    run = Run(folder, parallel=parallel, period=100, lr=2e-2).advance(12)
    batch = run.task.collate([run.train_samples[n] for n in range(8)])

    def logits():
        with torch.no_grad():
            return run.task._logits(run.model, batch)

    before, adapters = logits(), run.steering.adapters
    setting = adapters.setting
    done = adapters.apply(
        type(setting)((1,) * len(setting.widths), setting.starts, (1.25,) * len(setting.widths)),
        run.steering.brain.budget,
    )
    drift = float(adapters.drift().max())
    return float((logits() - before).abs().max()), done["rows"], drift


def test_a_switch_in_bf16_is_as_good_as_bf16(tmp_path):
    write_texts(tmp_path)
    difference, rows, drift = run_ranks(1, in_bf16, str(tmp_path))[0]
    assert rows > 0
    assert drift > 0.01, "what leaves has learnt something"
    assert difference < 2e-2


def trained_policy(folder):
    from models.lelora.policy import save_policy

    run = Run(folder).advance(STEPS)
    policy = run.steering.brain.learner.policy
    with torch.no_grad():
        policy.scale.bias.copy_(torch.tensor([5.0, 0, 0, 0, 0]))
        policy.width.bias.copy_(torch.tensor([0, 5.0, 0, 0]))
    path = Path(folder) / "policy.safetensors"
    save_policy(path, policy, {})
    settings = {"until": 0.0, "policy": {"path": str(path), "train": False}}
    other = Run(folder, run_dir="other", **settings)
    first = other.steering.adapters.setting
    other.advance(STEPS)
    return first, other.steering.adapters.setting, len(other.steering.journal.rows)


def test_a_policy_from_elsewhere_decides_once(tmp_path):
    write_texts(tmp_path)
    first, last, rows = run_ranks(1, trained_policy, str(tmp_path))[0]
    assert set(first.scales) == {0.625}
    assert set(first.widths) == {1}
    assert first == last
    assert rows <= 1  # at most the judgement of what was decided at the start


def taught(folder, name):
    from models.lelora.policy import load_policy

    settings = {"population": 5, "population_rounds": 2, "population_steps": 4, "run_dir": name,
                "policy": {"lr": 3e-2}}  # fmt: skip
    run = Run(folder, **settings)
    first = run.steering.adapters.setting
    policy = [p.detach().clone() for p in run.steering.brain.learner.policy.parameters()]
    again = Run(folder, **settings)
    same = all(
        torch.equal(a, b)
        for a, b in zip(policy, again.steering.brain.learner.policy.parameters(), strict=True)
    )
    told = load_policy(
        Path(folder) / name / "policy.safetensors", run.steering.brain.learner.policy
    )
    run.advance(6)
    return first.tensor().tolist(), told, same, again.steering.course is None


def test_a_population_teaches_the_policy_before_the_run(tmp_path):
    """On two ranks the runs are shared out; a start over finds the policy and does not learn again."""
    write_texts(tmp_path)
    first, told, same, kept = run_ranks(1, taught, str(tmp_path), "alone")[0]
    assert same
    assert kept
    assert told["runs"] == 5
    assert told["contest"]["pairs"] == 2, "what was chosen is something else"
    assert [r["spread"] > 0 for r in told["rounds"]] == [True, True], "runs differ"
    for other_first, other_told, *_ in run_ranks(2, taught, str(tmp_path), "pair"):
        assert other_first == first
        for ours, theirs in zip(told["rounds"], other_told["rounds"], strict=True):
            assert abs(ours["mean"] - theirs["mean"]) < 1e-5
        for key in ("gain", "error", "pairs"):
            assert told["contest"][key] == pytest.approx(other_told["contest"][key], abs=1e-5)
