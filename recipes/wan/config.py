"""The `task` and `data` nodes of task `wan`."""

from dataclasses import dataclass

from configs.values import at_least, one_of
from models.wan.config import EXPERTS
from models.wan.flow import DENSITIES


@dataclass(kw_only=True)
class WanTaskConfig:
    """Which times are learnt."""

    name: str = "wan"
    expert: str = "high_noise"
    """high_noise or low_noise: the transformer of Wan 2.2 for times above or below `boundary`; all: one
    for all times, as Wan 2.1 has."""
    boundary: float | None = None
    """The time between the experts, where 1 is noise; null: as the folder says, else that of
    Wan2.2-T2V-A14B, 0.875."""
    density: str = "logit_normal"
    """How times are drawn before they are shifted: logit_normal (Wan's report), or uniform."""
    shift: float = 5.0
    """Times are moved towards noise: t becomes s t / (1 + (s - 1) t). Wan samples videos with 3 to 12,
    Wan2.2-T2V-A14B with 12."""

    def __post_init__(self) -> None:
        one_of("task.expert", self.expert, (*EXPERTS, "all"))
        one_of("task.density", self.density, DENSITIES)
        if self.boundary is not None and not 0.01 <= self.boundary <= 0.99:
            raise ValueError(f"task.boundary={self.boundary}: set task.boundary to 0.01 to 0.99")
        if not self.shift > 0:
            raise ValueError(f"task.shift={self.shift}: set task.shift above 0; 1 moves nothing")


@dataclass(kw_only=True)
class LatentsConfig:
    """Latents and vectors of text, as `python -m recipes.wan.make_latents` writes them."""

    files: list[str] | None = None
    """Globs of .safetensors files; null: noise of the sizes below, for plans and measurements."""
    max_words: int = 512
    """Vectors of text that the model is given: fewer are filled up with zeros, as Wan does."""
    holdout: float = 0.02
    """Share of the videos that evaluation uses and training never sees, by their names."""
    samples: int = 1024
    """Without files: so many videos."""
    frames: int = 21
    """Without files: frames of latents; 21 are 81 of a video."""
    height: int = 60
    """Without files: of a frame of latents, an eighth of a video's."""
    width: int = 104
    """Without files: likewise."""

    def __post_init__(self) -> None:
        for name in ("max_words", "samples", "frames", "height", "width"):
            at_least(f"data.{name}", getattr(self, name), 1)
        if not 0 <= self.holdout < 1:
            raise ValueError(f"data.holdout={self.holdout}: set data.holdout to 0 or more, below 1")
        if self.files == []:
            raise ValueError(
                "data.files is empty: set data.files to globs of .safetensors files, or to null"
            )
