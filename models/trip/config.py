"""The `model` node of task `trip`: every part of the model can be switched off."""

from dataclasses import dataclass, field
from itertools import pairwise

from configs.values import at_least, one_of

RANKS = ("none", "learned", "sinusoidal", "fre")
TIMES = ("none", "trte")
RELATIVES = ("none", "rope", "alibi")
MASKS = ("group", "causal", "bidirectional")
POOLINGS = ("target", "mean")


@dataclass(kw_only=True)
class TripConfig:
    """Sizes, and which parts there are."""

    hidden_size: int = 64
    num_heads: int = 2
    token_layers: int = 1
    """Transformer layers over the items of the history; 0: the head sees their embeddings."""
    dropout: float = 0.1
    """Share of the values between layers that training leaves out."""
    max_history: int = 50
    """The newest so many items of a history are read."""
    rank: str = "fre"
    """What is added for an item's place, counted from the newest: fre (factorized), learned,
    sinusoidal or none."""
    rank_factors: int = 8
    """Inner size of the factorized table (fre)."""
    time: str = "trte"
    """What is added for the time from an item to the target: trte (coarse + fine table) or none."""
    time_unit: int = 1
    """Seconds that the finest time bucket spans; 86400 where only days are known."""
    time_octaves: int = 28
    """Coarse time buckets; each spans twice the one before, and the last has no end."""
    time_fine: int = 4
    """Fine buckets in a coarse one."""
    relative: str = "none"
    """Positions inside attention: rope, alibi or none."""
    mask: str = "group"
    """Who sees whom: group (both ways in a temporal group, older groups too), causal, bidirectional."""
    groups: int = 6
    """Temporal groups, at equally likely ages in the training histories."""
    group_edges: list[int] = field(default_factory=list)
    """Instead: ages in seconds at which groups begin, ascending and above 0."""
    summaries: int = 1
    """Summaries of each group for the layers above the items; 0: no summaries and no such layers."""
    upper_layers: int = 1
    """Layers over the summaries and the target."""
    pooling: str = "target"
    """The head's view of the history: target (attention by the target) or mean."""
    reconstruction: float = 0.3
    """Weight of the loss on masked items of the history; 0: none."""
    masked_share: float = 0.15
    """Share of the items that have company in their group that is masked."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "max_history", "rank_factors", "time_unit",
                     "time_octaves", "time_fine", "groups"):  # fmt: skip
            at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("token_layers", "summaries", "upper_layers", "reconstruction", "dropout"):
            at_least(f"model.{name}", getattr(self, name), 0)
        one_of("model.rank", self.rank, RANKS)
        one_of("model.time", self.time, TIMES)
        one_of("model.relative", self.relative, RELATIVES)
        one_of("model.mask", self.mask, MASKS)
        one_of("model.pooling", self.pooling, POOLINGS)
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
        if self.reconstruction and not self.token_layers:
            raise ValueError(
                "model.reconstruction needs items that see each other: set model.token_layers to 1 or "
                "more, or model.reconstruction=0"
            )
        if any(low >= high for low, high in pairwise([0, *self.group_edges])):
            raise ValueError(
                f"model.group_edges={self.group_edges}: set model.group_edges to ascending ages above 0"
            )

    @property
    def time_buckets(self) -> int:
        """Coarse times fine."""
        return self.time_octaves * self.time_fine
