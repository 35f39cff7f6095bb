"""Exported lists: what is in them, and that ranks, stops and kills do not change them."""

import os
import signal

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist

from models.slide.decode import beam_search
from models.slide.folder import load_folder
from models.slide.history import NOTHING, pad_left
from models.slide.trie import build_trie
from recipes.slide.config import SequencesConfig
from recipes.slide.counts import NEAR, NEWEST
from recipes.slide.gr_train import fold_of
from recipes.slide.prefixes import Prefixes
from recipes.slide.shards import read_shards
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from recipes.task import DataError
from tests.ranks import forks, run_ranks
from tests.recipes.slide.stages import (
    PLANTED,
    build_ids,
    done,
    export_of,
    exported,
    one_rank,
    teacher,
)


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory):
    """Semantic IDs and two teachers."""
    one_rank()
    folder = tmp_path_factory.mktemp("made")
    sids = build_ids(folder / "sids")
    task = teacher(sids)
    yield sids, [exported(task, folder / f"teacher{seed}", seed) for seed in range(2)]
    dist.destroy_process_group()


def shards(folder):
    """All rows of all files, as they are."""
    files = sorted((folder / "lists").glob("*.parquet"))
    return {file.name: pyarrow.parquet.read_table(file).to_pylist() for file in files}


def export(folder, sids, teachers, **changes):
    return done(export_of(sids, teachers, **changes), folder)


def on_ranks(folder, sids, teachers):
    figures = export(folder, sids, teachers)
    dist.barrier()
    return figures


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """An export without trouble on one rank, and its figures."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, export(folder, *made)


def test_every_training_prefix_has_the_list_that_a_search_alone_finds(made, whole):
    _, teachers = made
    split = Split(read_source(PLANTED)[0])
    rows = read_shards(whole[0], 5, 6)
    found = sorted(zip(rows.users_R.tolist(), rows.events_R.tolist(), strict=True))
    assert found == sorted(zip(*map(np.ndarray.tolist, split.prefixes()), strict=True))
    models = [load_folder(folder) for folder in teachers]
    trie = build_trie(models[0].ids, torch.device("cpu"))
    for row in range(0, len(found), 23):
        user, event = int(rows.users_R[row]), int(rows.events_R[row])
        history = split.history(user, event)[-6:]
        assert rows.histories[row].tolist() == history.tolist()
        assert rows.targets_R[row] == split.sequences.items_E[event]
        one = pad_left([history], 6)
        alone = beam_search([m.model for m in models], trie, one, 6, one[:, :0])
        assert rows.items_RK[row].tolist() == alone.items_BK[0].tolist()
        np.testing.assert_allclose(rows.scores_RK[row], alone.scores_BK[0], rtol=1e-5)
    assert len({tuple(r) for r in rows.items_RK}) > 20  # the weights do make a difference
    assert all(len(set(r)) == 6 for r in rows.items_RK.tolist())
    hit = (rows.items_RK == rows.targets_R[:, None]).any(1)
    assert whole[1]["training_target_in_top1"] == pytest.approx((rows.target_ranks == 0).mean())
    assert (hit == (rows.target_ranks >= 0)).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_more_ranks_write_the_same_rows(made, whole, tmp_path, ranks):
    first, *others = run_ranks(ranks, on_ranks, tmp_path, *made)
    assert shards(tmp_path) == shards(whole[0])
    assert first == whole[1]
    validation = {k: v for k, v in first.items() if k.startswith("val")}
    assert others == [validation] * (ranks - 1)


def killed(folder, sids, teachers):
    """A rank of one that dies while it is about to put its third file in place."""
    one_rank()
    replace, files = os.replace, []

    def dies(source, target):
        files.append(target)
        if len(files) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = dies
    export(folder, sids, teachers)


def test_what_was_killed_goes_on_on_another_number_of_ranks(made, whole, tmp_path):
    process = forks.Process(target=killed, args=(tmp_path, *made))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    before = shards(tmp_path)
    assert len(before) == 2
    assert not (tmp_path / "manifest.json").exists()
    written = {name: (tmp_path / "lists" / name).stat().st_mtime_ns for name in before}
    run_ranks(2, on_ranks, tmp_path, *made)
    assert shards(tmp_path) == shards(whole[0])
    for name, when in written.items():
        assert (tmp_path / "lists" / name).stat().st_mtime_ns == when


def test_what_was_stopped_goes_on(made, whole, tmp_path):
    asked = iter([False] * 8 + [True] * 99)
    assert done(export_of(*made), tmp_path, lambda: next(asked)) is None
    assert 0 < len(shards(tmp_path)) < 5
    assert export(tmp_path, *made) == whole[1]
    assert shards(tmp_path) == shards(whole[0])
    assert export(tmp_path, *made) == whole[1]  # nothing left to do


def test_lists_of_something_else_are_not_mixed(made, whole, tmp_path):
    asked = iter([False] * 8 + [True] * 99)
    done(export_of(*made), tmp_path, lambda: next(asked))
    with pytest.raises(DataError, match="was made with teachers="):
        export(tmp_path, made[0], made[1][:1])
    with pytest.raises(DataError, match="was made with settings="):
        export(tmp_path, *made, beams=5)
    with pytest.raises(DataError, match="with beams=6, and here it is 5: set run.dir"):
        export(whole[0], *made, beams=5)
    file = next((tmp_path / "lists").glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(DataError, match="is damaged"):
        export(tmp_path, *made)


def test_teachers_of_other_ids_or_data_are_refused(made, tmp_path):
    others = build_ids(tmp_path / "sids", seed=1)
    with pytest.raises(DataError, match="was trained with other semantic IDs"):
        export_of(others, made[1]).check()
    words_only = build_ids(tmp_path / "words", cooccurrence=0)
    other = SequencesConfig(source="planted", planted_users=61)
    same_words = build_ids(tmp_path / "same", other, cooccurrence=0)
    of_others = exported(teacher(words_only), tmp_path / "teacher")
    with pytest.raises(DataError, match="was trained on other data"):
        export_of(same_words, [of_others], data=other).check()
    with pytest.raises(DataError, match="no exported folder"):
        export_of(made[0], [str(tmp_path)]).check()
    with pytest.raises(ValueError, match="set task.teachers to exported folders"):
        export_of(made[0], [])


def test_with_folds_nobody_is_asked_about_users_they_trained_on(made, tmp_path):
    sids, _ = made
    tasks = [teacher(sids, folds=2, fold=fold) for fold in range(2)]
    names = read_source(PLANTED)[0].user_names
    fold_U = fold_of(names, 2)
    assert 10 < fold_U.sum() < 50
    for fold, task in enumerate(tasks):
        users = set(task.train_samples().users.tolist())
        assert users == set(np.flatnonzero(fold_U != fold).tolist())
    folders = [exported(task, tmp_path / f"fold{n}", seed=n) for n, task in enumerate(tasks)]
    with pytest.raises(DataError, match=r"lacks the models that left out the folds \[1\] of 2"):
        export_of(sids, folders[:1]).check()
    with pytest.raises(DataError, match=r"mixes models of \[0, 2\] folds"):
        export_of(sids, [*folders, made[1][0]]).check()
    export(tmp_path / "both", sids, folders)
    both = read_shards(tmp_path / "both", 5, 6)
    models = [load_folder(folder) for folder in folders]
    trie = build_trie(models[0].ids, torch.device("cpu"))
    for row in range(0, len(both.users_R), 29):
        one = pad_left([both.histories[row]], 6)
        asked = models[fold_U[both.users_R[row]]].model
        assert (
            both.items_RK[row].tolist()
            == beam_search([asked], trie, one, 6, one[:, :0]).items_BK[0].tolist()
        )


def test_counts_reorder_without_what_the_user_gave_away(made, tmp_path):
    sids, teachers = made
    export(tmp_path, sids, teachers, counts=2.0)
    rows, plain = read_shards(tmp_path, 5, 6), {}
    split = Split(read_source(PLANTED)[0])
    for row in range(0, len(rows.users_R), 31):
        user = int(rows.users_R[row])
        counts = dict(plain)
        for other in range(split.sequences.num_users):
            if other == user:
                continue
            items = split.history(other, int(split.train_ends[other])).tolist()
            for a, first in enumerate(items):
                for apart, second in enumerate(items[a + 1 : a + 4], start=1):
                    counts[first, second] = counts.get((first, second), 0) + apart**-NEAR
        votes = list(enumerate(reversed(rows.histories[row].tolist()[-3:]), start=1))
        bonus = [
            2 * np.log1p(sum(counts.get((h, int(i)), 0) * k**-NEWEST for k, h in votes))
            for i in rows.items_RK[row]
        ]
        scores = rows.scores_RK[row] - np.array(bonus)
        assert (np.diff(rows.scores_RK[row]) <= 1e-5).all()
        one = pad_left([rows.histories[row]], 6)
        models = [load_folder(folder).model for folder in teachers]
        trie = build_trie(load_folder(teachers[0]).ids, torch.device("cpu"))
        found = beam_search(models, trie, one, 6, one[:, :0])
        expected = dict(zip(found.items_BK[0].tolist(), found.scores_BK[0].tolist(), strict=True))
        for item, value in zip(rows.items_RK[row].tolist(), scores, strict=True):
            assert value == pytest.approx(expected[item], abs=1e-4)


def test_copies_leave_items_out_but_never_the_newest(made):
    split = Split(read_source(PLANTED)[0])
    prefixes = Prefixes(split, 6, copies=2, drop=0.5, shards=4)
    users, events, copies = prefixes.rows
    assert len(users) == 3 * len(split.prefixes()[0])
    assert np.bincount(prefixes.shard_of, minlength=4).min() > 0.15 * len(users)
    shorter = 0
    for row in range(0, len(users), 7):
        whole = split.history(int(users[row]), int(events[row]))[-6:].tolist()
        found = prefixes.history(row).tolist()
        left = iter(whole)
        assert all(item in left for item in found)  # in order
        assert found[-1] == whole[-1]
        assert copies[row] or found == whole
        shorter += len(found) < len(whole)
        assert prefixes.history(row).tolist() == found
    assert shorter > 20
    newest = Prefixes(split, 6, copies=0, drop=0, shards=4, newest=2).rows
    ends = split.train_ends
    assert all(ends[u] - e <= 2 for u, e in zip(*newest[:2], strict=True))
    lengths = ends - split.sequences.starts_X[:-1] - 1
    assert len(newest[0]) == np.minimum(lengths, 2).sum()


def test_no_list_is_longer_than_there_are_items(made, tmp_path):
    sids, teachers = made
    export(tmp_path, sids, teachers, beams=120, newest=1)
    rows = read_shards(tmp_path, 5, 120)
    assert ((rows.items_RK != NOTHING).sum(1) == 96).all()
    assert np.isneginf(rows.scores_RK[:, 96:]).all()


def test_whole_training_parts_have_lists_without_what_is_held_out(made, whole, tmp_path):
    """Behind the other rows, which are the same as without; no file has their targets."""
    export(tmp_path, *made, ends=True)
    split = Split(read_source(PLANTED)[0])
    rows, others = read_shards(tmp_path, 5, 6), read_shards(whole[0], 5, 6)
    ends = rows.events_R == split.train_ends[rows.users_R]
    assert np.array_equal(rows.users_R[~ends], others.users_R)
    assert np.array_equal(rows.items_RK[~ends], others.items_RK)
    assert sorted(rows.users_R[ends].tolist()) == list(range(split.sequences.num_users))
    assert (rows.targets_R[ends] == NOTHING).all()
    assert (rows.target_ranks[ends] == -1).all()
    for row in np.flatnonzero(ends).tolist():
        user = int(rows.users_R[row])
        history = split.history(user, int(split.train_ends[user]))
        assert rows.histories[row].tolist() == history[-6:].tolist()
