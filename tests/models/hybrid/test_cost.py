import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.hybrid.attention import attend_reference, rule_of
from models.hybrid.cost import parameters_per_row, scored_pairs, seen_pairs, training_flops
from models.hybrid.documents import Documents
from models.hybrid.model import Hybrid, Rows
from models.hybrid.shape import KINDS
from tests.models.hybrid.cases import small_shape

LENGTHS = [(1,), (7, 0, 40), (16, 17), (4, 4, 5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("changes", [{}, {"top_k": 1, "window": 1}, {"block": 3}], ids=str)
def test_pairs_are_those_that_attention_lets_through(kind, lengths, changes):
    """By the gradient of a uniform softmax: each seen row gets a share of its own."""
    shape = small_shape(**changes)
    documents, T = Documents.of(lengths), sum(lengths)
    q, k = torch.randn(2, T, 1, 8, dtype=torch.float64)
    values = torch.eye(T, dtype=torch.float64)[:, None]  # as many numbers a row as there are rows
    out = attend_reference(q, k, values, documents, rule_of(shape, kind))
    assert seen_pairs(shape, kind, lengths) == (out > 0).sum()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_scored_pairs_are_all_earlier_blocks(lengths):
    shape = small_shape()
    rows = itertools.chain(*(range(L) for L in lengths))
    assert scored_pairs(shape, lengths) == sum(row // shape.block for row in rows)


def test_parameters_are_those_that_torch_multiplies_a_row_with():
    shape = small_shape()
    with torch.device("meta"):
        model, positions = Hybrid(shape), torch.zeros(12, dtype=torch.long)
        tokens = torch.zeros(12, dtype=torch.long)
    rows = Rows(positions, lambda q, k, v, rule: q)
    with FlopCounterMode(display=False) as counter:
        model(tokens, rows)
    assert counter.get_total_flops() == 2 * 12 * parameters_per_row(shape)


def test_training_counts_products_three_times_and_choices_once():
    shape = small_shape(kinds=("full", "block_topk"))
    lengths, width = (40, 3), 48
    pairs = sum(seen_pairs(shape, kind, lengths) for kind in shape.kinds)
    expected = 6 * 43 * parameters_per_row(shape) + 12 * width * pairs
    assert training_flops(shape, lengths) == expected + 2 * width * scored_pairs(shape, lengths)
