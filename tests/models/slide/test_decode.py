"""Decoding against plain enumeration: every item scored alone, without caches, tries or batches."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models.slide.decode import beam_search, greedy_list
from models.slide.history import NOTHING, pad_left
from tests.models.slide.small import (
    HISTORIES,
    SIZES,
    in_order,
    log_probabilities,
    score,
    small_ids,
    small_model,
    trie_of,
)

NONE = torch.full((len(HISTORIES), 0), NOTHING)
SOME = pad_left([[1, 2], [], [7, 30, 31, 32], [0]], 4)


def excluded(rows, user):
    return {item for item in rows[user].tolist() if item != NOTHING}


@pytest.mark.parametrize(
    ("distinct", "exclude", "codes"),
    [(True, NONE, "steps"), (False, SOME, "steps"), (False, SOME, "heads")],
)
def test_a_wide_beam_is_the_order_of_all_items(distinct, exclude, codes):
    ids, model = small_ids(distinct=distinct), small_model(codes=codes)
    found = beam_search([model], trie_of(ids), pad_left(HISTORIES, 5), ids.num_items, exclude)
    for user, history in enumerate(HISTORIES):
        left = [i for i in range(ids.num_items) if i not in excluded(exclude, user)]
        scores = {item: score(model, ids, history, item) for item in left}
        expected = sorted(left, key=lambda item: (-scores[item], ids.ranks_I[item]))
        items = found.items_BK[user].tolist()
        assert items[: len(left)] == expected
        assert items[len(left) :] == [NOTHING] * (ids.num_items - len(left))
        torch.testing.assert_close(
            found.scores_BK[user, : len(left)], torch.tensor([scores[i] for i in expected]).double(),
            rtol=1e-5, atol=1e-5, check_dtype=False,
        )  # fmt: skip


def naive_beam(model, ids, history, beams, exclude):
    """The textbook: lists of prefixes, a set of those that lead somewhere."""
    of = log_probabilities(model, ids, history, ())
    left = [i for i in range(ids.num_items) if i not in exclude]
    kept = [((), 0.0)]
    for level in range(ids.levels):
        there = {tuple(ids.codes_IL[i, : level + 1].tolist()) for i in left}
        grown = [
            ((*prefix, code), total + of(list(prefix))[code].item())
            for prefix, total in kept
            for code in range(ids.sizes[level])
            if (*prefix, code) in there
        ]
        kept = sorted(grown, key=lambda pair: -pair[1])[:beams]
    items = [
        in_order(ids, [i for i in left if tuple(ids.codes_IL[i].tolist()) == codes])
        for codes, _ in kept
    ]
    return [item for group in items for item in group][:beams]


@pytest.mark.parametrize(("beams", "codes"), [(1, "steps"), (3, "heads"), (8, "steps")])
def test_a_narrow_beam_keeps_what_the_textbook_keeps(beams, codes):
    ids, model = small_ids(distinct=False), small_model(codes=codes)
    found = beam_search([model], trie_of(ids), pad_left(HISTORIES, 5), beams, SOME)
    for user, history in enumerate(HISTORIES):
        expected = naive_beam(model, ids, history, beams, excluded(SOME, user))
        assert found.items_BK[user].tolist() == expected


def naive_greedy(model, ids, history, length, exclude, feedback):
    used, written = set(exclude), []
    for _ in range(length):
        left = [i for i in range(ids.num_items) if i not in used]
        if not left:
            written.append(NOTHING)
            continue
        of = log_probabilities(model, ids, history, written if feedback else (), slots=feedback)
        prefix = []
        for level in range(ids.levels):
            codes = {
                int(ids.codes_IL[i, level])
                for i in left
                if ids.codes_IL[i, :level].tolist() == prefix
            }
            logp = of(prefix)
            prefix.append(max(sorted(codes), key=lambda code: logp[code].item()))
        item = in_order(ids, [i for i in left if ids.codes_IL[i].tolist() == prefix])[0]
        written.append(item)
        used.add(item)
    return written


@pytest.mark.parametrize(("distinct", "slots"), [(True, 0), (False, 8)])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_a_greedy_list_is_the_textbooks(distinct, feedback, slots, codes):
    ids, model = small_ids(distinct=distinct), small_model(list_length=slots, codes=codes)
    found = greedy_list([model], trie_of(ids), pad_left(HISTORIES, 5), 8, SOME, feedback)
    for user, history in enumerate(HISTORIES):
        expected = naive_greedy(model, ids, history, 8, excluded(SOME, user), feedback)
        assert found.items_BK[user].tolist() == expected


def test_all_items_and_then_nothing():
    """Each once, however many share an ID."""
    ids, model = small_ids(items=33), small_model()
    found = greedy_list([model], trie_of(ids), pad_left(HISTORIES, 5), 35, SOME)
    for user in range(len(HISTORIES)):
        left = [i for i in range(33) if i not in excluded(SOME, user)]
        items = found.items_BK[user].tolist()
        assert sorted(items[: len(left)]) == left
        assert items[len(left) :] == [NOTHING] * (35 - len(left))


@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_scores_of_a_greedy_list_are_those_of_its_items(codes):
    ids, model = small_ids(distinct=True), small_model(list_length=4, codes=codes)
    found = greedy_list([model], trie_of(ids), pad_left(HISTORIES, 5), 4, NONE)
    for user, history in enumerate(HISTORIES):
        written = []
        for item, value in zip(
            found.items_BK[user].tolist(), found.scores_BK[user].tolist(), strict=True
        ):
            assert value == pytest.approx(score(model, ids, history, item, written), abs=1e-5)
            written.append(item)


def test_several_models_are_the_mean_of_their_log_probabilities():
    ids, models = small_ids(distinct=True), [small_model(seed=seed) for seed in range(3)]
    found = beam_search(models, trie_of(ids), pad_left(HISTORIES[:1], 5), ids.num_items, NONE[:1])
    for item, value in zip(found.items_BK[0].tolist(), found.scores_BK[0].tolist(), strict=True):
        each = [score(model, ids, HISTORIES[0], item) for model in models]
        assert value == pytest.approx(sum(each) / 3, abs=1e-5)


def test_no_user_depends_on_the_others():
    ids, model = small_ids(), small_model()
    together = beam_search([model], trie_of(ids), pad_left(HISTORIES, 5), 6, SOME)
    for user, history in enumerate(HISTORIES):
        alone = beam_search([model], trie_of(ids), pad_left([history], 5), 6, SOME[user : user + 1])
        assert alone.items_BK[0].tolist() == together.items_BK[user].tolist()


def test_without_the_trie_codes_that_are_no_item_are_told():
    """What the constraint is worth: the likeliest codes, whatever they are."""
    ids, model = small_ids(items=13, distinct=True), small_model()
    found = greedy_list([model], trie_of(ids), pad_left(HISTORIES, 5), 6, NONE, constrain=False)
    codes = {tuple(row): item for item, row in enumerate(ids.codes_IL.tolist())}
    first = []
    for history in HISTORIES:
        prefix, of = [], log_probabilities(model, ids, history, ())
        for _ in SIZES:
            prefix.append(int(of(prefix).argmax()))
        first.append(codes.get(tuple(prefix), NOTHING))
    assert found.items_BK[:, 0].tolist() == first
    assert NOTHING in found.items_BK


@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_no_step_asks_the_host(codes):
    """Tensors without data: whatever needed a number of them would fail."""
    ids, model = small_ids(), small_model(list_length=3, codes=codes).float()
    with FakeTensorMode(allow_non_fake_inputs=True):
        trie, histories = trie_of(ids), pad_left(HISTORIES, 5)
        for found in (
            beam_search([model], trie, histories, 2, SOME),
            greedy_list([model], trie, histories, 2, SOME),
        ):
            assert found.items_BK.shape == (4, 2)
