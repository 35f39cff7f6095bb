"""Every kind of attention against loops over rows, and gathered rows against the reference."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from models.hybrid import blocks
from models.hybrid.attention import Rule, attend, attend_reference, rule_of
from models.hybrid.blocks import chosen_blocks
from models.hybrid.documents import Documents
from models.hybrid.gathered import attend_gathered
from models.hybrid.long_documents import attend_causally
from models.hybrid.shape import KINDS
from tests.models.hybrid import plain_kernels
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
    assert documents.cut(4).cu_seq_lens.tolist() == [0, 4, 5, 9, 13, 14, 15]
    assert documents.cut(4).lengths == (4, 1, 4, 4, 1, 1)
    assert found.block_T.tolist() == [0] * 4 + [1] + [2] * 4 + [3] * 4 + [4, 5]
    assert found.first_T.tolist() == [0] * 5 + [2] * 9 + [5]


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    block=st.sampled_from([1, 3, 16, 50]),
    top_k=st.sampled_from([2, 3, 4, 10, 11]),
    heads=st.sampled_from([(2, 1), (3, 3), (6, 2)]),
)
@settings(max_examples=40)
def test_gathered_rows_see_what_the_mask_lets_them_see(lengths, block, top_k, heads):
    """With gradients, in fp64, through a stand-in for the kernels (`test_gpu.py` has these)."""
    assume(max(lengths) > block)
    H, K = heads
    *qkv, documents = drawn(tuple(lengths), H=H, K=K)
    rule = Rule("block_topk", 0.3, block=block, top_k=top_k)
    chosen = chosen_blocks(*qkv[:2], documents, block, top_k)[:, :, 1:]
    out = attend_gathered(*qkv, chosen, documents, block, 0.3, kernels=plain_kernels)
    expected = attend_reference(*qkv, documents, rule)
    grad = torch.randn_like(out)
    found = [(x, *torch.autograd.grad(x, qkv, grad)) for x in (out, expected)]
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(any))
@settings(max_examples=30)
def test_long_documents_apart_are_all_documents_together(lengths):
    """Lengths rounded up, runs of short ones in between, none of no rows."""
    q, k, v, documents = drawn(tuple(lengths))
    rule = Rule("full", 0.3)

    def packed(q, k, v, documents):
        assert documents.cu_seq_lens.tolist() == [0, *itertools.accumulate(documents.lengths)]
        assert max(documents.lengths) < 5
        return attend_reference(q, k, v, documents, rule)

    out = attend_causally(q, k, v, documents, 0.3, packed, long=5)
    expected = attend_reference(q, k, v, documents, rule)
    grad = torch.randn_like(out)
    found = [(x, *torch.autograd.grad(x, (q, k, v), grad)) for x in (out, expected)]
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


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
