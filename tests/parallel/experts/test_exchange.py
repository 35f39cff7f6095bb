"""Rows to their experts and back, against plain indexing: ranks as threads, for many loads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.experts.exchange import ExpertRanks, announce, regroup, to_experts, to_rows
from tests.parallel.repacking.virtual import Meeting, together

M = 3


@st.composite
def loads(draw):
    """Visits of each rank's rows to each expert (P, E): most experts have few, some have none."""
    P, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    visits = st.lists(st.integers(0, 4), min_size=P * each, max_size=P * each)
    return torch.tensor(draw(st.lists(visits | st.just([0] * P * each), min_size=P, max_size=P)))


def rows_of(visits_PE):
    """Each rank's sorted rows, their weights, and where each expert's end; every number is another."""
    number, found = 0, []
    for visits_E in visits_PE:
        R = int(visits_E.sum())
        x = torch.arange(number, number + R * (M + 1)).double().view(R, M + 1)
        number += R * (M + 1)
        ends = visits_E.cumsum(0).int()
        found.append((x[:, :M].clone().requires_grad_(), x[:, M].clone().requires_grad_(), ends))
    return found


@settings(max_examples=60)
@given(loads())
def test_every_row_meets_its_expert_once_and_comes_back(visits_PE):
    P, E = visits_PE.shape
    meeting, leaves = Meeting(P), rows_of(visits_PE)

    def one(rank, given):
        x, weights, ends = given
        sizes = announce(ends, len(x), ExpertRanks(P, rank, meeting))
        there, beside = to_experts(x, weights, sizes)
        made = there * beside[:, None]  # each number tells its row and its weight
        back = to_rows(made, sizes)
        (from_back,) = torch.autograd.grad(back, made, x.detach(), retain_graph=True)
        grads = torch.autograd.grad((there, beside), (x, weights), (there * 2, beside * 3))
        return there.detach(), beside.detach(), sizes.ends_e, back.detach(), from_back, grads

    results = together(P, one, leaves)
    each = E // P
    for rank, (there, beside, ends, back, from_back, grads) in enumerate(results):
        rows, weights, until = [], [], []
        for expert in range(rank * each, (rank + 1) * each):  # of all ranks, in their order
            for x, w, end in leaves:
                begin = int(end[expert - 1]) if expert else 0
                rows.append(x[begin : end[expert]].detach())
                weights.append(w[begin : end[expert]].detach())
            until.append(sum(map(len, rows)))
        assert torch.equal(there, torch.cat(rows))
        assert torch.equal(beside, torch.cat(weights))
        assert ends.tolist() == until
        assert ends.dtype == torch.int32
        x, w, _ = (leaf.detach() for leaf in leaves[rank])
        assert torch.equal(back, x * w[:, None])
        assert torch.equal(from_back, there)  # the gradient took the rows' way
        assert torch.equal(grads[0], 2 * x)
        assert torch.equal(grads[1], 3 * w)


@given(loads())
def test_both_ways_to_sort_what_arrived_are_each_others_inverse(visits_Pe):
    num_rows = int(visits_Pe.sum())
    order, place = regroup(visits_Pe, num_rows)
    number = torch.arange(num_rows)
    assert torch.equal(order[place], number)
    experts = torch.arange(visits_Pe.shape[1]).expand_as(visits_Pe).flatten()
    arrived = experts.repeat_interleave(visits_Pe.flatten())
    assert torch.equal(arrived[order], arrived.sort().values)
    assert torch.equal(arrived.sort(stable=True).indices, order)


def test_on_meta_nothing_travels_and_all_bytes_are_counted():
    ranks = ExpertRanks(4)
    with torch.device("meta"):
        x, weights = torch.empty(10, 16, requires_grad=True), torch.empty(10, requires_grad=True)
        sizes = announce(torch.empty(8, dtype=torch.int32), 10, ranks)
    there, beside = to_experts(x, weights, sizes)
    to_rows(there * beside[:, None], sizes).sum().backward()
    assert there.shape == x.grad.shape == (10, 16)
    assert len(sizes.ends_e) == 2
    assert ranks.foreseen == 2 * 10 * (16 + 8 + 16) * 4 * 3 / 4
