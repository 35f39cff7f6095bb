"""The `collectives` node: how gathered weights and reduced gradients travel."""

from dataclasses import dataclass

from configs.values import at_least, one_of

KINDS = ("stock", "tide")


@dataclass(kw_only=True)
class CollectivesConfig:
    """Which collectives FSDP2 uses."""

    name: str = "stock"
    """stock: those of torch; tide: shards straight into parameters, gradients summed in place."""
    slots: int = 2
    """tide: layers that may be gathered at the same time; must exceed the prefetch depth."""
    chunk: int = 1048576
    """tide: elements that a staging buffer of the reduce-scatter holds."""
    timeout: float = 60.0
    """tide: seconds after which a silent peer is named and the run ends."""
    poison: bool = False
    """tide: fill memory that is given back with NaN, to find code that still reads it."""

    def __post_init__(self) -> None:
        one_of("collectives", self.name, KINDS)
        at_least("collectives.slots", self.slots, 1)
        at_least("collectives.chunk", self.chunk, 1)
        at_least("collectives.timeout", self.timeout, 0.1)
