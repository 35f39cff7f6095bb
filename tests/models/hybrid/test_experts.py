"""The mixture of experts against a loop over rows, and its statistics."""

import pytest
import torch

from models.balance import balance_loss
from models.experts import grouped_products, looped_products, products
from models.hybrid.experts import Experts, MixtureOfExperts
from tests.models.hybrid.cases import small_model, small_shape


def mixture(**changes):
    return small_model(**changes).model.layers[1].mlp


def by_loops(moe, x, shape):
    """One row and one expert after the other, with autograd's own indexing."""
    outs = []
    for row in x:
        logits = moe.router.gate.weight @ row
        scores = logits.sigmoid() if shape.router == "sigmoid" else logits.softmax(0)
        ranked = sorted(range(shape.num_experts), key=lambda e: -(scores + moe.expert_bias)[e])
        best = ranked[: shape.active_experts]
        out = moe.shared_experts(row)
        for expert in best:
            gate, up = (moe.experts.gate_up_proj[expert] @ row).chunk(2)
            made = moe.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            weight = shape.route_scale * scores[expert] / sum(scores[e] for e in best)
            out = out + weight * made
        outs.append(out)
    return torch.stack(outs)


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_a_mixture_is_what_loops_over_rows_give(router):
    shape = small_shape(router=router, route_scale=2.5, active_experts=3)
    moe = mixture(router=router, route_scale=2.5, active_experts=3)
    x = torch.randn(17, 32, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    outs = []
    for function in (lambda: moe(x)[0], lambda: by_loops(moe, x, shape)):
        out = function()
        outs.append((out, *torch.autograd.grad(out, (x, *moe.parameters()), grad)))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_the_bias_chooses_experts_and_does_not_weigh_them():
    moe = mixture()
    x = torch.randn(9, 32, dtype=torch.float64)
    moe.expert_bias.zero_()
    _, weights, _ = moe.router(x, moe.expert_bias)
    moe.expert_bias[5] = 10.0
    experts, biased, _ = moe.router(x, moe.expert_bias)
    assert (experts == 5).sum() == 9
    torch.testing.assert_close(biased.sum(1), weights.sum(1))  # 1: normalized without the bias
    assert biased.max() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_are_looped_ones(dtype):
    """Also with experts that nobody visits."""
    ends = torch.tensor([3, 3, 20, 20, 21], dtype=torch.int32)
    x, weight = torch.randn(21, 16), torch.randn(5, 8, 16)
    grad = torch.randn(21, 8).to(dtype)
    outs = []
    for function in (grouped_products, looped_products):
        a, b = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        out = function(a, b, ends)
        outs.append((out, *torch.autograd.grad(out, (a, b), grad)))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected)


def test_products_on_meta_have_the_shapes_and_the_count_of_the_real_ones():
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        experts = Experts(small_shape())
        x, ends = torch.empty(21, 32), torch.empty(8, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        out = products(x, experts.gate_up_proj, ends)
    assert out.shape == (21, 32)
    assert counter.get_total_flops() == 2 * 21 * 32 * 32


def test_statistics_are_sums_over_rows():
    moe = mixture()
    x = torch.randn(30, 32, dtype=torch.float64)
    whole = moe(x)[1]
    parts = [moe(part)[1] for part in x.split([11, 0, 19])]
    torch.testing.assert_close(sum(p.visits_E for p in parts), whole.visits_E)
    torch.testing.assert_close(sum(p.chances_E for p in parts), whole.chances_E)
    assert whole.visits_E.sum() == 60
    assert whole.chances_E.sum().item() == pytest.approx(30)


def test_the_balance_loss_does_not_depend_on_where_rows_are():
    """Value and gradient, against the formula over all rows at once."""
    moe = mixture()
    x = torch.randn(30, 32, dtype=torch.float64)
    weight = moe.router.gate.weight
    experts, _, chances = moe.router(x, moe.expert_bias)
    share = torch.bincount(experts.flatten(), minlength=8) / 60
    expected = 8 * (share * chances.mean(0)).sum()
    (wanted,) = torch.autograd.grad(expected, weight)
    for sizes in ([30], [1, 0, 29], [10, 10, 10]):
        found = [moe(part)[1] for part in x.split(sizes)]
        visits = sum(p.visits_E for p in found)[None]
        loss = sum(balance_loss(p.chances_E[None], visits, 30) for p in found)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], wanted)


def test_the_balance_loss_is_1_at_best_and_e_at_worst():
    even = torch.full((3, 8), 10.0)
    assert balance_loss(even, even.long(), 80).item() == pytest.approx(1)
    one = torch.zeros(3, 8)
    one[:, 2] = 80
    assert balance_loss(one, one.long(), 80).item() == pytest.approx(8)
    assert balance_loss(torch.zeros(0, 8), torch.zeros(0, 8).long(), 80) == 0


def test_dense_layers_come_first():
    kinds = [isinstance(layer.mlp, MixtureOfExperts) for layer in small_model().model.layers]
    assert kinds == [False, True, True, True]
