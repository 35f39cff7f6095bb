"""The `logging` node."""

from dataclasses import dataclass, field
from importlib.util import find_spec

from configs.values import at_least, one_of

MODES = ("auto", "offline", "online", "disabled")


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases. The key comes from the environment only, never from here."""

    mode: str = "auto"
    """offline (no account needed), online, disabled; auto: offline."""
    project: str = "springtide"
    entity: str | None = None
    name: str | None = None
    """Name of the run; null: that of the run folder."""

    def __post_init__(self) -> None:
        one_of("logging.wandb.mode", self.mode, MODES)


@dataclass(kw_only=True)
class LoggingConfig:
    """What is reported, how often, and where."""

    every: int = 10
    """Report every so many steps; between reports no step waits for the device."""
    stall: float = 10.0
    """Say where every rank is when a step takes so many times its median, and ten seconds; 0: never."""
    spike: float = 10.0
    """Name the samples of a step whose loss or gradient norm lies so many times the usual scatter above
    the median of the last hundred steps, or is not finite; 0: never."""
    statistics: int = 0
    """Every so many steps, note gradients by parameter and activations by block; 0: never."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    """Also write TensorBoard's event files (needs the extra `tensorboard`)."""

    def __post_init__(self) -> None:
        at_least("logging.every", self.every, 1)
        if not (self.stall == 0 or 1 < self.stall < 10**6):
            raise ValueError(
                f"logging.stall={self.stall}: set logging.stall to more than 1 and less than 1000000, "
                "or to 0"
            )
        at_least("logging.spike", self.spike, 0)
        at_least("logging.statistics", self.statistics, 0)
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ValueError(
                "logging.tensorboard=true, but TensorBoard is not installed: pip install "
                "'springtide[tensorboard]', or set logging.tensorboard=false"
            )
