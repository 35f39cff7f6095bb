"""Every kind of attention against loops over rows, and the kernel's mask against the reference's."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.hybrid import blocks
from models.hybrid.attention import Rule, attend, attend_reference, rule_of
from models.hybrid.blocks import TILE, attend_blocks, block_mask, chosen_blocks, flex_mask
from models.hybrid.documents import Documents
from models.hybrid.shape import KINDS
from tests.models.hybrid.cases import MIXES, small_shape

RULES = {kind: rule_of(small_shape(), kind) for kind in KINDS}


def drawn(lengths, H=6, K=2, D=8, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    made = [torch.randn(T, n, D, generator=generator, dtype=torch.float64) for n in (H, K, K)]
    q, k, v = (x.to(device, dtype).requires_grad_() for x in made)
    return q, k, v, Documents.of(lengths, device)


def seen_by(position, keys, query, rule):
    """Places in the document that a row sees; `keys` are those of its head, in order."""
    earlier = range(position + 1)
    if rule.kind == "full":
        return list(earlier)
    if rule.kind == "sliding_window":
        return [place for place in earlier if position - place < rule.window]
    own = position // rule.block
    scores = {
        n: (query @ keys[n * rule.block : (n + 1) * rule.block].mean(0)).item() for n in range(own)
    }
    best = sorted(scores, key=scores.get, reverse=True)[: rule.top_k - 1]
    return [place for place in earlier if place // rule.block in (own, *best)]


def by_loops(q, k, v, documents, rule):
    out = torch.zeros_like(q)
    offsets = [0, *itertools.accumulate(documents.lengths)]
    groups = q.shape[1] // k.shape[1]
    for begin, end in itertools.pairwise(offsets):
        for row, head in itertools.product(range(begin, end), range(q.shape[1])):
            keys, values = (x[begin:end, head // groups] for x in (k, v))
            places = seen_by(row - begin, keys, q[row, head], rule)
            weights = (keys[places] @ q[row, head] * rule.scale).softmax(0)
            out = out.index_put((torch.tensor(row), torch.tensor(head)), weights @ values[places])
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(13, 1, 20), (3, 0, 9)], ids=str)
def test_every_kind_is_what_loops_over_rows_give(kind, lengths):
    q, k, v, documents = drawn(lengths)
    grad = torch.randn_like(q)
    outs = []
    for function in (attend, by_loops):
        out = function(q, k, v, documents, RULES[kind])
        outs.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_can_be_attended_to_apart(kind):
    """As ranks do that share the heads of a layer: also one query head without its neighbours."""
    q, k, v, documents = drawn((21, 5, 40))
    whole = attend(q, k, v, documents, RULES[kind])
    for heads, kv in (([0, 1], [0]), ([2], [0]), ([3, 4, 5], [1])):
        part = attend(q[:, heads], k[:, kv], v[:, kv], documents, RULES[kind])
        torch.testing.assert_close(part, whole[:, heads], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("T", "H", "K"), [(0, 6, 2), (5, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_or_no_heads_attend_to_nothing_and_stay_connected(kind, T, H, K):
    q, k, v, documents = drawn((T,) if T else (), H, K)
    out = attend(q, k, v, documents, RULES[kind])
    assert out.shape == (T, H, 8)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad is not None


def test_a_sum_of_blocks_is_gathered_and_chunks_of_rows_change_nothing(monkeypatch):
    q, k, _, documents = drawn((150, 3, 200, 1))
    whole = chosen_blocks(q, k, documents, 4, 3)
    monkeypatch.setattr(blocks, "SCORES", 1)  # 128 rows at a time
    assert torch.equal(chosen_blocks(q, k, documents, 4, 3), whole)
    own = documents.blocks(4).block_T
    assert torch.equal(whole[:, :, 0], own.expand(6, -1))
    assert (whole[:, :, 1:] < own[:, None]).all()
    first = documents.blocks(4).first_T
    assert ((whole == -1) | (whole >= first[:, None])).all()
    possible = (own - first).clamp(max=2) + 1
    assert torch.equal((whole >= 0).sum(2), possible.expand(6, -1))


def test_documents_say_where_rows_are():
    documents = Documents.of((5, 0, 9, 1))
    assert documents.positions().tolist() == [*range(5), *range(9), 0]
    found = documents.blocks(4)
    assert found.begin_N.tolist() == [0, 4, 5, 9, 13, 14]
    assert found.end_N.tolist() == [4, 5, 9, 13, 14, 15]
    assert found.block_T.tolist() == [0] * 4 + [1] + [2] * 4 + [3] * 4 + [4, 5]
    assert found.first_T.tolist() == [0] * 5 + [2] * 9 + [5]


def dense(mask, T):
    """What a `BlockMask` lets through: where its tiles are and its function says yes."""
    q, k = torch.arange(T)[:, None], torch.arange(T)
    H, tiles = mask.kv_num_blocks.shape[1:]
    there = torch.zeros(H, tiles, tiles, dtype=torch.bool)
    for h, tile in itertools.product(range(H), range(tiles)):
        number = mask.kv_num_blocks[0, h, tile]
        there[h, tile, mask.kv_indices[0, h, tile, :number].long()] = True
    allowed = torch.stack([mask.mask_mod(torch.tensor(0), torch.tensor(h), q, k) for h in range(H)])
    return allowed & there[:, q // TILE, k // TILE], allowed


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4).filter(sum),
    block=st.sampled_from([1, 3, 16, 50, 130]),
    top_k=st.integers(1, 4),
)
@settings(max_examples=25)
def test_the_kernels_mask_is_the_references(lengths, block, top_k):
    q, k, _, documents = drawn(tuple(lengths), H=2, K=1, D=2)
    chosen = chosen_blocks(q, k, documents, block, top_k)
    masks = block_mask(chosen, documents, block)
    T = documents.num_rows
    expected = torch.stack([torch.block_diag(*(m[h] for m in masks)) for h in range(2)]).bool()
    reached, allowed = dense(flex_mask(chosen, documents, block), T)
    assert torch.equal(allowed, expected)
    assert torch.equal(reached, expected)  # no tile is missing


def test_the_bit_sets_reach_beyond_one_word():
    q, k, _, documents = drawn((3, 150), H=2, K=1, D=2)
    chosen = chosen_blocks(q, k, documents, 2, 60)  # 75 blocks: bits 31, 32, 63, 64 among them
    masks = block_mask(chosen, documents, 2)
    _, allowed = dense(flex_mask(chosen, documents, 2), 153)
    assert torch.equal(allowed[:, 3:, 3:], masks[1])


@torch.no_grad()
def test_flex_attention_with_that_mask_is_the_reference():
    """Forwards, as it runs on a CPU; `test_gpu.py` has the kernel."""
    q, k, v, documents = (
        x.detach() if isinstance(x, torch.Tensor) else x
        for x in drawn((150, 0, 40), dtype=torch.float32)
    )
    expected = attend_reference(q, k, v, documents, Rule("block_topk", 0.3, block=16, top_k=3))
    torch.testing.assert_close(attend_blocks(q, k, v, documents, 16, 3, 0.3), expected)


@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_where_all_blocks_are_chosen_attention_is_full(lengths):
    q, k, v, documents = drawn(lengths)
    full = attend(q, k, v, documents, Rule("full", 0.3))
    for rule in (
        Rule("block_topk", 0.3, block=4, top_k=16),
        Rule("block_topk", 0.3, block=100, top_k=1),
        Rule("sliding_window", 0.3, window=64),
    ):
        torch.testing.assert_close(attend(q, k, v, documents, rule), full, rtol=0, atol=1e-12)
