import numpy as np
import pytest
import torch

from models.trip.history import UNSEEN
from recipes.ctr.counts import cosine_scores
from recipes.ctr.samples import Clicks
from recipes.ctr.start import singular_vectors
from recipes.ctr.targets import split
from recipes.trip import TripTask, TripTaskConfig
from tests.recipes.ctr.test_targets import LABELLED, drawn_config, random_table


def test_first_vectors_are_those_of_the_whole_singular_value_decomposition():
    generator = np.random.default_rng(0)
    users, items = (
        np.concatenate([generator.integers(12, size=90), np.arange(12)]),
        generator.integers(9, size=102),
    )
    items[-9:] = np.arange(9)  # every item is there
    counts = np.zeros((12, 9))
    counts[users, items] = 1.0
    normal = counts / np.sqrt(counts.sum(1, keepdims=True) * counts.sum(0))
    _, values, rows = np.linalg.svd(normal)
    expected = rows[:4].T * values[:4]
    expected *= 0.02 * 2 / np.linalg.norm(expected, axis=1, keepdims=True)
    found = singular_vectors(users, items, D=4)
    assert np.allclose(found @ found.T, expected @ expected.T, atol=1e-6)  # signs are free
    assert np.array_equal(found, singular_vectors(users, items, D=4))
    wide = singular_vectors(users, items, D=16)  # more than the matrix has
    assert wide.shape == (9, 16)
    assert not wide[:, 9:].any()


def test_cosines_are_those_of_the_users_who_met_both(tmp_path):
    table = random_table(labels=1, users=60)
    parts = split(table, drawn_config(tmp_path, min_count=2))
    clicks = Clicks(table, parts.test, parts.vocabulary_I, max_history=4)
    met = {}
    for event in np.flatnonzero(parts.known_E):
        met.setdefault(int(table.items_E[event]), set()).add(int(table.users_E[event]))
    scores = cosine_scores(clicks, parts)
    for row in range(len(clicks)):
        begin, end = clicks.span(int(parts.test.events_T[row]))
        mine = met.get(int(parts.test.items_T[row]), set())
        cosines = []
        for item in set(table.items_E[begin:end].tolist()):
            theirs = met.get(item, set())
            size = max(len(mine) * len(theirs), 1) ** 0.5
            cosines.append(len(mine & theirs) / size)
        assert scores[row] == pytest.approx(np.mean(cosines) if cosines else 0.0)
    assert scores.any()


@pytest.fixture
def make(tmp_path):
    def task(**changes):
        from models.trip.config import TripConfig

        model = TripConfig(hidden_size=8, max_history=6, **changes)
        made = TripTask(
            task=TripTaskConfig(), model=model, data=drawn_config(tmp_path, min_count=2), seed=0
        )
        made.table = random_table(labels=1, users=60)
        return made

    return task


def test_all_models_and_seeds_start_with_the_same_counted_items(make):
    from parallel.weights import materialize

    tables = []
    for changes, seed in (({}, 0), ({"mask": "causal", "rank": "none"}, 1)):
        task = make(item_start="counts", **changes)
        model = task.build_model()
        materialize(model, torch.device("cpu"), task.init_weights, seed=seed)
        tables.append(model.items.rows_VD.detach())
        assert not model.items.rows_VD[: UNSEEN + 1].any()
        assert model.items.rows_VD[UNSEEN + 1 :].any(1).all()
    assert torch.equal(*tables)


def test_all_models_of_a_seed_start_with_the_same_random_items(make):
    from parallel.weights import materialize

    tables = []
    for changes, seed in (
        ({}, 3),
        ({"mask": "causal", "rank": "none", "summaries": 0}, 3),
        ({}, 4),
    ):
        task = make(**changes)
        model = task.build_model()
        materialize(model, torch.device("cpu"), task.init_weights, seed=seed)
        tables.append(model.items.rows_VD.detach())
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_samples_at_once_are_samples_one_by_one(make):
    task = make()
    for clicks in (task.train_samples(), task.eval_samples()):
        rows = np.random.default_rng(0).permutation(len(clicks))[:40]
        whole, single = task.at_once(clicks, rows), task.collate([clicks[int(n)] for n in rows])
        assert whole.keys() == single.keys()
        assert all(torch.equal(whole[k], single[k]) for k in whole if k != "count")


def test_labelled_tables_have_cosines_too():
    table = random_table()
    parts = split(table, LABELLED)
    assert len(cosine_scores(Clicks(table, parts.test, parts.vocabulary_I, 5), parts)) == len(
        parts.test
    )
