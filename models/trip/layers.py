"""The token layers: a standard transformer's, BST's and HSTU's, under the same masks and biases.

B histories, H heads, N items, E head size, D = H * E
"""

from torch import Tensor, nn

from models.trip.attention import Score, Visibility, attend, attend_silu, rotate
from models.trip.biases import AlibiBias, HstuBias, LearnedMask
from models.trip.config import APPENDING, TripConfig


class Attention(nn.Module):
    """What the kinds of layer share: positions inside attention, and learned masks."""

    def __init__(self, config: TripConfig, plain: bool = False) -> None:
        """`plain`: neither, as above the summaries."""
        super().__init__()
        H, length = config.num_heads, config.max_history + (config.pooling in APPENDING)
        self.num_heads = H
        self.rope = config.relative == "rope" and not plain
        self.biases = nn.ModuleList()
        if not plain and config.relative in ("alibi", "hstu"):
            self.biases.append(AlibiBias(H) if config.relative == "alibi" else HstuBias(length))
        if not plain and config.mask == "learned":
            self.biases.append(LearnedMask(H))

    def split(self, x_BNF: Tensor, parts: int) -> list[Tensor]:
        """Queries, keys and other parts of (B, N, parts * D), each (B, H, N, E)."""
        x_BNPHE = x_BNF.unflatten(2, (parts, self.num_heads, -1))
        queries, keys, *others = x_BNPHE.permute(2, 0, 3, 1, 4)
        if self.rope:
            queries, keys = rotate(queries), rotate(keys)
        return [queries, keys, *others]

    def score(self, sees: Visibility) -> Score | None:
        """The sum of the biases, if there are any."""
        scores = [bias(sees) for bias in self.biases]
        if not scores:
            return None
        return lambda b, h, q, k: sum((s(b, h, q, k) for s in scores[1:]), scores[0](b, h, q, k))


class Layer(nn.Module):
    """A transformer layer with normalization first."""

    def __init__(self, config: TripConfig, plain: bool = False) -> None:
        super().__init__()
        D = config.hidden_size
        self.attention = Attention(config, plain)
        self.attention_norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.mlp_norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BND: Tensor, sees: Visibility) -> Tensor:
        """(B, N, D)."""
        q_BHNE, k_BHNE, v_BHNE = self.attention.split(self.qkv(self.attention_norm(x_BND)), 3)
        seen_BHNE = attend(q_BHNE, k_BHNE, v_BHNE, sees, self.attention.score(sees))
        x_BND = x_BND + self.dropout(self.out(seen_BHNE.transpose(1, 2).flatten(2)))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x_BND)))
        return x_BND + self.dropout(self.down(hidden))


class BstLayer(nn.Module):
    """BST's (Chen et al. 2019): normalization after each sum, projections without bias, leaky ReLU."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.attention = Attention(config)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.attention_norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)
        self.mlp_norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BND: Tensor, sees: Visibility) -> Tensor:
        """(B, N, D)."""
        q_BHNE, k_BHNE, v_BHNE = self.attention.split(self.qkv(x_BND), 3)
        seen_BHNE = attend(q_BHNE, k_BHNE, v_BHNE, sees, self.attention.score(sees))
        seen_BND = self.out(seen_BHNE.transpose(1, 2).flatten(2))
        x_BND = self.attention_norm(x_BND + self.dropout(seen_BND))
        hidden = nn.functional.leaky_relu(self.up(x_BND))
        return self.mlp_norm(x_BND + self.dropout(self.down(hidden)))


class HstuLayer(nn.Module):
    """HSTU's (Zhai et al. 2024): SiLU attention, normalized and gated by U; no feed-forward part.

    Its normalizations have no parameters, and a score is divided by the longest length, as published.
    """

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.attention = Attention(config)
        self.divisor = config.max_history + (config.pooling in APPENDING)
        self.norm = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.qkvu = nn.Linear(D, 4 * D, bias=False)
        self.out = nn.Linear(D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BND: Tensor, sees: Visibility) -> Tensor:
        """(B, N, D)."""
        qkvu = nn.functional.silu(self.qkvu(self.norm(x_BND)))
        q_BHNE, k_BHNE, v_BHNE, u_BHNE = self.attention.split(qkvu, 4)
        score = self.attention.score(sees)
        seen_BHNE = attend_silu(q_BHNE, k_BHNE, v_BHNE, sees, score, self.divisor)
        gate_BND, seen_BND = (x.transpose(1, 2).flatten(2) for x in (u_BHNE, seen_BHNE))
        return x_BND + self.out(self.dropout(gate_BND * self.norm(seen_BND)))


def token_layer(config: TripConfig) -> nn.Module:
    """The one that `model.layer` names."""
    kinds = {"standard": Layer, "bst": BstLayer, "hstu": HstuLayer}
    return kinds[config.layer](config)
