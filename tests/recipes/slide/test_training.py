"""Both training stages: what is learnt, that splits of a batch do not matter, and what they export."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.slide.build import build
from models.slide.config import SlideConfig
from models.slide.cost import training_flops
from models.slide.decode import beam_search, greedy_list
from models.slide.folder import load_folder
from models.slide.history import NOTHING, pad_left
from models.slide.trie import build_trie
from parallel.weights import load_safetensors
from recipes.slide.gr_train import GrTrainConfig
from recipes.slide.list_distill import ListDistillConfig, place_weights
from recipes.slide.metrics import gains, places
from recipes.slide.shards import Rows, read_shards
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from recipes.slide.windows import Windows
from recipes.task import DataError
from tests.recipes.slide.stages import (
    PLANTED,
    SMALL,
    build_ids,
    done,
    evaluation,
    export_of,
    exported,
    materialized,
    one_rank,
    student,
    teacher,
)


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory):
    """Semantic IDs, a teacher, and its lists."""
    one_rank()
    folder = tmp_path_factory.mktemp("made")
    sids = build_ids(folder / "sids")
    model = exported(teacher(sids), folder / "teacher")
    done(export_of(sids, [model]), folder / "lists")
    yield sids, model, str(folder / "lists")
    dist.destroy_process_group()


@pytest.mark.parametrize("history", [1, 2, 5, 30])
def test_windows_learn_each_training_item_once_after_what_was_before(history):
    sequences, _ = read_source(PLANTED)
    split = Split(sequences)
    windows = Windows(split, np.arange(60), history, "ids")
    learnt = np.zeros(len(sequences.items_E), dtype=int)
    for (begin, end, first), window in zip(windows.rows.tolist(), windows, strict=False):
        learnt[first:end] += 1
        assert window.items_N.tolist() == sequences.items_E[begin:end].tolist()
        assert window.learnt_N.tolist() == [event >= first for event in range(begin, end)]
        user = np.searchsorted(sequences.starts_X, begin, side="right") - 1
        start = int(sequences.starts_X[user])
        assert start <= begin < first < end <= split.train_ends[user]
        assert first - begin >= min(first - start, max(history // 2, 1))
    expected = split.in_training.copy()
    expected[sequences.starts_X[:-1]] = False
    assert learnt.tolist() == expected.astype(int).tolist()


def batch_of(task, rows):
    samples = task.train_samples()
    return task.collate([samples[row] for row in rows])


@pytest.mark.parametrize("stage", ["teacher", "student"])
def test_the_loss_does_not_depend_on_how_a_batch_is_split(made, stage):
    sids, _, lists = made
    task = teacher(sids) if stage == "teacher" else student(sids, lists=lists, weights="log")
    model = materialized(task)
    whole, parts = (
        batch_of(task, range(40)),
        [batch_of(task, range(13)), batch_of(task, range(13, 40))],
    )
    torch.testing.assert_close(
        task.loss(model, whole), sum(task.loss(model, part) for part in parts)
    )
    assert task.count(whole) == pytest.approx(sum(map(task.count, parts)))


def naive_nats(model, ids, before, item, smoothing, slots=0):
    """Cross-entropy of one item's codes, one by one, with smoothed labels."""
    total = 0.0
    for level, code in enumerate(ids.codes_IL[item].tolist()):
        codes = [*ids.codes_IL[before].reshape(-1).tolist(), *ids.codes_IL[item, :level].tolist()]
        levels = [n % ids.levels for n in range(len(codes))]
        tokens = [0] + [model.offsets[at] + c for at, c in zip(levels, codes, strict=True)]
        own = len(before) - slots  # items of the history
        places = [0] + [max(n // ids.levels - own + 1, 0) for n in range(len(codes))]
        missing = -len(tokens) % ids.levels
        out = model(torch.tensor([tokens + [0] * missing]), torch.tensor([places + [0] * missing]))
        logp = out[level][0, (len(tokens) - 1) // ids.levels].log_softmax(-1)
        smooth = (1 - smoothing) * logp[code] + smoothing * logp.mean()
        total -= smooth.item()
    return total


def test_the_teachers_loss_is_that_of_one_code_after_the_other(made):
    task = teacher(made[0])
    model, ids = materialized(task), task.data.ids
    samples = task.train_samples()
    rows = [0, 5, 17]
    expected = 0.0
    for row in rows:
        items, learnt = samples[row]
        for at in np.flatnonzero(learnt).tolist():
            expected += naive_nats(model, ids, items[:at], int(items[at]), 0.1)
    assert task.loss(model, batch_of(task, rows)).item() == pytest.approx(expected, rel=1e-4)
    count = sum(samples[row].learnt_N.sum() for row in rows) * ids.levels
    assert batch_of(task, rows)["count"] == count


def test_the_students_loss_is_that_of_its_list_only(made):
    sids, _, lists = made
    task = student(sids, lists=lists, weights="log", label_smoothing=0.0)
    model, ids = materialized(task), task.data.ids
    torch.nn.init.normal_(model.slots_KD)
    samples, expected = task.train_samples(), 0.0
    rows = [2, 9]
    for row in rows:
        history, found, weights, *_ = samples[row]
        for k, (item, weight) in enumerate(zip(found.tolist(), weights.tolist(), strict=True)):
            before = np.concatenate([history, found[:k]])
            expected += weight * naive_nats(model, ids, before, item, 0.0, slots=k)
    assert task.loss(model, batch_of(task, rows)).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stage", ["teacher", "student"])
def test_evaluation_is_a_search_for_each_user(made, stage):
    sids, _, lists = made
    task = teacher(sids) if stage == "teacher" else student(sids, lists=lists)
    model, users = materialized(task), task.eval_samples()
    parts = [task.collate([users[n] for n in range(a, b)]) for a, b in ((0, 25), (25, 60))]
    with torch.no_grad():
        sums = [task.evaluate(model, part) for part in parts]
    found = task.summarize({"places": sum(s["places"] for s in sums)})
    trie, split = build_trie(task.data.ids, torch.device("cpu")), task.data.split
    lists_of, targets = [], []
    for user, event in enumerate(split.targets("validation").tolist()):
        one = pad_left([split.history(user, event)], 6)
        if stage == "teacher":
            items = beam_search([model], trie, one, 20, one[:, :0]).items_BK
        else:
            items = greedy_list([model], trie, one, 10, one[:, :0]).items_BK
        lists_of.append(items[0].tolist())
        targets.append(int(split.sequences.items_E[event]))
    place = places(np.array(lists_of), np.array(targets))
    assert found["recall@10"] == pytest.approx(gains(place, 10)["recall@10"].mean())
    assert found["ndcg@10"] == pytest.approx(gains(place, 10)["ndcg@10"].mean())
    same = split.strata("validation")["same_day"]
    assert found["recall@10_same_day"] == pytest.approx(gains(place, 10)["recall@10"][same].mean())


def test_a_student_begins_as_its_teacher(made):
    sids, folder, lists = made
    task = student(sids, lists=lists, teacher=folder)
    task.check()
    model = materialized(task, seed=5)
    load_safetensors(model, task.weights_folder(), lambda names: task.locate_weights(model, names))
    theirs = load_folder(folder)
    assert not model.slots_KD.any()
    one = pad_left([[1, 2, 3], [4]], 6)
    trie = build_trie(theirs.ids, torch.device("cpu"))
    pair = [greedy_list([m], trie, one, 4, one[:, :0]) for m in (model.eval(), theirs.model)]
    assert torch.equal(pair[0].items_BK, pair[1].items_BK)


def some_rows():
    scores = np.array(
        [[-1.0, -2, -3, -4, -5], [-1, -2, -np.inf, -np.inf, -np.inf]], dtype=np.float32
    )
    items = np.array([[5, 6, 7, 8, 9], [6, 5, NOTHING, NOTHING, NOTHING]])
    return Rows(
        np.array([0, 1]), np.array([3, 9]), np.array([0, 0]), [np.array([1, 2]), np.array([3])],
        np.array([7, 1]), items, scores,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [[5, 6, 7, 8], [6, 5]]),
        ({"order": "reverse"}, [[8, 7, 6, 5], [5, 6]]),
        ({"target": "prepend"}, [[7, 5, 6, 8], [1, 6, 5]]),
        ({"target": "insert"}, [[5, 6, 7, 8], [6, 5, 1]]),
        ({"only_found": True}, [[5, 6, 7, 8]]),
    ],
)
def test_what_is_made_of_a_list(made, monkeypatch, change, expected):
    sids, _, lists = made
    monkeypatch.setattr("recipes.slide.list_distill.read_shards", lambda *_: some_rows())
    samples = student(sids, lists=lists, **change).train_samples()
    assert [samples[n].list_K.tolist() for n in range(len(samples))] == expected
    assert all(len(s.weights_K) == len(s.list_K) for s in (samples[n] for n in range(len(samples))))


def test_a_random_order_is_the_same_every_time(made):
    sids, _, lists = made
    plain, random = (
        student(sids, lists=lists, order=o).train_samples() for o in ("score", "random")
    )
    drawn = [random[n].list_K.tolist() for n in range(50)]
    assert drawn == [random[n].list_K.tolist() for n in range(50)]
    assert all(sorted(a) == sorted(plain[n].list_K.tolist()) for n, a in enumerate(drawn))
    assert any(a != plain[n].list_K.tolist() for n, a in enumerate(drawn))
    assert plain.fingerprint() != random.fingerprint()


def test_weights_of_places():
    config = ListDistillConfig(sids="x")
    scores = np.array([-1.0, -2.0, -4.0], dtype=np.float32)
    assert place_weights(scores, config).tolist() == [1, 1, 1]
    log = place_weights(scores, replace(config, weights="log"))
    np.testing.assert_allclose(log / log[0], [1, 1 / math.log2(3), 0.5], rtol=1e-6)
    soft = place_weights(scores, replace(config, weights="score", temperature=2.0))
    np.testing.assert_allclose(soft / soft[0], np.exp([0, -0.5, -1.5]), rtol=1e-6)
    assert log.mean() == pytest.approx(1) == soft.mean()


def test_without_a_teacher_a_list_is_what_followed(made):
    task = student(made[0], source="real")
    samples, split = task.train_samples(), task.data.split
    users, events = split.prefixes()
    assert len(samples) == len(users)
    for row in range(0, len(users), 11):
        user, event = int(users[row]), int(events[row])
        ahead = split.sequences.items_E[event : split.train_ends[user]].tolist()
        assert samples[row].list_K.tolist() == list(dict.fromkeys(ahead))[:4]
        assert samples[row].history.tolist() == split.history(user, event)[-6:].tolist()


def test_an_exported_folder_is_the_model(made):
    sids, _, lists = made
    task = student(sids, lists=lists)
    manifest = json.loads((Path(made[1]) / "manifest.json").read_text())
    assert manifest["inputs"] == load_folder(made[1]).about["inputs"] == task.data.inputs
    assert manifest["stage"] == "gr_train"
    assert manifest["settings"]["model"]["hidden_size"] == SMALL["hidden_size"]
    assert "sids" not in manifest["settings"]
    with pytest.raises(ValueError, match="no exported folder"):
        load_folder(lists)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({}, ValueError, "set task.lists to the folder of beam_export"),
        ({"lists": "none"}, DataError, "task.lists=none is no finished beam_export"),
        ({"lists": "LISTS", "model": {**SMALL, "list_length": 7}}, DataError, "has lists of 6 items, and model"),
        ({"lists": "LISTS", "model": {**SMALL, "list_length": 0}}, ValueError, "set model.list_length to 1"),
        ({"lists": "LISTS", "teacher": "none"}, DataError, "task.teacher: none is no exported folder"),
        ({"lists": "LISTS", "teacher": "TEACHER", "model": {**SMALL, "num_layers": 2}}, DataError,
         "has model.num_layers=1, and here it is 2: set model.num_layers"),
        ({"lists": "LISTS", "order": "none"}, ValueError, "task.order=none is not one of"),
        ({"lists": "LISTS", "temperature": 0}, ValueError, "set task.temperature above 0"),
        ({"lists": "LISTS", "label_smoothing": 1}, ValueError, "set task.label_smoothing to 0 or more"),
    ],
)  # fmt: skip
def test_students_that_cannot_be(made, change, error, message):
    names = {"LISTS": made[2], "TEACHER": made[1]}
    change = {k: names.get(v, v) if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(error, match=message):
        student(made[0], **change).check()


def test_a_students_manifest_names_lists_and_teacher(made, tmp_path):
    """Whoever reads it next finds weights that were changed, by whatever."""
    sids, folder, lists = made
    out = exported(student(sids, lists=lists, teacher=folder), tmp_path / "student")
    manifest = json.loads((Path(out) / "manifest.json").read_text())
    assert manifest["stage"] == "list_distill"
    assert manifest["inputs"].keys() == {"data", "sids", "lists", "teacher"}
    assert manifest["inputs"]["teacher"] == load_folder(folder).fingerprint
    weights = Path(out) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for reader in (
        evaluation(models={"m": out}, rows=["m:greedy"]),
        export_of(sids, [out]),
        student(sids, lists=lists, teacher=out),
    ):
        with pytest.raises(DataError, match="model.safetensors is not what was written: .*distill"):
            reader.check()


def test_lists_and_teachers_of_other_ids_are_refused(made, tmp_path):
    others = build_ids(tmp_path / "sids", seed=1)
    with pytest.raises(DataError, match="was made with other semantic IDs"):
        student(others, lists=made[2]).train_samples()
    with pytest.raises(DataError, match="task.teacher=.* was trained with other semantic IDs"):
        student(others, source="real", teacher=made[1]).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folds": 1}, "set task.folds to 2 or more, or to 0"),
        ({"folds": 2, "fold": 2}, "below task.folds=2"),
        ({"beams": 5}, "set task.beams to 10 or more"),
    ],
)
def test_teachers_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        GrTrainConfig(sids="x", **change)


def test_a_teacher_has_no_lists(made):
    with pytest.raises(ValueError, match="set model.list_length=0"):
        teacher(made[0], model={**SMALL, "list_length": 3})


def test_other_ids_are_other_samples(made, tmp_path):
    """So that a run is not resumed with them."""
    others = build_ids(tmp_path / "sids", seed=1)
    assert (
        teacher(made[0]).train_samples().fingerprint()
        != teacher(others).train_samples().fingerprint()
    )


def test_samples_in_words(made):
    task = student(made[0], lists=made[2])
    lines = list(task.show(task.train_samples()[0]))
    assert lines[-1].startswith(" 4 i")
    shown = list(teacher(made[0]).show(teacher(made[0]).train_samples()[0]))
    assert shown[0].startswith("  i")
    assert shown[1].startswith("* i")
    assert {"model", "data", "split", "ids", "samples"} <= set(task.survey())


@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_flops_are_those_that_torch_counts(codes):
    from torch.utils.flop_counter import FlopCounterMode

    config = SlideConfig(**{**SMALL, "num_layers": 2, "dropout": 0.0, "codes": codes})
    model = build(config, (8, 8, 8))
    with FlopCounterMode(display=False) as counter:
        sum(x.sum() for x in model(torch.zeros(3, 12, dtype=torch.int64))).backward()
    layers_and_outlets = 3 * training_flops(config, (8, 8, 8), 12)
    assert counter.get_total_flops() == pytest.approx(layers_and_outlets, rel=0.1)


def test_read_shards_cuts_lists(made):
    assert read_shards(Path(made[2]), 5, 3).items_RK.shape[1] == 3
