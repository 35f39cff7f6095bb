"""Reinforcement learning of lists: what is drawn, what it is worth, and that it gets better."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.slide.config import SlideConfig
from models.slide.decode import greedy_list
from models.slide.history import NOTHING, pad_left
from recipes.slide.list_rl import ListRlConfig, ListRlTask, advantages, rewards
from recipes.task import DataError
from tests.models.slide.small import HISTORIES, log_probabilities, small_ids, small_model, trie_of
from tests.recipes.slide.stages import (
    PLANTED,
    SMALL,
    build_ids,
    done,
    export_of,
    exported,
    materialized,
    one_rank,
    student,
    teacher,
)


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory):
    """Semantic IDs, a teacher's lists, and a student."""
    one_rank()
    folder = tmp_path_factory.mktemp("made")
    sids = build_ids(folder / "sids")
    done(export_of(sids, [exported(teacher(sids), folder / "teacher")]), folder / "lists")
    lists = str(folder / "lists")
    yield sids, lists, exported(student(sids, lists=lists), folder / "student")
    dist.destroy_process_group()


def make(made, model=None, **changes):
    sids, lists, begun = made
    config = ListRlConfig(**{"sids": sids, "lists": lists, "teacher": begun, **changes})
    model = SlideConfig(**{**SMALL, "dropout": 0.0, "list_length": 4, **(model or {})})
    return ListRlTask(task=config, model=model, data=PLANTED, seed=0)


LISTS = torch.tensor([[[5, 6, 7], [7, 5, NOTHING]], [[1, 2, 3], [3, 2, 1]]])
TEACHERS = torch.tensor([[7, 6, 9, 5], [8, 2, 4, NOTHING]])
SCORES = torch.tensor([[-1.0, -2.0, -2.5, -3.0], [-1.0, -1.5, -4.0, float("-inf")]])


def worth(targets, **weights):
    config = ListRlConfig(sids="", lists="", teacher="", **{"ndcg": 0.0, "overlap": 0.0, **weights})
    return rewards(LISTS, torch.tensor(targets), TEACHERS, SCORES, config)


def test_rewards_and_advantages_are_their_definitions():
    found = worth([7, 9], ndcg=2.0, overlap=0.5).sum(2)
    expected = [[2 / math.log2(4) + 0.5 * 2 / 3, 2 + 0.5 / 3], [0.5 / 3, 0.5 / 3]]
    torch.testing.assert_close(found, torch.tensor(expected))
    gained = advantages(worth([7, 9], ndcg=2.0, overlap=0.5), "list")
    mean, deviation = np.mean(expected[0]), np.std(expected[0])
    for place in range(3):
        assert gained[0, :, place].tolist() == pytest.approx(
            [(e - mean) / (deviation + 1e-4) for e in expected[0]]
        )
    assert not gained[1].any()


def test_a_target_that_nobody_knows_is_never_hit():
    assert not worth([NOTHING, NOTHING], ndcg=1.0).any()


def test_graded_rewards_are_the_ndcg_of_the_teachers_shares():
    found = worth([NOTHING, NOTHING], graded=3.0, flatness=2.0).sum(2)
    for row in range(2):
        raw = np.exp(SCORES[row].numpy() / 2.0)
        share = dict(zip(TEACHERS[row].tolist(), raw / raw.sum(), strict=True)) | {NOTHING: 0.0}
        gains = 1 / np.log2(np.arange(3) + 2)
        ideal = (np.sort(raw / raw.sum())[::-1][:3] * gains).sum()
        for drawn in range(2):
            items = LISTS[row, drawn].tolist()
            own = sum(share.get(i, 0.0) * g for i, g in zip(items, gains, strict=True))
            assert found[row, drawn].item() == pytest.approx(3 * own / ideal, rel=1e-5)


def test_an_item_does_not_answer_for_those_before_it():
    """The credit of a place is what it and later ones gave, and none at all where these are equal."""
    gave = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 0.0, 2.0]]])
    gained = advantages(gave, "place")
    assert gained[0, :, 0].tolist() == pytest.approx([1, -1], rel=1e-3)
    assert not gained[0, :, 1:].any()
    assert advantages(gave, "list")[0, :, 2].tolist() == pytest.approx([1, -1], rel=1e-3)


def naive(model, ids, history, written, used, temperature):
    """Log-probability of one item after those written, among the codes that lead to unused ones."""
    total, prefix = 0.0, []
    of = log_probabilities(model, ids, history, written)
    item = used[-1]
    left = [i for i in range(ids.num_items) if i not in used[:-1]]
    for level in range(ids.levels):
        codes = sorted(
            {
                int(ids.codes_IL[i, level])
                for i in left
                if ids.codes_IL[i, :level].tolist() == prefix
            }
        )
        logp = (of(prefix)[codes] / temperature).log_softmax(0)
        code = int(ids.codes_IL[item, level])
        total += logp[codes.index(code)].item()
        prefix.append(code)
    return total


def test_items_are_drawn_as_often_as_they_are_likely():
    """First items of 4,000 lists against every item's probability under the constraint."""
    ids, model = small_ids(items=15, distinct=True), small_model(list_length=1)
    trie, count = trie_of(ids), 4000
    one = pad_left([HISTORIES[0]] * count, 5)
    torch.manual_seed(0)
    drawn = greedy_list([model], trie, one, 1, one[:, :0], noise=2.0).items_BK[:, 0]
    shares = torch.bincount(drawn, minlength=15) / count
    expected = [math.exp(naive(model, ids, HISTORIES[0], (), [i], 2.0)) for i in range(15)]
    assert sum(expected) == pytest.approx(1)
    for share, chance in zip(shares.tolist(), expected, strict=True):
        assert abs(share - chance) < 4.5 * math.sqrt(chance * (1 - chance) / count) + 1e-9


@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_log_probabilities_are_those_of_the_draw(made, codes):
    ids, model = small_ids(distinct=True), small_model(list_length=3, codes=codes)
    task = make(made, temperature=1.5)
    histories = [h for h in HISTORIES if h]
    padded = pad_left(histories, 5)
    drawn = greedy_list([model], trie_of(ids), padded, 3, padded[:, :0], noise=1.5).items_BK
    found = task._log_probabilities(model, trie_of(ids), padded, drawn)
    for user, history in enumerate(histories):
        items = drawn[user].tolist()
        for k in range(3):
            expected = naive(model, ids, history, items[:k], items[: k + 1], 1.5)
            assert found[user, k].sum().item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "how", [{"overlap": 1.0}, {"overlap": 0.0, "graded": 1.0, "credit": "place"}]
)
def test_lists_get_better(made, how):
    task = make(made, ndcg=0.0, kl=0.0, group=8, **how)
    model = materialized(task).train()
    samples = task.train_samples()
    batch = task.collate([samples[n] for n in range(24)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    seen = []
    for _ in range(25):
        loss = task.loss(model, batch) / batch["count"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(task._seen.reward) / task._seen.groups)
        task._seen = type(task._seen)()
    assert np.mean(seen[-5:]) > np.mean(seen[:5]) + 0.1
    assert model.training


def test_a_list_of_the_teacher_stands_in_each_group(made):
    task = make(made, inject=True)
    model, samples = materialized(task), task.train_samples()
    batch = task.collate([samples[n] for n in range(6)])
    histories = batch["histories_BH"].repeat_interleave(8, 0)
    drawn = task._draw(model, task._trie(torch.device("cpu")), histories, batch["teachers_BM"])
    assert torch.equal(drawn[:, 0], batch["teachers_BM"])
    assert drawn.shape == (6, 8, 4)
    assert (drawn.sort(2).values.diff(dim=2) > 0).all()  # nothing twice


def test_figures_of_groups_are_reported_once(made):
    task = make(made)
    model, samples = materialized(task), task.train_samples()
    task.loss(model, task.collate([samples[n] for n in range(10)]))
    places = {"places": np.ones(60)}
    found = task.summarize(places)
    assert 0 <= found["equal_groups"] <= 1
    assert found["reward"] >= 0
    assert "reward" not in task.summarize(places)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": None}, "set task.teacher to the exported student"),
        ({"source": "real"}, "set task.source=lists"),
        ({"group": 1}, "set task.group to 2 or more"),
        ({"kl": -1}, "set task.kl to 0 or more"),
        ({"flatness": 0}, "set task.flatness above 0"),
        ({"credit": "item"}, "task.credit"),
    ],
)
def test_what_cannot_be(made, change, message):
    with pytest.raises(ValueError, match=message):
        make(made, **change)


def test_it_begins_with_a_student_of_its_lists_length(made, tmp_path):
    with pytest.raises(DataError, match="writes no lists: set task.teacher to an exported student"):
        make(made, teacher=exported(teacher(made[0]), tmp_path / "teacher")).check()
    with pytest.raises(DataError, match=r"has model.list_length=4, and here it is 5: set model.l"):
        make(made, model={"list_length": 5}).check()
    with pytest.raises(
        DataError, match=r"has model.tied=True, and here it is False: set model.tied"
    ):
        make(made, model={"tied": False}).check()
