"""Layers against their published definitions, item by item, in plain loops."""

import pytest
import torch
from torch.nn.functional import layer_norm, leaky_relu, silu

from models.trip.attention import Visibility
from models.trip.biases import HstuBias
from models.trip.config import TripConfig
from models.trip.layers import token_layer
from models.trip.model import init_weights

B, N, D, H = 2, 5, 8, 2
E = D // H


def make(**changes):
    config = TripConfig(
        hidden_size=D, num_heads=H, max_history=N, dropout=0.0, summaries=0, keys=["tokens"],
        reconstruction=0.0, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = token_layer(config).double()
    for module in layer.modules():
        if any(True for _ in module.parameters(recurse=False)):
            init_weights(module)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


@pytest.fixture
def x():
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1)).double()


def causal():
    order = torch.arange(N - 1, -1, -1).expand(B, N)
    ages = torch.tensor([[900, 500, 500, 20, 3], [10**6, 10**5, 70, 60, 50]])
    valid = torch.ones(B, N, dtype=torch.bool)
    valid[1, 0] = False
    return Visibility(order, valid, torch.zeros_like(order), ages)


def attended(q, k, v, weights):
    """For each history and head: `weights` of a query's scores over the keys that it sees."""
    sees, out = causal(), torch.zeros(B, N, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            part = slice(h * E, (h + 1) * E)
            for i in range(N):
                seen = [j for j in range(N) if (j <= i and sees.valid_BN[b, j]) or i == j]
                scores = torch.stack([q[b, i, part] @ k[b, j, part] for j in seen])
                w = weights(b, i, seen, scores)
                out[b, i, part] = sum(w[n] * v[b, j, part] for n, j in enumerate(seen))
    return out


def shares(b, i, seen, scores):
    return (scores / E**0.5).softmax(0)


def test_bst_normalizes_after_each_sum(x):
    """S' = LN(S + MH(S)), F = LN(S' + LeakyReLU(S' W1 + b1) W2 + b2): Chen et al. 2019, 2.2."""
    layer = make(layer="bst")
    q, k, v = (x @ layer.qkv.weight.T).split(D, dim=2)
    seen = attended(q, k, v, shares) @ layer.out.weight.T
    middle = layer.attention_norm(x + seen)
    hidden = leaky_relu(middle @ layer.up.weight.T + layer.up.bias)
    expected = layer.mlp_norm(middle + hidden @ layer.down.weight.T + layer.down.bias)
    torch.testing.assert_close(layer(x, causal()), expected)


def test_the_standard_layer_normalizes_first(x):
    layer = make()
    q, k, v = layer.qkv(layer.attention_norm(x)).split(D, dim=2)
    middle = x + layer.out(attended(q, k, v, shares))
    hidden = torch.nn.functional.gelu(layer.up(layer.mlp_norm(middle)))
    torch.testing.assert_close(layer(x, causal()), middle + layer.down(hidden))


@pytest.mark.parametrize("relative", ["none", "hstu"])
def test_hstu_gates_what_silu_attention_finds(x, relative):
    """U V Q K = SiLU(f1 X); A V = SiLU(Q K' + rab) V / N; Y = f2(LN(A V) * U): Zhai et al. 2024, 3."""
    layer = make(layer="hstu", relative=relative)
    q, k, v, u = silu(layer_norm(x, (D,), eps=1e-6) @ layer.qkvu.weight.T).split(D, dim=2)

    def weights(b, i, seen, scores):
        if relative == "hstu":
            (bias,) = layer.attention.biases
            assert isinstance(bias, HstuBias)
            index = [torch.tensor(x) for x in (b, 0, i)]
            scores = scores + torch.stack([bias(causal())(*index, torch.tensor(j)) for j in seen])
        return silu(scores) / N

    found = layer_norm(attended(q, k, v, weights), (D,), eps=1e-6)
    expected = x + (found * u) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x, causal()), expected)
