"""What a pass on the meta device keeps and computes, against counting by hand."""

import pytest
import torch
from torch import nn

from trainer.dry_run.probe import probe

B, D, F = 64, 256, 1024  # samples, width, inner width


def network(depth, checkpointed=False):
    from parallel.recompute import recompute

    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Linear(D, F, bias=False), nn.ReLU(), nn.Linear(F, D, bias=False))
            for _ in range(depth)
        ]
    for block in blocks:
        recompute(block, "block" if checkpointed else "none")
    return nn.ModuleList(blocks)


def watch(blocks):
    groups = [list(block.parameters()) for block in blocks]
    x_BD = torch.empty(B, D, device="meta")

    def loss():
        h_BD = x_BD
        for block in blocks:
            h_BD = block(h_BD)
        return h_BD.sum()

    return probe(blocks, groups, loss)


def test_what_the_backward_pass_needs_is_what_is_alive_before_it():
    """Each block keeps its ReLU's result, and but for the first (whose input is not ours) its input."""
    found = watch(network(3))
    inner, outer, scalar = B * F * 4, B * D * 4, 512
    # A linear layer's own result is kept as the next one's input; the ReLU is not in place.
    assert found.loss_activations == 3 * inner + 2 * outer + scalar


def test_recomputed_blocks_keep_their_inputs_only():
    found = watch(network(3, checkpointed=True))
    assert found.loss_activations == pytest.approx(2 * B * D * 4 + 512, abs=4096)
    plain = watch(network(3))
    assert max(m.activations for m in found.moments) < max(m.activations for m in plain.moments)
    assert found.matmul_flops[1] == pytest.approx(plain.matmul_flops[1] * 1.5, rel=0.2)


def test_norms_keep_what_a_gpus_kernel_keeps():
    """Input, and a number a row; in steps, each would keep several times its input in fp32."""
    with torch.device("meta"):
        norms = nn.ModuleList([nn.RMSNorm(D, dtype=torch.bfloat16) for _ in range(3)])
    x_BD = torch.empty(B, D, device="meta", dtype=torch.bfloat16)

    def loss():
        h_BD = x_BD
        for norm in norms:
            h_BD = norm(h_BD)
        return h_BD.sum()

    found = probe(norms, [list(norm.parameters()) for norm in norms], loss)
    row, scalar = max(B * 4, 512), 512
    assert found.loss_activations == 2 * B * D * 2 + 3 * row + scalar


def test_products_are_counted_and_each_group_is_a_moment():
    found = watch(network(3))
    assert found.matmul_flops[0] == 3 * 2 * 2 * B * D * F
    # The first layer's input has no gradient: five products of six twice, one once.
    assert found.matmul_flops[1] == (5 * 2 + 1) * 2 * B * D * F
    assert [m.reduced for m in found.moments] == [n * 2 * D * F for n in range(4)]
    assert found.moved[0] > 0


def test_frozen_parameters_have_no_gradients_to_wait_for():
    blocks = network(2)
    blocks[0].requires_grad_(False)
    found = watch(blocks)
    assert [m.reduced for m in found.moments] == [0, 2 * D * F]


def test_a_model_that_looks_at_values_cannot_be_followed():
    with torch.device("meta"):
        layer = nn.Linear(D, D)
    with pytest.raises((NotImplementedError, RuntimeError)):
        probe(
            layer,
            [list(layer.parameters())],
            lambda: layer(torch.empty(1, D, device="meta")).nonzero().sum(),
        )
