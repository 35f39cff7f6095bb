"""The `checkpoint` node."""

from dataclasses import dataclass

from configs.values import at_least


@dataclass(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and which stay."""

    every: int = 500
    """Save every so many steps; 0: only at the end, and when stopped by a signal."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    keep_every: int | None = None
    """Also keep, for ever, those of steps that this divides."""
    highest: str | None = None
    """Also keep the best checkpoint: whose evaluation had the highest value of this figure (`recall@10`,
    say). An evaluation that is better than all before it is saved."""
    lowest: str | None = None
    """The same with the lowest value (of `loss`, say)."""
    at_end: bool = True
    """Save after the last step."""
    background: bool = True
    """Write while training goes on, from a copy in host memory as large as the state."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)
        if self.keep_every is not None:
            at_least("checkpoint.keep_every", self.keep_every, 1)
        if self.highest is not None and self.lowest is not None:
            raise ValueError(
                f"checkpoint.highest={self.highest} and checkpoint.lowest={self.lowest}, but one figure "
                "says which checkpoint is the best: set one of them to null"
            )

    @property
    def best_by(self) -> str | None:
        """The figure that says which checkpoint is the best, if any does."""
        return self.highest or self.lowest
