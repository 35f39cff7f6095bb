"""What the parts of a hybrid model take on the device at hand: its own modules, forward and backward.

Each has a size large enough for the device's full rate. A layer's costs that do not depend on its rows
are measured with a few and taken off, since the cost model adds them to every layer.

Legend: R rows, M hidden size, H query heads, K key/value heads, D head dim, L rows of a document.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.causal_lm import next_token_loss
from models.hybrid.attention import Rule, attend
from models.hybrid.blocks import chosen_blocks
from models.hybrid.documents import Documents
from models.hybrid.experts import MixtureOfExperts, Mlp
from models.hybrid.model import Layer, Rows, init_weights, rotations
from models.hybrid.shape import BLOCK_TOPK, FULL, SLIDING_WINDOW, Shape, pattern
from parallel.repacking.shape import BACKWARD, ModelShape

FEW = 16
"""Rows of a layer whose time is what layers take anyway."""
EXPERTS = 64
"""Of layers whose description has only those that a row visits."""


class Bench(Protocol):
    """Times on one device."""

    device: torch.device
    dtype: torch.dtype

    def seconds(self, what: str, action: Callable[[], Any], **about: Any) -> float:
        """The median time of `action`."""
        ...

    def randn(self, *shape: int) -> Tensor:
        """A random leaf that wants a gradient."""
        ...


def shape_of(shape: ModelShape, smaller: int = 1) -> Shape:
    """A model like the one described; hidden sizes and heads divided by `smaller`."""
    every = shape.layers // max(shape.full_layers, 1)
    return Shape(
        kinds=pattern(shape.layers, every, BLOCK_TOPK), hidden_size=shape.hidden // smaller,
        intermediate_size=max(shape.dense_hidden // smaller, 8),
        num_heads=max(shape.q_heads // smaller, 1), num_kv_heads=max(shape.kv_heads // smaller, 1),
        head_dim=shape.head_dim, vocab_size=max(shape.vocab // smaller, 2), window=shape.window,
        block=shape.block, top_k=shape.top_k, dense_layers=shape.dense_layers,
        num_experts=EXPERTS // smaller, active_experts=max(shape.experts_per_token // smaller - 1, 1),
        expert_size=max(shape.expert_hidden // smaller // 8 * 8, 8),
    )  # fmt: skip


def train(output: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Forward and backward, with gradients of all inputs."""

    def step() -> None:
        out = output()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def made(module: nn.Module, device: torch.device, dtype: torch.dtype, std: float) -> nn.Module:
    """A module on meta, initialised on the device, in the type of the passes; buffers stay in fp32."""
    module.to_empty(device=device)
    for part in module.modules():
        init_weights(part, std)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def sparse_attention(bench: Bench, shape: Shape, H: int, L: int) -> dict[str, float]:
    """Rates of a sliding window, of chosen blocks, and of choosing them; `H` heads, one document."""
    K, D = max(H * shape.num_kv_heads // shape.num_heads, 1), shape.head_dim
    q, k, v = bench.randn(L, H, D), bench.randn(L, K, D), bench.randn(L, K, D)
    documents, scale = Documents.of((L,), bench.device), D**-0.5
    rules = {
        "window": Rule(SLIDING_WINDOW, scale, window=shape.window),
        "topk": Rule(BLOCK_TOPK, scale, block=shape.block, top_k=shape.top_k),
    }

    def choose() -> Tensor:
        return chosen_blocks(q, k, documents, shape.block, shape.top_k)

    choosing = bench.seconds("choice of blocks", choose, length=L, heads=H)
    rates = {"topk_scores_flops": 2 * H * D * L * (L + 1) / 2 / shape.block / choosing}
    for kind, rule in rules.items():
        span = rule.window or rule.block * rule.top_k
        pairs = span * (span + 1) / 2 + (L - span) * span
        action = train(lambda rule=rule: attend(q, k, v, documents, rule), q, k, v)  # type: ignore[misc]
        seconds = bench.seconds(f"{kind} attention", action, length=L, heads=H, span=span)
        if kind == "topk":
            seconds = max(seconds - choosing, seconds / 10)
        rates[f"{kind}_attention_flops"] = BACKWARD * 4 * H * D * pairs / seconds
    return rates


def row_by_row(bench: Bench, shape: Shape, described: ModelShape, R: int) -> dict[str, float]:
    """Rates of everything that looks at one row at a time, and what a layer takes anyway."""
    build = {
        "layer": lambda: Layer(shape, FULL, experts=False),
        "layer of few rows": lambda: Layer(shape, FULL, experts=True),
        "feed-forward": lambda: Mlp(shape.hidden_size, shape.intermediate_size),
        "experts": lambda: MixtureOfExperts(shape),
        "output layer": lambda: nn.Linear(shape.hidden_size, shape.vocab_size, bias=False),
    }
    seconds = {}
    for name, make in build.items():
        rows = FEW if "few" in name else R
        with torch.device("meta"):
            module = make()
        made(module, bench.device, bench.dtype, shape.init_std)
        seconds[name] = bench.seconds(name, _passes(bench, module, shape, rows), rows=rows)
        del module
    fixed = seconds["layer of few rows"]
    flops = described.linear_flops()
    moe = (shape.num_layers - shape.dense_layers) * seconds["experts"]
    projections = shape.num_layers * (seconds["layer"] - seconds["feed-forward"])
    dense = projections + shape.dense_layers * seconds["feed-forward"] + seconds["output layer"]
    # on a GPU the host is ahead of large kernels, but never by more than they take
    rest = max(1 - shape.num_layers * fixed / (dense + moe), 0.1)
    return {
        "dense_flops": BACKWARD * flops["dense"] * R / (dense * rest),
        "moe_flops": BACKWARD * flops["moe"] * R / (moe * rest),
        "layer_seconds": fixed,
    }


def _passes(bench: Bench, module: nn.Module, shape: Shape, R: int) -> Callable[[], None]:
    """Both passes of a module over `R` rows, without attention."""
    x_RM = bench.randn(R, shape.hidden_size)
    position_R = torch.arange(R, device=bench.device)
    turns = rotations(position_R, shape.head_dim, shape.rope_theta, bench.dtype)
    labels_R = position_R % shape.vocab_size
    groups = shape.num_heads // shape.num_kv_heads

    def without(q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, rule: Rule) -> Tensor:
        del rule
        return q_RHD + (k_RKD + v_RKD).repeat_interleave(groups, dim=1)  # all have gradients

    def run() -> None:
        if isinstance(module, Layer):
            out = module(x_RM, turns, Rows(position_R, without))[0]
        elif isinstance(module, MixtureOfExperts):
            out = module(x_RM)[0]
        elif isinstance(module, nn.Linear):
            next_token_loss(module(x_RM), labels_R).backward()
            module.zero_grad()
            return
        else:
            out = module(x_RM)
        out.backward(out.detach())
        module.zero_grad()

    return run
