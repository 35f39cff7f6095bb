from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.slide.build import build, init_weights
from models.slide.config import SlideConfig
from models.slide.decode import beam_search, greedy_list
from models.slide.history import NOTHING, pad_left, read_history
from models.slide.ids import SemanticIds, make_ids
from models.slide.model import training_inputs
from models.slide.trie import build_trie
from tests.models.slide.small import HISTORIES, SIZES, small_ids, small_model, trie_of


@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_a_padded_history_says_what_a_training_sequence_does(codes):
    """Left padding and a mask against one causal pass without either."""
    ids, model = small_ids(distinct=True), small_model(codes=codes)
    for length in (5, 9):  # more padding changes nothing
        _, logits_B1C = read_history(model, trie_of(ids), pad_left(HISTORIES, length), 1)
        for user, history in enumerate(HISTORIES):
            newest = history[-5:]
            row = torch.tensor(ids.codes_IL[[*newest, 0]])[None]
            tokens, slots = training_inputs(row, SIZES)
            torch.testing.assert_close(logits_B1C[user, 0], model(tokens, slots)[0][0, -1])


@pytest.mark.parametrize("kind", ["steps", "heads"])
def test_only_the_past_counts(kind):
    ids, model = small_ids(distinct=True), small_model(codes=kind)
    codes = torch.tensor(ids.codes_IL[[1, 2, 3, 4]])[None]
    changed = codes.clone()
    changed[0, 2, 1] = (changed[0, 2, 1] + 1) % SIZES[1]
    before, after = (model(*training_inputs(c, SIZES)) for c in (codes, changed))
    flat = [
        torch.stack([x[level][0, n].sum() for n in range(4) for level in range(3)])
        for x in (before, after)
    ]
    same = (flat[0] == flat[1]).tolist()
    assert same == [True] * (2 * 3 + 2) + [False] * 4  # from the next code on


@pytest.mark.parametrize("kind", ["steps", "heads"])
def test_codes_may_be_predicted_by_vectors_of_their_own(kind):
    ids, model = small_ids(distinct=True), small_model(codes=kind)
    own = build(replace(model.config, tied=False), SIZES).double().eval()
    own.load_state_dict({**model.state_dict(), "out_VD": model.tokens_VD})
    inputs = training_inputs(torch.tensor(ids.codes_IL[[1, 2, 3, 4]])[None], SIZES)
    for found, expected in zip(own(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        own.out_VD.mul_(2)
    for found, expected in zip(own(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(found, 2 * expected)


@pytest.mark.parametrize("kind", ["steps", "heads"])
def test_slots_begin_as_nothing_and_are_only_for_lists(kind):
    config = SlideConfig(
        hidden_size=16, num_layers=1, num_heads=2, dropout=0.0, list_length=3, codes=kind
    )
    model = build(config, SIZES)
    for module in model.modules():
        init_weights(module)
    codes = torch.tensor(small_ids(distinct=True).codes_IL[[1, 2, 3]])[None]
    tokens, slots = training_inputs(codes, SIZES, torch.tensor([1]))
    assert slots.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]  # of the input, one place behind
    torch.testing.assert_close(model(tokens, slots), model(tokens))
    torch.nn.init.ones_(model.slots_KD)
    assert not torch.allclose(model(tokens, slots)[0], model(tokens)[0])
    assert training_inputs(codes, SIZES)[1].unique().tolist() == [0]


@given(st.data())
def test_the_trie_has_the_items_and_nothing_else(data):
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    row = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    codes = np.array(data.draw(st.lists(row, min_size=1, max_size=20)))
    popularity = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=len(codes), max_size=len(codes)))
    )
    ids = make_ids(codes, sizes, popularity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.slide.trie.MOST_ENTRIES", 0 if data.draw(st.booleans()) else 1000)
        trie = build_trie(ids, torch.device("cpu"))
    rows = codes.tolist()
    for prefix in {tuple(r[:n]) for r in rows for n in range(len(sizes) + 1)}:
        state = 0
        for code in prefix:
            state = int(trie.child(torch.tensor([[state]]), torch.tensor([[code]])))
        below = [n for n, r in enumerate(rows) if r[: len(prefix)] == list(prefix)]
        assert trie.items_S[state] == len(below)
        if len(prefix) < len(sizes):
            next_codes = {rows[n][len(prefix)] for n in below}
            children = trie.children(torch.tensor([[state]]))[0, 0]
            assert set((children >= 0).nonzero()[:, 0].tolist()) == next_codes
            for code in range(max(sizes)):
                one = trie.child(torch.tensor([[state]]), torch.tensor([[code]]))
                assert int(one) == int(children[code])
        else:
            expected = sorted(below, key=lambda n: (-popularity[n], n))
            found = trie.leaf_items_FR[state - trie.first_leaf].tolist()
            assert [item for item in found if item >= 0] == expected


@pytest.mark.parametrize("codes", ["steps", "heads"])
def test_a_trie_without_a_table_decodes_alike(codes, monkeypatch):
    ids, model = small_ids(distinct=False), small_model(list_length=6, codes=codes)
    histories, nobody = pad_left([[1, 2, 3], [7]], 5), pad_left([[2], []], 1)
    tries = [trie_of(ids)]
    monkeypatch.setattr("models.slide.trie.MOST_ENTRIES", 20)
    tries.append(trie_of(ids))
    assert [trie.child_NC is None for trie in tries] == [False, True]
    for decode in (
        lambda trie: greedy_list([model], trie, histories, 8, nobody),
        lambda trie: beam_search([model], trie, histories, 12, nobody),
    ):
        dense, sparse = map(decode, tries)
        assert torch.equal(dense.items_BK, sparse.items_BK)
        assert torch.equal(dense.scores_BK, sparse.scores_BK)


def test_histories_keep_the_newest():
    assert pad_left([[1, 2, 3], []], 2).tolist() == [[2, 3], [NOTHING, NOTHING]]
    assert pad_left([[1, 2, 3]], 0).shape == (1, 0)


@pytest.mark.parametrize(
    ("codes", "sizes", "message"),
    [
        ([[0, 1], [0, 2]], (1, 2), "item number 1 has code 2 at level 1, which has 2 codes"),
        ([[0, 1]], (1, 2, 3), "are no rows of 3 codes"),
    ],
)
def test_codes_that_do_not_fit_are_named(codes, sizes, message):
    with pytest.raises(ValueError, match=message):
        SemanticIds(np.array(codes), sizes, np.arange(len(codes)))


def test_ids_differ_if_codes_or_order_do():
    same = make_ids(np.array([[0], [0]]), (2,)).fingerprint
    assert make_ids(np.array([[0], [0]]), (2,)).fingerprint == same
    assert make_ids(np.array([[0], [1]]), (2,)).fingerprint != same
    assert make_ids(np.array([[0], [0]]), (3,)).fingerprint != same
    assert make_ids(np.array([[0], [0]]), (2,), np.array([0, 1])).fingerprint != same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 30}, "set model.hidden_size to a multiple of 8"),
        ({"dropout": 1.0}, "set model.dropout to 0 or more"),
        ({"codes": "step"}, "set model.codes=steps"),
        ({"list_length": -1}, "set model.list_length to 0 or more"),
    ],
)
def test_sizes_that_cannot_be_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        SlideConfig(**change)
