"""What of a hybrid model costs time: its layers by kind, and the operations that they need.

Legend: L length of a sample.
"""

from dataclasses import dataclass

import numpy as np

from parallel.repacking.layout import Floats, Ints

BACKWARD = 3
"""A training step computes three times what its forward pass does."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of a hybrid model costs time."""

    hidden: int
    head_dim: int
    q_heads: int
    kv_heads: int
    full_layers: int
    sparse_layers: int
    sparse: str = "topk"
    """Kind of the sparse attention: topk (blocks chosen by score) or window."""
    window: int = 512
    """Tokens that a query of a sliding-window layer sees."""
    block: int = 64
    top_k: int = 16
    """Blocks that a query of a top-k layer sees."""
    dense_layers: int = 0
    """Layers with a dense feed-forward; the others are mixtures of experts."""
    dense_hidden: int = 0
    expert_hidden: int = 0
    experts_per_token: int = 0
    """Shared experts included."""
    vocab: int = 0
    sparse_q_heads: int | None = None
    """Of the sparse layers; null: as the full ones."""
    sparse_kv_heads: int | None = None
    gated: bool = False
    """Attention's output passes a gate, which is one more projection of the queries' size."""
    recompute: bool = False
    """Layers are computed again in the backward pass, communication included."""
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if self.sparse not in ("topk", "window"):
            raise ValueError(f"sparse={self.sparse} is not one of topk, window")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers={self.dense_layers} of {self.layers} layers")

    @property
    def layers(self) -> int:
        """All layers."""
        return self.full_layers + self.sparse_layers

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key/value heads of the full layers."""
        return self.q_heads, self.kv_heads

    @property
    def sparse_heads(self) -> tuple[int, int]:
        """Query and key/value heads of the sparse layers."""
        return self.sparse_q_heads or self.q_heads, self.sparse_kv_heads or self.kv_heads

    def linear_flops(self) -> dict[str, float]:
        """Forward operations of one row, over all layers, by the kind of kernel."""
        projections = sum(
            number * 2 * self.hidden * self.head_dim * ((2 + self.gated) * q + 2 * kv)
            for number, (q, kv) in (
                (self.full_layers, self.heads), (self.sparse_layers, self.sparse_heads),
            )
        )  # fmt: skip
        moe_layers = self.layers - self.dense_layers
        moe = moe_layers * 6 * self.hidden * self.expert_hidden * self.experts_per_token
        dense = self.dense_layers * 6 * self.hidden * self.dense_hidden
        return {"dense": projections + dense + 2 * self.hidden * self.vocab, "moe": moe}

    def pairs(self, lengths: Ints) -> Floats:
        """Query-key pairs that causal full attention computes, per sample, head and layer."""
        L = lengths.astype(np.float64)
        return L * (L + 1) / 2

    def sparse_pairs(self, lengths: Ints) -> Floats:
        """The same of the sparse attention."""
        span = self.window if self.sparse == "window" else self.block * self.top_k
        L = lengths.astype(np.float64)
        short = np.minimum(L, span)
        return short * (short + 1) / 2 + (L - short) * span

    def score_pairs(self, lengths: Ints) -> Floats:
        """Query-block pairs that choosing blocks scores, forwards only; none for a window."""
        return self.pairs(lengths) / self.block if self.sparse == "topk" else np.zeros(len(lengths))

    def flops(self, lengths: Ints) -> float:
        """Operations of a training step on these samples: exact causal pairs, nothing recomputed."""
        q, sparse_q = self.heads[0], self.sparse_heads[0]
        full = 4 * q * self.full_layers * self.pairs(lengths).sum()
        sparse = 4 * sparse_q * self.sparse_layers * self.sparse_pairs(lengths).sum()
        scores = 2 * sparse_q * self.sparse_layers * self.score_pairs(lengths).sum()
        rows = sum(self.linear_flops().values()) * float(lengths.sum())
        trained = rows + self.head_dim * float(full + sparse)
        return BACKWARD * trained + self.head_dim * float(scores)
