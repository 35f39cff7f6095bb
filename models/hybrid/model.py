"""The decoder: layers that attend by their kind, dense first, then mixtures of experts.

Legend: T rows (tokens of all documents end to end), M hidden size, H query heads, K key/value heads,
D head dim, V vocabulary, E experts, L layers with experts.

    x -> norm -> attention -> norm -> + -> norm -> feed-forward or experts -> norm -> + ->

The names of modules and parameters, and what each computes, are those of Arcee's Trinity models (Afmoe
in transformers): queries and keys normalized per head, a gate on what attention saw, rotary positions
in some kinds of layers only, a norm before and after each half of a layer.

Everything but attention looks at one row at a time. So the model does not know where its rows come
from: `Rows` says each row's position, and has the function that attends.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.hybrid.attention import Attend, Rule, attend, rule_of
from models.hybrid.documents import Documents
from models.hybrid.experts import Experts, MixtureOfExperts, Mlp, Routed
from models.hybrid.shape import Shape


@dataclass(frozen=True)
class Rows:
    """What the model is told about its rows besides their tokens."""

    positions_T: Tensor
    """Each row's place in its document."""
    attend: Attend
    """Called by every layer, in the order of layers, with the layer's rule."""


def whole(documents: Documents) -> Rows:
    """The rows of whole documents, all of them here."""

    def attend_here(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        return attend(q_THD, k_TKD, v_TKD, documents, rule)

    return Rows(documents.positions(), attend_here)


class Output(NamedTuple):
    """What one forward pass gives."""

    logits_TV: Tensor
    visits_LE: Tensor
    """Of rows to experts, int64."""
    chances_LE: Tensor
    """The routers' normalized scores, summed over rows; for `models.balance`."""


class Hybrid(nn.Module):
    """Next-token logits of packed documents."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_T: Tensor, rows: Rows) -> Output:
        """Logits of every row (T, V), and what the routers did. T may be 0."""
        x_TM, routed = self.model(tokens_T, rows)
        none = x_TM.new_zeros(0, self.shape.num_experts)
        return Output(
            self.lm_head(x_TM),
            torch.stack([each.visits_E for each in routed]) if routed else none.long(),
            torch.stack([each.chances_E for each in routed]) if routed else none,
        )


class Decoder(nn.Module):
    """Everything but the output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, kind, number >= shape.dense_layers)
            for number, kind in enumerate(shape.kinds)
        )
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, tokens_T: Tensor, rows: Rows) -> tuple[Tensor, list[Routed]]:
        """(T, M), and what the router of each layer with experts did."""
        x_TM = self.embed_tokens(tokens_T)
        if self.shape.scale_embeddings:
            x_TM = x_TM * self.shape.hidden_size**0.5
        turns = rotations(rows.positions_T, self.shape.head_dim, self.shape.rope_theta, x_TM.dtype)
        found = []
        for layer in self.layers:
            x_TM, routed = layer(x_TM, turns, rows)
            if routed is not None:
                found.append(routed)
        return self.norm(x_TM), found


class Layer(nn.Module):
    """Attention, then a feed-forward or experts."""

    def __init__(self, shape: Shape, kind: str, experts: bool) -> None:
        super().__init__()
        M, eps = shape.hidden_size, shape.norm_eps
        self.self_attn = Attention(shape, kind)
        self.mlp = MixtureOfExperts(shape) if experts else Mlp(M, shape.intermediate_size)
        self.input_layernorm = nn.RMSNorm(M, eps)
        self.post_attention_layernorm = nn.RMSNorm(M, eps)
        self.pre_mlp_layernorm = nn.RMSNorm(M, eps)
        self.post_mlp_layernorm = nn.RMSNorm(M, eps)

    def forward(
        self, x_TM: Tensor, turns: tuple[Tensor, Tensor], rows: Rows
    ) -> tuple[Tensor, Routed | None]:
        """(T, M), and what the router did, if there is one."""
        seen_TM = self.self_attn(self.input_layernorm(x_TM), turns, rows)
        x_TM = x_TM + self.post_attention_layernorm(seen_TM)
        made = self.mlp(self.pre_mlp_layernorm(x_TM))
        made_TM, routed = made if isinstance(made, tuple) else (made, None)
        return x_TM + self.post_mlp_layernorm(made_TM), routed


class Attention(nn.Module):
    """Grouped-query attention of one kind, with a gate on its result."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        M, D = shape.hidden_size, shape.head_dim
        self.H, self.K, self.D = shape.num_heads, shape.num_kv_heads, D
        self.rule = rule_of(shape, kind)
        self.rotary = kind in shape.rotary
        self.q_proj = nn.Linear(M, self.H * D, bias=False)
        self.k_proj = nn.Linear(M, self.K * D, bias=False)
        self.v_proj = nn.Linear(M, self.K * D, bias=False)
        self.o_proj = nn.Linear(self.H * D, M, bias=False)
        self.gate_proj = nn.Linear(M, self.H * D, bias=False)
        self.q_norm = nn.RMSNorm(D, shape.norm_eps)
        self.k_norm = nn.RMSNorm(D, shape.norm_eps)

    def forward(self, x_TM: Tensor, turns: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """(T, M)."""
        q_THD = self.q_norm(self.q_proj(x_TM).unflatten(1, (self.H, self.D)))
        k_TKD = self.k_norm(self.k_proj(x_TM).unflatten(1, (self.K, self.D)))
        v_TKD = self.v_proj(x_TM).unflatten(1, (self.K, self.D))
        if self.rotary:
            q_THD, k_TKD = rotate(q_THD, *turns), rotate(k_TKD, *turns)
        seen_TN = _attend(rows, q_THD, k_TKD, v_TKD, self.rule).flatten(1)
        out_TM: Tensor = self.o_proj(seen_TN * self.gate_proj(x_TM).sigmoid())
        return out_TM


@torch.compiler.disable
def _attend(rows: Rows, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
    """Never compiled: a block would be compiled again for every mix of lengths, and gradients through
    compiled calls of gathered attention were wrong (torch 2.11, H200: norms of 1e5 instead of 20)."""
    return rows.attend(q_THD, k_TKD, v_TKD, rule)


def rotations(
    positions_T: Tensor, D: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D / 2) of the rotary angles (Su et al. 2021) of positions."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    even = torch.arange(0, D, 2, device=positions_T.device, dtype=exact)
    angles = positions_T[:, None].to(exact) * theta ** (-even / D)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_THD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair of a head's halves by its row's angle."""
    first, second = x_THD.chunk(2, dim=2)
    cos_T1E, sin_T1E = cos_TE[:, None], sin_TE[:, None]
    return torch.cat(
        [first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E], dim=2
    )


def init_weights(module: nn.Module, std: float) -> None:
    """Initialise the direct parameters and buffers of one module of the model."""
    if isinstance(module, nn.RMSNorm):
        module.reset_parameters()
    elif isinstance(module, MixtureOfExperts):
        module.expert_bias.zero_()
    elif isinstance(module, nn.Linear | nn.Embedding | Experts):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=std)
