"""The `model` node of task `trip`: every part of the model can be switched off or exchanged."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from configs.values import at_least, one_of

RANKS = ("none", "learned", "sinusoidal", "fre")
RANK_STARTS = ("sinusoid", "random", "waves")
TIMES = ("none", "trte", "tin")
RELATIVES = ("none", "rope", "alibi", "hstu")
MASKS = ("group", "causal", "bidirectional", "learned")
ITEM_STARTS = ("random", "counts")
LAYERS = ("standard", "bst", "hstu")
VERDICTS = ("product", "plain")
POOLINGS = ("target", "mean", "din", "tin", "last", "appended", "flat")
KEYS = ("items", "tokens", "summaries")
READS = ("together", "apart", "gated")
APPENDING = ("appended", "flat")
"""Poolings for which the target goes through the token layers, as the newest item."""


@dataclass(kw_only=True)
class TripConfig:
    """Sizes, and which parts there are."""

    hidden_size: int = 64
    num_heads: int = 2
    token_layers: int = 1
    """Layers over the items of the history; 0: the head sees their embeddings."""
    layer: str = "standard"
    """Kind of the token layers: standard (normalization first), bst (after, leaky ReLU), hstu (SiLU
    instead of a softmax, gated)."""
    dropout: float = 0.1
    """Share of the values between layers that training leaves out."""
    max_history: int = 50
    """The newest so many items of a history are read."""
    item_start: str = "random"
    """How the item table begins: random, or from who met what in training (counts)."""
    behaviours: bool = True
    """Add a vector for each item's kind of interaction."""
    rank: str = "fre"
    """What is added for an item's place, counted from the newest: fre (factorized), learned,
    sinusoidal or none."""
    rank_factors: int = 8
    """Inner size of the factorized table (fre)."""
    rank_start: str = "sinusoid"
    """Where the factorized table starts: the nearest to a sinusoidal one as large as item vectors
    (sinusoid), random, or nearest to waves of size one, about 35 times as large (waves). A learned table
    starts at random, or at waves; waves of `sinusoidal` are scaled alike."""
    rank_gate: bool = False
    """Let the target weigh the factors of the factorized table (fre)."""
    time: str = "trte"
    """What is added for the time from an item to the target: trte (coarse + fine table), tin (a coarse
    table, whose first row is added to the target) or none."""
    time_unit: int = 1
    """Seconds that the finest time bucket spans; 86400 where only days are known."""
    time_octaves: int = 28
    """Coarse time buckets; each spans twice the one before, and the last has no end."""
    time_fine: int = 4
    """Fine buckets in a coarse one."""
    relative: str = "none"
    """Positions inside attention: rope, alibi, hstu (learned biases, for places and times apart) or
    none."""
    mask: str = "group"
    """Who sees whom: group (both ways in a temporal group, older groups too), causal, bidirectional, or
    learned (each head learns a mixture of the three)."""
    groups: int = 6
    """Temporal groups, at equally likely ages in the training histories."""
    group_edges: list[int] = field(default_factory=list)
    """Instead: ages in seconds at which groups begin, ascending and above 0."""
    session_gap: int = 0
    """Instead: a group is a session, which ends where so many seconds pass without an interaction; the
    oldest sessions share the last of `groups`. 0: groups by age."""
    summaries: int = 1
    """Summaries of each group for the layers above the items; 0: no summaries and no such layers."""
    upper_layers: int = 1
    """Layers over the summaries and the target."""
    pooling: str = "target"
    """The head's view of the history: target (attention by the target), mean, din, tin, last (the newest
    state times the target), appended (the target's own state, as the newest item), flat (all states)."""
    verdict: str = "product"
    """What the layers behind the head's view read: the view, the target and their product (product), or
    the first two, with ReLU instead of GELU, as published models have it (plain)."""
    keys: list[str] = field(default_factory=lambda: ["tokens", "summaries"])
    """What the head looks at: items (before the layers), tokens (after them), summaries."""
    read: str = "together"
    """How it looks at several of these: by one attention over all (together), or by one for each, whose
    findings stand side by side (apart) or are mixed in shares that the target chooses (gated). Items and
    tokens are then asked by the target itself, not by its state above the summaries, which is one more
    finding."""
    reconstruction: float = 0.3
    """Weight of the loss on masked items of the history; 0: none."""
    reconstruction_rows: float = 1.0
    """Share of a batch's histories for which training computes that loss; they count for all. Each goes
    through the token layers a second time, so less is faster, and noisier."""
    reconstruction_candidates: int = 1024
    """So many items, drawn for each batch as often as training has them, are what hidden ones are told
    from in training (with the correction of a sampled softmax). Catalogues of up to twice as many are
    used whole; 0: any is. Evaluation always uses the whole."""
    masked_share: float = 0.15
    """Share of the items that have company in their group that is masked."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "max_history", "rank_factors", "time_unit",
                     "time_octaves", "time_fine", "groups"):  # fmt: skip
            at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("token_layers", "summaries", "upper_layers", "reconstruction", "dropout",
                     "reconstruction_candidates", "session_gap"):  # fmt: skip
            at_least(f"model.{name}", getattr(self, name), 0)
        one_of("model.item_start", self.item_start, ITEM_STARTS)
        one_of("model.rank", self.rank, RANKS)
        one_of("model.rank_start", self.rank_start, RANK_STARTS)
        one_of("model.time", self.time, TIMES)
        one_of("model.relative", self.relative, RELATIVES)
        one_of("model.mask", self.mask, MASKS)
        one_of("model.layer", self.layer, LAYERS)
        one_of("model.pooling", self.pooling, POOLINGS)
        one_of("model.verdict", self.verdict, VERDICTS)
        one_of("model.read", self.read, READS)
        for key in self.keys:
            one_of("model.keys", key, KEYS)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"model.hidden_size={self.hidden_size} does not split into {self.num_heads} heads of "
                f"even size: set model.hidden_size to a multiple of {2 * self.num_heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout}: set model.dropout below 1")
        if not 0 < self.masked_share < 1:
            raise ValueError(
                f"model.masked_share={self.masked_share}: set model.masked_share between 0 and 1"
            )
        if not 0 < self.reconstruction_rows <= 1:
            raise ValueError(
                f"model.reconstruction_rows={self.reconstruction_rows}: set model.reconstruction_rows "
                "above 0, up to 1"
            )
        if any(low >= high for low, high in pairwise([0, *self.group_edges])):
            raise ValueError(
                f"model.group_edges={self.group_edges}: set model.group_edges to ascending ages above 0"
            )
        if self.group_edges and self.session_gap:
            raise ValueError(
                "model.group_edges and model.session_gap both say where groups begin: set one of them"
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """Parts that need each other."""
        if self.reconstruction and not self.token_layers:
            raise ValueError(
                "model.reconstruction needs items that see each other: set model.token_layers to 1 or "
                "more, or model.reconstruction=0"
            )
        if self.rank_gate and self.rank != "fre":
            raise ValueError(
                f"model.rank_gate weighs the factors of model.rank=fre, not of {self.rank}: set "
                "model.rank=fre or model.rank_gate=false"
            )
        if self.pooling in (*APPENDING, "last") and (
            self.summaries or self.keys_used != ("tokens",)
        ):
            raise ValueError(
                f"model.pooling={self.pooling} reads the states of the token layers alone: set "
                "model.summaries=0 and model.keys=[tokens]"
            )
        if self.pooling in APPENDING and (self.reconstruction or not self.token_layers):
            raise ValueError(
                f"model.pooling={self.pooling} shows the target to the layers, where hidden items could "
                "see it: set model.reconstruction=0 and model.token_layers to 1 or more"
            )
        if not self.keys_used:
            raise ValueError(
                f"model.keys={self.keys} leave the head nothing to look at: set model.keys to some of "
                f"{', '.join(KEYS)}, or model.summaries to 1 or more"
            )
        if self.read != "together" and (
            self.pooling not in ("target", "mean") or len(self.keys_used) < 2
        ):
            raise ValueError(
                f"model.read={self.read} is of several kinds of keys, not of "
                f"{', '.join(self.keys_used)}, by model.pooling=target or mean: set "
                "model.read=together, or more model.keys"
            )
        if self.token_layers and not self.reads_tokens and not self.reconstruction:
            raise ValueError(
                f"nothing reads the token layers (model.keys={self.keys}): set model.token_layers=0, or "
                "add tokens to model.keys"
            )

    @property
    def keys_used(self) -> Sequence[str]:
        """`keys`, in the order of `KEYS`; without layers tokens are items."""
        used = ["tokens" if key == "items" and not self.token_layers else key for key in self.keys]
        return tuple(k for k in KEYS if k in used and (k != "summaries" or self.summaries))

    @property
    def reads_tokens(self) -> bool:
        """Whether the click depends on the token layers."""
        return "tokens" in self.keys_used or self.summaries > 0
