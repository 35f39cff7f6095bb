"""The exchange against plain indexing: ranks as threads for many plans, gloo ranks for some."""

from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from parallel.repacking.exchange import Shards, to_heads, to_rows
from parallel.repacking.heads import HeadMap
from parallel.repacking.process_groups import aligned_blocks, make_groups
from parallel.repacking.sizes import site1_counts, site2_counts
from tests.parallel.repacking.test_layout import CHILDREN, layout_of
from tests.parallel.repacking.test_sizes import HEADS
from tests.parallel.repacking.virtual import Meeting, together
from tests.ranks import run_ranks
from tests.recorder import Recorder

D = 3


def whole_numbers(*shape, seed=0, dtype=torch.float64):
    """Sums of them are exact, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


def shards_of(layout, group):
    return [Shards(layout, rank, group) for rank in range(layout.width)]


def rows_of(layout, *wholes):
    """Each rank's rows of each tensor, as leaves."""
    cuts = layout.rows_per_rank.tolist()
    return [
        [part.clone().requires_grad_() for part in parts]
        for parts in zip(*(whole.split(cuts) for whole in wholes), strict=True)
    ]


@settings(max_examples=40)
@given(CHILDREN, HEADS)
def test_every_row_head_and_gradient_is_where_it_belongs(children, counts):
    layout, (H, K) = layout_of(children), counts
    P, T, heads = layout.width, layout.num_rows, HeadMap(H, K, layout.width)
    wholes = whole_numbers(T, H, D), whole_numbers(T, K, D, seed=1), whole_numbers(T, K, D, seed=2)
    grads = [
        [whole_numbers(T, n, D, seed=3 + rank) for n in (h, k, k)]
        for rank, (h, k) in enumerate(zip(heads.q_per_rank, heads.kv_per_rank, strict=True))
    ]
    grad_rows = whole_numbers(T, H, D, seed=99)

    def one(rank, shards, leaves, seed_grads, grad_out):
        arrived = to_heads(*leaves, shards)
        back = to_rows(arrived[0], H, shards)
        (from_rows,) = torch.autograd.grad(back, arrived[0], grad_out, retain_graph=True)
        found = torch.autograd.grad(arrived, leaves, seed_grads)
        return [part.detach() for part in arrived], back.detach(), from_rows, found

    results = together(
        P, one, shards_of(layout, Meeting(P)), rows_of(layout, *wholes), grads,
        grad_rows.split(layout.rows_per_rank.tolist()),
    )  # fmt: skip
    dense = [whole.clone().requires_grad_() for whole in wholes]
    total = 0.0
    for rank, (arrived, back, from_rows, _) in enumerate(results):
        ranges = heads.q_range(rank), heads.kv_range(rank), heads.kv_range(rank)
        for whole, (begin, end), got, seed in zip(dense, ranges, arrived, grads[rank], strict=True):
            assert torch.equal(got, whole[:, begin:end])
            total = total + (whole[:, begin:end] * seed).sum()
        low, high = layout.bounds[rank : rank + 2].tolist()
        assert torch.equal(back, wholes[0][low:high])
        assert torch.equal(from_rows, grad_rows[:, slice(*heads.q_range(rank))])
    expected = torch.autograd.grad(total, dense)
    for part, whole in enumerate(expected):
        assert torch.equal(torch.cat([found[part] for *_, found in results]), whole)


def attention_of_some(q_ThD, k_TkD, v_TkD, heads, rank):
    """Causal attention over all rows as one document, the plainest way."""
    kv = heads.kv_of_q(rank)
    k_ThD, v_ThD = k_TkD[:, kv], v_TkD[:, kv]
    scores = torch.einsum("thd,uhd->htu", q_ThD, k_ThD)
    past = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return torch.einsum("htu,uhd->thd", scores.masked_fill(~past, -torch.inf).softmax(-1), v_ThD)


@pytest.mark.parametrize(("children", "H", "K"), [
    ([(2, [3]), (1, [2])], 3, 1), ([(2, [1]), (2, [])], 4, 2), ([(4, [5])], 6, 4),
])  # fmt: skip
def test_gradients_of_attention_through_both_sites_are_exact(children, H, K):
    layout = layout_of(children)
    P, T, heads = layout.width, layout.num_rows, HeadMap(H, K, layout.width)

    def one(rank, shards, leaves):
        with torch.enable_grad():
            arrived = to_heads(*leaves, shards)
            return to_rows(attention_of_some(*arrived, heads, rank), H, shards)

    def back(rank, out, leaves, grad):
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    class AllRanks(torch.autograd.Function):
        @staticmethod
        def forward(context, q, k, v):
            context.leaves = rows_of(layout, q, k, v)
            context.out = together(P, one, shards_of(layout, Meeting(P)), context.leaves)
            return torch.cat([out.detach() for out in context.out])

        @staticmethod
        def backward(context, grad):
            found = together(
                P, back, context.out, context.leaves, grad.split(layout.rows_per_rank.tolist())
            )
            return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    torch.manual_seed(0)
    inputs = [torch.randn(T, n, 2, dtype=torch.float64, requires_grad=True) for n in (H, K, K)]
    assert torch.autograd.gradcheck(AllRanks.apply, inputs)
    # And the function is that of one process.
    alone = attention_of_some(*inputs, HeadMap(H, K, 1), 0)
    torch.testing.assert_close(AllRanks.apply(*inputs), alone, rtol=0, atol=1e-14)


def test_replicas_are_added_in_fp32_and_in_the_order_of_the_ranks():
    layout, P = layout_of([(8, [16])]), 8
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(16, n, D, generator=generator).bfloat16() for n in (8, 1, 1)]
    grads = [
        [torch.randn(16, 1, D, generator=generator).bfloat16() for _ in range(3)] for _ in range(P)
    ]

    def one(rank, shards, leaves, seeds):
        return torch.autograd.grad(to_heads(*leaves, shards), leaves, seeds)

    found = together(P, one, shards_of(layout, Meeting(P)), rows_of(layout, *wholes), grads)
    for part in (1, 2):
        total = torch.zeros(16, 1, D)
        for rank in range(P):
            total += grads[rank][part]
        assert torch.equal(torch.cat([parts[part] for parts in found]), total.bfloat16())
    for rank in range(P):  # queries are only placed, and a minus before a zero is no exception
        got = torch.cat([parts[0] for parts in found])[:, rank : rank + 1]
        assert torch.equal(got.view(torch.int16), grads[rank][0].view(torch.int16))


MIXES = [
    ([(1, [5])], 4, 2),
    ([(2, [7, 1, 4])], 4, 4),
    ([(1, [9]), (1, [2, 2])], 3, 1),  # heads that do not divide
    ([(2, []), (2, [1])], 6, 3),  # an empty child, and a sample shorter than its child
    ([(4, [2, 1])], 6, 1),  # one key/value head; empty ranks
    ([(2, [30, 3]), (1, [16]), (1, [])], 6, 2),
    ([(4, [100]), (2, [9, 4]), (1, [11]), (1, [2])], 12, 4),
    ([(8, [5])], 5, 5),  # fewer rows and heads than ranks
    ([(2, [8]), (2, [1, 1, 1]), (4, [40, 2])], 8, 1),
]
"""Children, and query and key/value heads; the widths add up to a power of two."""


def random_mix(seed, P):
    """Children that fill `P` ranks, some of them empty, and heads of all kinds."""
    random, children, left = Random(f"{seed}/{P}"), [], P
    while left:
        width = random.choice([c for c in (1, 2, 4, 8) if c <= left and (P - left) % c == 0])
        lengths = [random.choice([1, 2, 5, 30, 70]) for _ in range(random.randrange(4))]
        children.append((width, lengths))
        left -= width
    return children, *random.choice([(32, 4), (P, 2), (P + 3, 1), (6, 6), (40, 8)])


def check_exchanges(mixes, device="cpu"):
    """Every mix in every block of the world that is as wide: bits, gradients, calls and bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = make_groups(world, device)
    for children, H, K in mixes:
        layout, dtype = layout_of(children), torch.bfloat16
        P, T = layout.width, layout.num_rows
        if world < P:
            continue
        first = rank // P * P
        shards, heads = Shards(layout, rank - first, groups[first, P]), HeadMap(H, K, P)
        wholes = [
            whole_numbers(T, n, 8, seed=i, dtype=dtype).to(device) for i, n in enumerate((H, K, K))
        ]
        low, high = layout.bounds[rank - first : rank - first + 2].tolist()
        leaves = [whole[low:high].clone().requires_grad_() for whole in wholes]
        with Recorder() as forward:
            arrived = to_heads(*leaves, shards)
            back = to_rows(arrived[0] * 2, H, shards)
        ranges = [heads.q_range(rank - first), *[heads.kv_range(rank - first)] * 2]
        for got, whole, (begin, end) in zip(arrived, wholes, ranges, strict=True):
            assert torch.equal(got, whole[:, begin:end])
        assert torch.equal(back, 2 * wholes[0][low:high])
        with Recorder() as backward:
            (back.sum() + arrived[1].sum() + 3 * arrived[2].sum()).backward()
        copies = replicas(heads).to(device)
        assert (leaves[0].grad == 2).all()
        assert torch.equal(leaves[1].grad, copies[:, None].expand_as(leaves[1]).to(dtype))
        assert torch.equal(leaves[2].grad, 3 * copies[:, None].expand_as(leaves[2]).to(dtype))
        if P == 1:
            assert not forward.calls + backward.calls
            continue
        ranks, nbytes = tuple(range(first, first + P)), 8 * dtype.itemsize
        one, two = site1_counts(layout, heads) * nbytes, site2_counts(layout, heads) * nbytes
        mine = rank - first
        for log, tables in ((forward, (one, two)), (backward, (two.T, one.T))):
            assert [(call.name, call.ranks) for call in log.calls] == [
                ("alltoall_base_", ranks)
            ] * 2
            assert [call.sends for call in log.calls] == [
                tuple(table[mine].tolist()) for table in tables
            ]
    return len(groups)


def replicas(heads):
    """How many ranks use each key/value head."""
    ranges = [heads.kv_range(rank) for rank in range(heads.width)]
    return torch.tensor([sum(a <= kv < b for a, b in ranges) for kv in range(heads.num_kv)])


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gloo_ranks_exchange_bit_for_bit_what_the_plan_says(world):
    blocks = len(aligned_blocks(world, world)) + 1
    assert run_ranks(world, check_exchanges, MIXES) == [blocks] * world


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_exchange_bit_for_bit_what_the_plan_says(monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_TEST_DEVICE", "cuda")
    world = min(torch.cuda.device_count() // 2 * 2, 8)
    run_ranks(world, check_exchanges, MIXES, "cuda")


def test_blocks_are_aligned_and_made_once():
    assert aligned_blocks(8, 4) == [(0, 2), (2, 2), (4, 2), (6, 2), (0, 4), (4, 4)]
    assert len(aligned_blocks(64, 32)) == 62
    assert aligned_blocks(6, 4) == [(0, 2), (2, 2), (4, 2), (0, 4)]


def test_tensors_that_do_not_belong_together_are_refused():
    shards = Shards(layout_of([(2, [4])]), 0)
    x = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match="the rank has 2 rows"):
        to_heads(x, x[:1], x, shards)
    with pytest.raises(ValueError, match="cannot travel together"):
        to_heads(x, x.double(), x, shards)
