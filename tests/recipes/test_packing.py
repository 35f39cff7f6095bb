import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.text.packing import IGNORED, Sequences, collate
from recipes.text.store import TokenFile

END = 999


def token_file(lengths):
    documents = [np.arange(n) + 10 * d for d, n in enumerate(lengths)]
    flat = [np.append(d, END) for d in documents]
    tokens = np.concatenate(flat) if flat else np.empty(0, dtype=np.int64)
    return TokenFile(tokens, np.cumsum([0, *(len(f) for f in flat)]), sum(lengths))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(2, 17),
    st.one_of(st.none(), st.integers(0, 5)),
)
def test_every_token_once_every_label_right_and_boundaries_kept(lengths, S, seed):
    part = token_file(lengths)
    packed = Sequences(part, S, END, seed)
    assert len(packed) == -(-(sum(lengths) + len(lengths)) // S)
    seen = []
    for index in range(len(packed)):
        sequence = packed[index]
        bounds = [*sequence.pieces, S]
        assert bounds[0] == 0
        for begin, end in zip(bounds, bounds[1:], strict=False):
            assert sequence.positions_S[begin:end].tolist() == list(range(end - begin))
            tokens = sequence.tokens_S[begin:end]
            # Only a piece's last token may be an end, but for the filling.
            filling = (sequence.labels_S[begin:end] == IGNORED).all() and (tokens == END).all()
            assert filling or END not in tokens[:-1]
            for at in range(begin, end - 1):
                if not filling:
                    assert sequence.labels_S[at] == sequence.tokens_S[at + 1]
            if tokens[-1] == END:
                assert sequence.labels_S[end - 1] == IGNORED
        seen.append(sequence.tokens_S)
    stream = np.concatenate(seen)[: len(part.tokens)]
    order = (
        np.random.default_rng(seed).permutation(len(lengths))
        if seed is not None
        else np.arange(len(lengths))
    )
    expected = np.concatenate([part.tokens[part.starts[d] : part.starts[d + 1]] for d in order])
    assert (stream == expected).all()
    labels = sum((packed[i].labels_S != IGNORED).sum() for i in range(len(packed)))
    assert labels == len(part.tokens) - len(lengths)  # all but the first token of each document


def test_the_seed_decides_the_order_of_documents():
    part = token_file([5] * 20)
    orders = [Sequences(part, 8, END, seed).order.tolist() for seed in (1, 1, 2, None)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == list(range(20))


def test_a_batch_bounds_its_pieces_and_counts():
    packed = Sequences(token_file([3, 6, 2]), 7, END, None)
    batch = collate([packed[0], packed[1]], END)
    assert batch["tokens_BS"].shape == (2, 7)
    assert batch["cu_seq_lens"].tolist() == [0, 4, 7, 11, 14]
    assert batch["max_length"] == 4
    assert batch["count"] == int((batch["labels_BS"] != IGNORED).sum()) == 11
    assert batch["pairs"] == 10 + 6 + 10 + 6
