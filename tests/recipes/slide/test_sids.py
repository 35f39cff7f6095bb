"""Semantic IDs: quantizers against plain ones, collision policies, and what is wrong with items."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.slide.config import SequencesConfig
from recipes.slide.items import Items, make_items
from recipes.slide.sid_build import SidBuildConfig, SidBuildTask
from recipes.slide.sids import collisions
from recipes.slide.sids.features import (
    cooccurrence_features,
    item_features,
    svd,
    text_features,
    training_pairs,
)
from recipes.slide.sids.kmeans import kmeans, nearest, residual_kmeans
from recipes.slide.sids.report import gini, report
from recipes.slide.sids.rqvae import rqvae
from recipes.slide.sids.stored import read_ids
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from recipes.task import DataError
from tests.ranks import run_ranks

PLANTED = SequencesConfig(source="planted", planted_users=80)


def blobs(groups=6, each=20, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(groups, size, generator=generator).double() * 10
    noise = torch.randn(groups * each, size, generator=generator).double()
    return middle.repeat_interleave(each, 0) + noise, middle


def test_kmeans_finds_blobs_that_are_apart():
    x, middle = blobs()
    center = kmeans(x, 6, seed=0, rounds=50)
    code, _ = nearest(x, center)
    assert len({tuple(part.unique().tolist()) for part in code.split(20)}) == 6
    assert torch.cdist(center, middle).min(1).values.max() < 1.5


def test_kmeans_ends_where_lloyd_would():
    """Each center is the mean of its items, and each item has the nearest."""
    x, _ = blobs(each=9, size=3, seed=1)
    center = kmeans(x, 10, seed=3, rounds=200)
    code, _ = nearest(x, center)
    assert torch.equal(code, torch.cdist(x, center).argmin(1))
    for number in range(10):
        torch.testing.assert_close(center[number], x[code == number].mean(0), rtol=0, atol=1e-8)


def test_fewer_different_items_than_codes():
    x = torch.tensor([[0.0, 1], [0, 1], [2, 0]]).double()
    code, distance = nearest(x, kmeans(x, 8, seed=0, rounds=20))
    assert code[0] == code[1] != code[2]
    assert distance.max() < 1e-12


def quantized(_=None):
    x, _ = blobs(each=11, seed=2)
    found = residual_kmeans(x, (4, 5, 3), seed=1)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves before all have heard from it
    return found.codes_IL.tolist(), [center.tolist() for center in found.centers]


def test_any_number_of_ranks_finds_the_same_codes():
    alone = quantized()
    for ranks in (2, 3):
        assert run_ranks(ranks, quantized, None) == [alone] * ranks


def test_each_level_quantizes_what_is_left():
    x, _ = blobs()
    found = residual_kmeans(x, (4, 5, 3), seed=1)
    left = x
    for level, center in enumerate(found.centers):
        assert torch.equal(found.codes_IL[:, level], nearest(left, center)[0])
        if level == 2:
            torch.testing.assert_close(found.left_ID, left)
        left = left - center[found.codes_IL[:, level]]
    assert left.square().sum() < 0.5 * found.left_ID.square().sum()


def test_singular_vectors_are_those_of_the_dense_matrix():
    generator = np.random.default_rng(0)
    dense = generator.random((30, 40)) * (generator.random((30, 40)) < 0.3)
    rows, columns = np.nonzero(dense)
    left, strength = svd(rows, columns, dense[rows, columns], dense.shape, 5, seed=0)
    expected_left, expected, _ = np.linalg.svd(dense)
    np.testing.assert_allclose(strength, expected[:5], rtol=3e-3)
    np.testing.assert_allclose(np.abs((left.numpy() * expected_left[:, :5]).sum(0)), 1, atol=0.1)


def test_words_in_common_bring_items_together():
    texts = ["red pen", "red pencil", "garden hose", "hose"]
    x = text_features(Items(np.arange(4), texts), 4, seed=0)
    near = torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=2)
    assert near[0, 1] > 0.1 > near[0, 2].abs()
    assert near[2, 3] > 0.5


def test_cooccurrence_reads_training_only():
    sequences, _ = read_source(PLANTED)
    split = Split(sequences)
    changed = sequences.items_E.copy()
    changed[~split.in_training] = 0
    other = Split(dataclasses.replace(sequences, items_E=changed))
    assert torch.equal(*(cooccurrence_features(s, 8, seed=0) for s in (split, other)))
    expected = sorted(
        (int(sequences.items_E[a]), int(sequences.items_E[b]))
        for start, end in zip(sequences.starts_X, split.train_ends, strict=False)
        for a in range(start, end)
        for b in range(a + 1, min(a + 4, end))
    )
    assert (
        sorted(zip(*map(np.ndarray.tolist, training_pairs(split, 3)[:2]), strict=True)) == expected
    )


codes_of = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=40
).map(lambda rows: np.array(rows))  # fmt: skip


@given(codes_of, st.integers(1, 3), st.randoms(use_true_random=False))
def test_reassigned_items_are_never_too_many_and_few_move(codes, cap, random):
    prefix_load = np.bincount(codes[:, 0])
    center = torch.tensor([[random.gauss(0, 1)] * 2 for _ in range(4)]).double()
    left = torch.tensor([[random.gauss(0, 1)] * 2 for _ in codes]).double()
    if prefix_load.max() > 4 * cap:
        with pytest.raises(DataError, match="have room for"):
            collisions.reassign(codes, left, center, cap)
        return
    moved = collisions.reassign(codes, left, center, cap)
    _, counts = collisions.number_groups(moved)
    _, before = collisions.number_groups(codes)
    assert counts.max() <= cap
    assert (moved[:, 0] == codes[:, 0]).all()
    assert (moved != codes).any(1).sum() == np.maximum(before - cap, 0).sum()


@given(codes_of, st.data())
def test_a_suffix_tells_all_items_apart_by_popularity(codes, data):
    popularity = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=len(codes), max_size=len(codes)))
    )
    found, size = collisions.suffix(codes, popularity, 40)
    assert len(np.unique(found, axis=0)) == len(codes)
    assert (found[:, :-1] == codes).all()
    assert found[:, -1].max() + 1 == size == collisions.largest(codes)
    for a in range(len(codes)):
        for b in range(len(codes)):
            if (codes[a] == codes[b]).all() and popularity[a] > popularity[b]:
                assert found[a, -1] < found[b, -1]


def test_the_gini_index_is_the_mean_difference():
    loads = np.array([3, 0, 7, 1, 1])
    expected = np.abs(loads[:, None] - loads).mean() / (2 * loads.mean())
    assert gini(loads) == pytest.approx(expected)
    assert gini(np.full(4, 3)) == pytest.approx(0)


def test_the_report_counts():
    before = np.array([[0, 0], [0, 0], [0, 1], [1, 1]])
    after = np.array([[0, 0], [0, 2], [0, 1], [1, 1]])
    items = Items(np.arange(4), attributes=[["a"], ["a", "b"], ["b"], []])
    found = report(before, after, (2, 3), items, None, seed=0)
    assert (found["ids_before"], found["ids"], found["items_of_fullest_id_before"]) == (3, 4, 2)
    assert (found["collision_rate_before"], found["collision_rate"]) == (0.25, 0.0)
    assert [level["used"] for level in found["levels"]] == [2, 3]
    assert found["levels"][0]["largest_load"] == 0.75
    assert found["jaccard"]["same_first_two_codes"] is None  # each stands alone


def test_an_rqvae_reconstructs_and_uses_its_codes():
    x, _ = blobs(groups=12, each=25)
    few, many = (rqvae(x, (8, 8), seed=0, steps=steps, batch=64, lr=3e-3) for steps in (1, 400))
    assert all(len(many.codes_IL[:, level].unique()) >= 6 for level in range(2))
    left = [q.left_ID - q.centers[-1][q.codes_IL[:, -1]] for q in (few, many)]
    scale = [q.left_ID.square().mean() for q in (few, many)]
    assert left[1].square().mean() / scale[1] < left[0].square().mean() / scale[0]


def build(folder, task=None, data=None, **changes):
    """The stage, in this process as one rank of one."""
    config = SidBuildConfig(**{"codes": 32, **changes})
    made = task or SidBuildTask(task=config, model=None, data=data or PLANTED, seed=0)
    made.check()
    return made.work(folder, torch.device("cpu"), lambda: False)


@pytest.fixture(autouse=True, scope="module")
def _one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_an_id_may_be_the_item_itself(tmp_path):
    assert build(tmp_path, method="items")["ids"] == 96
    ids = read_ids(tmp_path, read_source(PLANTED)[1].names)
    assert (ids.codes_IL[:, 0].tolist(), ids.sizes) == (list(range(96)), (96,))


@pytest.mark.parametrize("policy", ["suffix", "reassign", "keep"])
def test_a_built_folder_is_read_back(tmp_path, policy):
    figures = build(tmp_path, collisions=policy, cap=40, codes=4)
    ids = read_ids(tmp_path, read_source(PLANTED)[1].names)
    assert ids.num_items == 96
    assert ids.sizes[:3] == (4, 4, 4)
    assert len(ids.sizes) == (4 if policy == "suffix" else 3)
    distinct = len(np.unique(ids.codes_IL, axis=0))
    assert figures["ids"] == distinct == (96 if policy == "suffix" else distinct)
    written = (tmp_path / "sids.parquet").stat().st_mtime_ns
    assert build(tmp_path, collisions=policy, cap=40, codes=4) == figures
    assert (tmp_path / "sids.parquet").stat().st_mtime_ns == written  # nothing was done again
    assert json.loads((tmp_path / "manifest.json").read_text())["stage"] == "sid_build"


def test_a_folder_made_otherwise_or_damaged_is_refused(tmp_path):
    build(tmp_path)
    with pytest.raises(DataError, match="with codes=32, and here it is 8: set run.dir"):
        build(tmp_path, codes=8)
    with pytest.raises(DataError, match="with data="):
        build(tmp_path, data=SequencesConfig(source="planted", planted_users=81))
    names = read_source(PLANTED)[1].names
    with pytest.raises(DataError, match="96 other items than the 95 of data"):
        read_ids(tmp_path, names[1:])
    (tmp_path / "sids.parquet").write_bytes(b"other")
    with pytest.raises(DataError, match="sids.parquet is not what was written"):
        read_ids(tmp_path, names)
    with pytest.raises(DataError, match="is no finished sid_build: run it, or set task.sids"):
        read_ids(tmp_path / "none", names)


def rows_of(count, **columns):
    return {n: {key: make(n) for key, make in columns.items()} for n in range(count)}


def given_items(monkeypatch, rows, **keys):
    """A stage on planted sequences, whose items are these instead."""
    sequences, _ = read_source(PLANTED)
    items = make_items(rows, ["title"], "attributes", **keys)
    monkeypatch.setattr("recipes.slide.data.read_source", lambda config: (sequences, items))


def test_given_ids_of_words_or_numbers(tmp_path, monkeypatch):
    given_items(
        monkeypatch, rows_of(96, sid=lambda n: [f"<a_{n // 10}>", f"<b_{n % 10}>"]), ids_key="sid"
    )
    build(tmp_path, method="given", collisions="keep")
    assert read_ids(tmp_path, np.arange(96)).codes_IL[57].tolist() == [5, 7]


@pytest.mark.parametrize(
    ("rows", "keys", "change", "message"),
    [
        (rows_of(96, title=lambda n: "" if n == 7 else f"w{n}"), {}, {}, "item 7 has no text: give it one"),
        (rows_of(96, title=lambda n: "same"), {}, {"cooccurrence": 0}, "all 96 items have the same semantic ID"),
        (rows_of(96, v=lambda n: [1.0]), {"vector_key": "v"}, {"cooccurrence": 0}, "all 96 items have the same"),
        (rows_of(96), {}, {"cooccurrence": 0}, "nothing is known of the items"),
        (rows_of(96), {}, {"method": "given", "collisions": "keep"}, "no item has a ready semantic ID"),
        (rows_of(96, sid=lambda n: [n // 32, 0]), {"ids_key": "sid"},
         {"method": "given", "collisions": "keep", "cap": 8}, "32 items share the semantic ID [0, 0], more than task.cap=8"),
        (rows_of(96, sid=lambda n: [0] * (1 + n % 2)), {"ids_key": "sid"},
         {"method": "given", "collisions": "keep"}, "semantic IDs have 1 to 2 codes"),
        (rows_of(96, sid=lambda n: None if n == 3 else [n]), {"ids_key": "sid"},
         {"method": "given", "collisions": "keep"}, "item 3 has no semantic ID, but None"),
        (rows_of(96, title=lambda n: f"w{n % 2}"), {}, {"cooccurrence": 0, "codes": 4},
         "48 items share the codes [0, 0], and 4 last codes with task.cap=1 have room for 4"),
    ],
)  # fmt: skip
def test_items_that_cannot_have_ids_are_one_error(
    tmp_path, monkeypatch, rows, keys, change, message
):
    given_items(monkeypatch, rows, **keys)
    with pytest.raises(DataError) as error:
        build(tmp_path, **change)
    assert message in str(error.value)


def test_vectors_that_are_none(monkeypatch):
    for make, message in (
        (
            lambda n: [1.0] * (2 - (n == 5)),
            "item 5 has a vector of 1 numbers, and the longest has 2",
        ),
        (lambda n: None if n == 5 else [1.0], "item 5 has a vector of 0 numbers"),
        (lambda n: ["a"] if n == 5 else [1.0], r"item 5 has \['a'\] for a list of numbers"),
        (lambda n: 3 if n == 5 else [1.0], "item 5 has 3 for a list of numbers"),
        (lambda n: [float("nan") if n == 5 else 1.0], "item 5 has a vector that is not finite"),
    ):
        with pytest.raises(DataError, match=message):
            make_items(rows_of(9, v=make), [], vector_key="v")
    with pytest.raises(DataError, match="no item has v: set data.vector_key"):
        make_items(rows_of(9), [], vector_key="v")


def test_empty_text_may_be_allowed(tmp_path, monkeypatch):
    given_items(monkeypatch, rows_of(96, title=lambda n: "" if n == 7 else f"w{n}"))
    assert build(tmp_path, empty_text=True)["ids"] == 96


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "kmean"}, "set task.method=kmeans"),
        ({"method": "given"}, "set task.collisions to suffix or keep"),
        ({"collisions": "drop"}, "task.collisions=drop is not one of"),
        ({"codes": 1}, "set task.codes to 2 or more"),
        ({"cap": 0}, "set task.cap to 1 or more"),
    ],
)
def test_configurations_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        SidBuildConfig(**change)


def test_parts_weigh_what_they_should():
    sequences, items = read_source(PLANTED)
    x = item_features(items, Split(sequences), 8, 0.5, False, seed=0)
    assert x[:, :8].square().sum(1).mean() == pytest.approx(1)
    assert x[:, 8:].square().sum(1).mean() == pytest.approx(0.25)
