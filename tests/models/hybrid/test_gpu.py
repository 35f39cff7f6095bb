"""The kernels of a GPU against the reference."""

import pytest
import torch

from models.experts import grouped_products, looped_products
from models.hybrid.attention import Rule, attend, attend_reference
from models.hybrid.blocks import block_mask, chosen_blocks
from models.hybrid.documents import Documents
from models.hybrid.model import whole
from tests.models.hybrid.cases import gradients, packed, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RULES = [
    Rule("full", 0.1),
    Rule("sliding_window", 0.1, window=100),
    Rule("block_topk", 0.1, block=64, top_k=3),
    Rule("block_topk", 0.1, block=160, top_k=2),
]


def drawn(lengths, H, K, D):
    torch.manual_seed(0)
    made = [torch.randn(sum(lengths), n, D, device="cuda") for n in (H, K, K)]
    return [x.bfloat16().requires_grad_() for x in made]


@pytest.mark.parametrize(("H", "K"), [(8, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("lengths", [(1000, 0, 3, 600), (128,), (2049,)], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_kernels_attend_like_the_reference(rule, lengths, H, K):
    """The reference gets the same numbers in fp32; blocks are chosen once, in bf16, where ties are."""
    q, k, v = drawn(lengths, H, K, 64)
    documents = Documents.of(lengths, "cuda")
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    if rule.kind == "block_topk":
        chosen = chosen_blocks(q, k, documents, rule.block, rule.top_k)
        masks = block_mask(chosen, documents, rule.block)
        parts = zip(*(x.split(lengths) for x in exact), masks, strict=True)
        expected = torch.cat([dense(*part, rule.scale) for part in parts])
    else:
        expected = attend_reference(*exact, documents, rule)
    out = attend(q, k, v, documents, rule)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(expected, exact, grad.float())
    for a, b in zip((out, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.03)


def dense(q_LHD, k_LKD, v_LKD, mask_HLL, scale):
    groups = q_LHD.shape[1] // k_LKD.shape[1]
    k_LHD, v_LHD = (x.repeat_interleave(groups, dim=1) for x in (k_LKD, v_LKD))
    scores = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scale
    weights = scores.masked_fill(~mask_HLL, float("-inf")).softmax(2)
    return torch.einsum("hqk,khd->qhd", weights, v_LHD)


def test_grouped_products_are_looped_ones():
    """Also with experts that nobody visits."""
    ends = torch.tensor([30, 30, 200, 200, 210], dtype=torch.int32, device="cuda")
    x, weight = torch.randn(210, 64, device="cuda"), torch.randn(5, 48, 64, device="cuda")
    grad, outs = torch.randn(210, 48, device="cuda").bfloat16(), []
    for function in (grouped_products, looped_products):
        a, b = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
        out = function(a, b, ends)
        outs.append((out, *torch.autograd.grad(out, (a, b), grad)))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("lengths", [(300, 7, 500), ()], ids=str)
def test_a_model_in_bf16_is_near_the_one_in_fp32_and_waits_for_nothing(lengths):
    sizes = {"hidden_size": 64, "head_dim": 32, "block": 32, "window": 50}
    tokens, documents = packed(lengths, device="cuda")
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(dtype=dtype, **sizes).cuda()
        out = model(tokens, whole(documents))  # compiles
        out.logits_TV.float().square().sum().backward()
        gradients(model)
        if dtype == torch.bfloat16:
            rows = whole(documents)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                out = model(tokens, rows)
                out.logits_TV.float().square().sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert all(grad.isfinite().all() for grad in gradients(model).values())
        outs.append(out.logits_TV.float())
    if lengths:
        error = (outs[0] - outs[1]).norm() / outs[0].norm()
        assert error < 0.1  # rows near a tie go to other experts and blocks
