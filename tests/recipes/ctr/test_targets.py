import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.trip.history import UNSEEN
from recipes.ctr.config import InteractionsConfig
from recipes.ctr.metrics import auc
from recipes.ctr.negatives import NEAR, POPULAR, REAL, UNIFORM, draw
from recipes.ctr.planted import LENGTH, plant
from recipes.ctr.samples import Clicks
from recipes.ctr.table import CONTEXT, make_interactions
from recipes.ctr.targets import split
from recipes.task import DataError

LABELLED = InteractionsConfig(source="files", files=["x"], label_key="y")


def random_table(labels=None, users=20, items=20, rows=600, seed=0):
    generator = np.random.default_rng(seed)
    times = generator.integers(0, 400, rows)  # many ties
    return make_interactions(
        generator.integers(users, size=rows),
        # the last items appear late only
        np.minimum(generator.integers(items, size=rows), times // 20),
        times,
        generator.integers(-1, 2, rows) if labels is None else np.full(rows, labels),
        generator.integers(3, size=rows),
    )


def drawn_config(tmp_path, **changes):
    return InteractionsConfig(source="files", files=["x"], cache_dir=str(tmp_path), **changes)


def test_the_parts_follow_each_other_in_time_and_hold_every_target_once():
    table = random_table()
    parts = split(table, LABELLED)
    everything = np.concatenate([p.events_T for p in (parts.train, parts.validation, parts.test)])
    assert sorted(everything) == np.flatnonzero(table.labels_E != CONTEXT).tolist()
    last = [table.times_E[p.events_T].max() for p in (parts.train, parts.validation)]
    first = [table.times_E[p.events_T].min() for p in (parts.validation, parts.test)]
    assert last[0] < first[0] == table.times_E[~parts.known_E].min()
    assert last[1] < first[1]
    for part in (parts.train, parts.validation, parts.test):
        assert np.all(np.diff(table.times_E[part.events_T]) >= 0)


def test_items_that_training_never_saw_share_one_row():
    table = random_table()
    parts = split(table, LABELLED)
    seen = np.unique(table.items_E[parts.known_E])
    assert 0 < len(seen) < len(table.item_names)
    assert sorted(parts.vocabulary_I[seen]) == list(range(UNSEEN + 1, parts.num_items))
    unseen = np.setdiff1d(np.arange(len(table.item_names)), seen)
    assert np.all(parts.vocabulary_I[unseen] == UNSEEN)


def test_a_history_ends_before_its_targets_second_and_is_the_newest_of_its_user():
    table = random_table()
    clicks = Clicks(table, split(table, LABELLED).train, np.arange(100), max_history=8)
    lengths, newest = clicks.lengths(), clicks.newest_ages()
    for row in range(len(clicks)):
        sample, event = clicks[row], clicks.targets.events_T[row]
        mine = (table.users_E == table.users_E[event]) & (table.times_E < table.times_E[event])
        expected = np.flatnonzero(mine)[-8:]
        assert sample.items_n.tolist() == table.items_E[expected].tolist()
        assert sample.ages_n.tolist() == (table.times_E[event] - table.times_E[expected]).tolist()
        assert lengths[row] == len(expected)
        assert newest[row] == (sample.ages_n[-1] if len(expected) else -1)
        assert np.all(sample.ages_n > 0)


def test_only_first_meetings_are_targets_where_items_are_drawn(tmp_path):
    table = random_table(labels=1, users=60)
    parts = split(table, drawn_config(tmp_path, min_count=2))
    seen = 0
    for part in (parts.train, parts.validation, parts.test):
        for event in part.events_T[part.kinds_T == REAL]:
            mine = table.users_E[:event] == table.users_E[event]
            assert table.items_E[event] not in table.items_E[:event][mine]
            seen += 1
    assert 0 < seen < len(table.users_E)


def test_each_user_may_give_the_last_two_targets(tmp_path):
    table = random_table(labels=1, users=80, items=60, rows=500)
    parts = split(table, drawn_config(tmp_path, min_count=1, split="last"))
    clicks = [p.events_T[p.kinds_T == REAL] for p in (parts.train, parts.validation, parts.test)]
    pairs = table.users_E * 1000 + table.items_E
    first = np.sort(np.unique(pairs, return_index=True)[1])
    counts = np.bincount(table.items_E[parts.known_E], minlength=len(table.item_names))
    for user in range(len(table.user_names)):
        mine = [int(e) for e in first if table.users_E[e] == user]
        expected = [mine[:-2], mine[-2:-1], mine[-1:]] if len(mine) >= 3 else [mine, [], []]
        for events, wanted in zip(clicks, expected, strict=True):
            found = sorted(int(e) for e in events if table.users_E[e] == user)
            assert found == [e for e in wanted if counts[table.items_E[e]]]  # of known items
        known = np.flatnonzero((table.users_E == user) & parts.known_E)
        if len(mine) >= 3 and len(known):
            assert table.times_E[known].max() < table.times_E[mine[-2]]


def test_drawn_items_are_warm_new_to_the_user_and_of_their_time(tmp_path):
    table = random_table(labels=1, items=40, rows=800, users=60)
    config = drawn_config(tmp_path, uniform_negatives=2, popular_negatives=1, min_count=3)
    parts = split(table, config)
    counts = np.bincount(table.items_E[parts.known_E], minlength=40)
    had = set(zip(table.users_E.tolist(), table.items_E.tolist(), strict=True))
    for part in (parts.train, parts.validation, parts.test):
        users = table.users_E[part.events_T]
        for user, item, label, kind in zip(
            users, part.items_T, part.labels_T, part.kinds_T, strict=True
        ):
            assert counts[item] >= 3  # clicks, too: coldness must not tell them apart
            assert ((user, item) in had) == (label == 1) == (kind == REAL)
        of_kind = np.bincount(part.kinds_T, minlength=3)
        assert of_kind[UNIFORM] == 2 * of_kind[REAL] == 2 * of_kind[POPULAR]


def test_popular_items_are_drawn_from_the_interactions_around():
    """Items that belong to one half of the time are drawn for clicks of that half."""
    times = np.arange(2000)
    table = make_interactions(times, (times >= 1000) * 10 + times % 10, times, np.ones(2000))
    events = np.array([200, 1800])
    (early, late) = draw(table, events, np.ones(20, bool), [POPULAR] * 50, window=0.01, seed=0)
    assert early.max() < 10 <= late.min()


def test_the_last_interactions_are_drawn_no_more_often_than_others():
    """Windows end where the table does; they do not pile up there."""
    times = np.arange(1000)
    table = make_interactions(times, times, times, np.ones(1000))
    (found,) = draw(
        table, np.array([999]), np.ones(1000, bool), [POPULAR] * 400, window=0.05, seed=0
    )
    assert found.min() >= 999 - 50
    assert np.bincount(found).max() < 30  # of 400 / 50 = 8 on average


def test_near_items_are_of_someone_who_shares_an_item_and_of_the_time():
    """Two towns of 30 people and 20 items each, who never travel."""
    generator = np.random.default_rng(0)
    users = np.repeat(np.arange(60), 12)
    items = generator.integers(20, size=len(users)) + 20 * (users >= 30)
    times = generator.integers(1000, size=len(users))
    table = make_interactions(users, items, times, np.ones(len(users)))
    events = np.arange(0, len(users), 7)
    drawn = draw(table, events, np.ones(40, bool), [NEAR, NEAR], window=0.1, seed=0)
    assert np.array_equal(drawn // 20, np.repeat(table.items_E[events, None] // 20, 2, axis=1))
    had = set(zip(table.users_E.tolist(), table.items_E.tolist(), strict=True))
    for event, pair in zip(events, drawn, strict=True):
        assert all((table.users_E[event], item) not in had for item in pair)
        there = [
            np.abs(table.times_E[table.items_E == item] - table.times_E[event]).min()
            for item in pair
        ]
        assert max(there) < 250  # a tenth of the interactions on either side, some of them doubled


def test_what_is_drawn_is_written_once_and_equal_for_all_seeds_of_training(tmp_path):
    table, config = random_table(labels=1, users=60), drawn_config(tmp_path, min_count=2)
    first = split(table, config).train
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert np.array_equal(split(table, config).train.items_T, first.items_T)
    assert file.stat().st_mtime_ns == written
    other = split(table, drawn_config(tmp_path, min_count=2, negatives_seed=1)).train
    assert not np.array_equal(other.items_T, first.items_T)
    assert len(list(tmp_path.iterdir())) == 2

    tensors = load_file(file)  # a changed file is noticed
    save_file({"items": tensors["items"] + 1}, file, {"key": "", "sha256": ""})
    with pytest.raises(
        DataError, match="is not what was written: delete it, or set data.cache_dir"
    ):
        split(table, config)
    file.write_bytes(b"\0" * 4)
    with pytest.raises(DataError, match="cannot read .*: delete it"):
        split(table, config)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (1, "targets of the training part are clicks: set data.positive_from (now 4)"),
        (0, "targets of the training part are no clicks: set data.positive_from (now 4)"),
        (CONTEXT, "0 targets are too few to split: give more data"),
    ],
)
def test_labels_of_one_class_are_one_error(labels, message):
    with pytest.raises(DataError) as error:
        split(random_table(labels=labels), LABELLED)
    assert message in str(error.value)


def test_one_moment_cannot_be_split():
    table = make_interactions(range(9), range(9), np.zeros(9), np.arange(9) % 2)
    with pytest.raises(DataError, match="the training part has no target: set data.validation"):
        split(table, LABELLED)


def test_users_who_have_everything_are_one_error(tmp_path):
    every = np.arange(90)
    table = make_interactions(every // 30, every % 30, every, np.ones(90))
    with pytest.raises(DataError, match="user 0 has nearly every item .*: set data.label_key"):
        split(table, drawn_config(tmp_path, min_count=1))


def test_the_planted_effect_is_there_and_nothing_else_is():
    table = plant(3000, seed=0)
    targets = np.flatnonzero(table.labels_E != CONTEXT)
    labels = table.labels_E[targets]
    assert 0.2 < labels.mean() < 0.32
    assert len(targets) == 3000
    truth, recent, together, newest_left = [], [], [], []
    for event in targets:
        history = slice(event - LENGTH, event)
        assert len(set(table.users_E[history]) | {table.users_E[event]}) == 1
        kinds, sides = np.divmod(table.items_E[history], 3)
        kind = table.items_E[event] // 3
        (left,), (right,) = (np.flatnonzero((kinds == kind) & (sides == side)) for side in (0, 1))
        ages = table.times_E[event] - table.times_E[history]
        sessions = np.searchsorted([10_000, 400_000, 3_000_000], ages)
        assert np.bincount(sessions, minlength=4).min() >= 2
        assert (sessions[left] < 2) == (sessions[right] < 2)
        recent.append(float(sessions[left] < 2))
        together.append(float(sessions[left] == sessions[right]))
        truth.append(recent[-1] * together[-1])
        newest_left.append(float(left > right))
    assert auc(np.array(truth), labels) > 0.91
    assert auc(np.array(together), labels) < 0.82  # company alone is not enough, nor is time
    assert auc(np.array(recent), labels) < 0.82
    for useless in (newest_left, table.items_E[targets]):
        assert 0.45 < auc(np.array(useless, dtype=float), labels) < 0.55
