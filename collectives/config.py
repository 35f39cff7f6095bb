"""The `collectives` node: how gathered weights and reduced gradients travel."""

from dataclasses import dataclass

from configs.values import one_of

KINDS = ("stock",)


@dataclass(kw_only=True)
class CollectivesConfig:
    """Which collectives FSDP2 uses."""

    name: str = "stock"
    """stock: those of torch."""

    def __post_init__(self) -> None:
        one_of("collectives", self.name, KINDS)
