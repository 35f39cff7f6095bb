from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.text.config import LONG_DOCUMENTS, PACKING
from recipes.text.packing import IGNORED, Sequences, best_fit, collate
from recipes.text.store import TokenFile

END = 999


def token_file(lengths):
    """Documents of `lengths` tokens and one that closes them; every token is its own place."""
    starts = np.cumsum([0, *(n + 1 for n in lengths)])
    return TokenFile(np.arange(starts[-1]), starts, sum(lengths))


lengths_of_documents = st.lists(st.integers(1, 30), min_size=1, max_size=12)
seeds = st.one_of(st.none(), st.integers(0, 5))


@given(
    lengths_of_documents,
    st.integers(2, 17),
    seeds,
    st.sampled_from(PACKING),
    st.sampled_from(LONG_DOCUMENTS),
    st.data(),
)
def test_every_token_once_every_label_right_and_boundaries_kept(
    lengths, S, seed, packing, long_documents, data
):
    part = token_file(lengths)
    if data.draw(st.booleans(), label="masked"):
        flags = st.lists(st.booleans(), min_size=len(part.tokens), max_size=len(part.tokens))
        part = replace(part, learnt=np.array(data.draw(flags), dtype=bool))
    made = Sequences(part, S, END, seed, packing, long_documents)
    kept, longer = expected_tokens(part, S, long_documents)
    assert made.longer == longer
    seen = []
    for index in range(len(made)):
        sequence = made[index]
        assert len(sequence.tokens_S) <= S
        assert packing == "none" or len(sequence.tokens_S) == S
        used = len(sequence.tokens_S) - sequence.padding
        assert (sequence.labels_S[used:] == IGNORED).all()
        bounds = [*[start for start in sequence.pieces if start < used], used]
        assert sequence.pieces == bounds[: -1 if not sequence.padding else None]
        assert sequence.positions_S[used:].tolist() == list(range(sequence.padding))
        for begin, end in pairwise(bounds):
            assert sequence.positions_S[begin:end].tolist() == list(range(end - begin))
            places = [place_of(token) for token in sequence.tokens_S[begin:end]]
            # A piece is neighbouring tokens of one document.
            assert [p - places[0] for p in places] == list(range(len(places)))
            document = int(np.searchsorted(part.starts, places[0], side="right")) - 1
            assert places[-1] < part.starts[document + 1]
            limit = part.starts[document + 1]
            if long_documents == "truncate":
                limit = min(limit, part.starts[document] + S)
            for at, place in enumerate(places, start=begin):
                following = place + 1
                learnt = following < limit and (part.learnt is None or part.learnt[following])
                assert sequence.labels_S[at] == (part.tokens[following] if learnt else IGNORED)
            seen += places
    assert sorted(seen) == kept
    counted = [int((made[i].labels_S != IGNORED).sum()) for i in range(len(made))]
    assert made.labels().tolist() == counted
    if packing == "stream":
        assert len(made) == -(-len(kept) // S)


def place_of(token):
    """Tokens are numbered through, so a token says where it is."""
    return int(token)


def expected_tokens(part, S, long_documents):
    kept, longer = [], 0
    for first, last in pairwise(part.starts.tolist()):
        longer += last - first > S
        if last - first > S and long_documents == "drop":
            continue
        cut = first + S if long_documents == "truncate" else last
        kept += range(first, min(cut, last))
    return kept, longer


@given(st.lists(st.integers(1, 12), max_size=40))
def test_best_fit_groups_everything_and_needs_few_groups(sizes):
    groups = best_fit(np.array(sizes, dtype=np.int64), 12)
    assert sorted(item for group in groups for item in group) == list(range(len(sizes)))
    rooms = [12 - sum(sizes[item] for item in group) for group in groups]
    assert all(room >= 0 for room in rooms)
    # Best fit leaves no group that would fit into another one's room.
    totals = [12 - room for room in rooms]
    for a, total in enumerate(totals):
        assert all(total > room for b, room in enumerate(rooms) if b < a)


def test_the_seed_decides_the_order_of_documents():
    part = token_file([5] * 20)
    for packing in ("stream", "whole"):
        orders = [
            Sequences(part, 8, END, seed, packing).layout.first_P.tolist() for seed in (1, 1, 2)
        ]
        assert orders[0] == orders[1] != orders[2]
    made = Sequences(part, 6, END, None)
    assert np.concatenate([made[i].tokens_S for i in range(20)]).tolist() == list(range(120))


def test_the_fingerprint_is_of_tokens_and_layout_only():
    part = replace(token_file([5] * 20), digest="x")
    same = [Sequences(part, 8, END, 1).fingerprint(), Sequences(part, 8, END, 1).fingerprint()]
    others = [
        Sequences(part, 9, END, 1), Sequences(part, 8, END, 2), Sequences(part, 8, END, 1, "whole"),
        Sequences(part, 8, END, 1, "stream", "drop"), Sequences(replace(part, digest="y"), 8, END, 1),
    ]  # fmt: skip
    assert same[0] == same[1]
    assert len({same[0], *[other.fingerprint() for other in others]}) == 6


def test_shorter_sequences_are_padded_to_the_longest_of_the_batch():
    made = Sequences(token_file([3, 6, 2]), 10, END, None, "none")
    batch = collate([made[0], made[1], made[2]], END)
    assert batch["tokens_BS"].shape == (3, 7)
    assert batch["cu_seq_lens"].tolist() == [0, 4, 7, 14, 17, 21]
    assert batch["positions_BS"][0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch["labels_BS"][0].tolist() == [1, 2, 3, *[IGNORED] * 4]
    assert (batch["padding"], batch["count"]) == (7, 11)
    assert batch["pairs"] == 10 + 28 + 6  # padding is no work


def test_a_batch_bounds_its_pieces_and_counts():
    packed = Sequences(token_file([3, 6, 2]), 7, END, None)
    batch = collate([packed[0], packed[1]], END)
    assert batch["tokens_BS"].shape == (2, 7)
    assert batch["cu_seq_lens"].tolist() == [0, 4, 7, 11, 14]
    assert batch["max_length"] == 4
    assert batch["count"] == int((batch["labels_BS"] != IGNORED).sum()) == 11
    assert batch["pairs"] == 10 + 6 + 10 + 6
