"""The `model` node of the tasks `gr_train` and `list_distill`: a decoder over semantic IDs."""

from dataclasses import dataclass

from configs.values import at_least, one_of

CODES = ("steps", "heads")


@dataclass(kw_only=True)
class SlideConfig:
    """Sizes. How many levels and codes there are follows from the semantic IDs."""

    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    dropout: float = 0.3
    """Share of the values between layers that training leaves out."""
    max_history: int = 20
    """The newest so many items of a history are read."""
    codes: str = "steps"
    """How the codes of an item are predicted: steps (a pass of the layers for each) or heads (one pass
    for all, and small heads that see the codes before theirs)."""
    tied: bool = True
    """Codes are predicted by the vectors that they have as inputs; false: by others of their own."""
    list_length: int = 0
    """Items of the list that one greedy pass writes (task list_distill); 0: a model of the next item."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "max_history"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.list_length", self.list_length, 0)
        one_of("model.codes", self.codes, CODES)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"model.hidden_size={self.hidden_size} does not split into {self.num_heads} heads of "
                f"even size: set model.hidden_size to a multiple of {2 * self.num_heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"model.dropout={self.dropout}: set model.dropout to 0 or more, below 1"
            )
