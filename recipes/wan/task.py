"""Text to video by flow matching, one expert of Wan 2.2 a run; see `models.wan.flow`."""

import hashlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.hf_folder import Read, add_weight_arguments
from models.wan.build import build_wan, init_weights, training_flops, write_folder
from models.wan.config import EXPERTS, WanConfig, boundary_of, transformer_folder
from models.wan.flow import draws, errors, times
from recipes.abilities import Training
from recipes.task import Batch, DataError
from recipes.wan.config import LatentsConfig, WanTaskConfig
from recipes.wan.latents import Drawn, Stored, Video, collate, find_entries, is_held_out

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly (Weyl), however many there are."""


class Steps:
    """Counts steps, so that a video has other noise in every one (`recipes.abilities.Steering`)."""

    def __init__(self) -> None:
        self.done = 0

    def after_step(self, step: int, norm: Tensor) -> None:
        """See `Steering`."""
        del norm
        self.done = step

    def state(self) -> dict[str, Tensor]:
        """See `Steering`."""
        return {"steps": torch.tensor(self.done)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See `Steering`."""
        self.done = int(state["steps"])


class WanTask:
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": WanTaskConfig,
        "model": WanConfig,
        "data": LatentsConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: WanTaskConfig, model: WanConfig, data: LatentsConfig, seed: int
    ) -> None:
        self.task, self.model_config, self.data, self.seed = task, model, data, seed
        self._model: nn.Module | None = None
        self._steps = Steps()

    @cached_property
    def shape(self) -> dict[str, Any]:
        """What diffusers' class is built with."""
        return self.model_config.shape(self.task.expert)

    @cached_property
    def range(self) -> tuple[float, float]:
        """The times of this run's expert."""
        given, path = self.task.boundary, self.model_config.path
        boundary = boundary_of(path) if given is None else given
        ranges = {"high_noise": (boundary, 1.0), "low_noise": (0.0, boundary), "all": (0.0, 1.0)}
        return ranges[self.task.expert]

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Videos to train on, and those that are held out."""
        data = self.data
        if data.files is None:
            sizes = (self.shape["in_channels"], data.frames, data.height, data.width)
            words, held_out = (
                (data.max_words, self.shape["text_dim"]),
                int(data.samples * data.holdout),
            )
            drawn = Drawn(data.samples - held_out, sizes, words)
            return drawn, Drawn(held_out, sizes, words)
        entries = find_entries(data.files)
        kept = [entry for entry in entries if not is_held_out(entry, data.holdout)]
        return Stored(kept), Stored([e for e in entries if is_held_out(e, data.holdout)])

    def check(self) -> None:
        """Find the model and the videos, and see that they fit each other."""
        self.build_model()
        self.weights_folder()
        if not len(self.parts[0]):
            raise DataError("all videos are held out: set data.holdout=0, or data.files to more")
        for part in self.parts:
            for sizes in part.shapes():
                self._check_sizes(sizes)
            for entry in getattr(part, "entries", ()):
                self._check_words(entry.name, *entry.words)

    def _check_sizes(self, sizes: tuple[int, ...]) -> None:
        channels, positions = self.shape["in_channels"], self.shape["rope_max_seq_len"]
        if sizes[0] != channels:
            raise ValueError(
                f"latents have {sizes[0]} channels, the model {channels}: set model.channels={sizes[0]}"
            )
        for name, size, patch in zip(
            ("frames", "height", "width"), sizes[1:], self.shape["patch_size"], strict=True
        ):
            if size % patch or size // patch > positions:
                raise ValueError(
                    f"latents of {name} {size} do not make whole patches of {patch}, or more than "
                    f"model.max_positions={positions}: set data.files or data.{name} to others"
                )

    def _check_words(self, name: str, number: int, size: int) -> None:
        if size != self.shape["text_dim"]:
            raise ValueError(
                f"{name}: its text has vectors of {size}, the model reads {self.shape['text_dim']}: set "
                f"model.text_size={size}"
            )
        if number > self.data.max_words:
            raise ValueError(
                f"{name}: its text has {number} vectors: set data.max_words={number} or more"
            )

    def build_model(self) -> nn.Module:
        """diffusers' transformer on the meta device."""
        self._model = build_wan(self.shape)
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """What data workers need, where they are started afresh."""
        return {**self.__dict__, "_model": None}

    def init_weights(self, module: nn.Module) -> None:
        """See `models.wan.build.init_weights`."""
        assert self._model is not None, "build_model comes first"
        init_weights(self._model, module)

    def weights_folder(self) -> Path | None:
        """The expert's folder, if its weights are wanted."""
        config = self.model_config
        if not (config.path and config.load_weights):
            return None
        return transformer_folder(config.path, self.task.expert)

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
        """Names agree."""
        del model
        return {name: name for name in stored}

    def steering(self, training: Training) -> Steps:
        """See `recipes.abilities.Steers`."""
        del training
        return self._steps

    def train_samples(self) -> Any:
        """All but the held-out videos."""
        return self.parts[0]

    def eval_samples(self) -> Any:
        """The held-out ones, if there are any."""
        return self.parts[1] if len(self.parts[1]) else None

    def collate(self, samples: Sequence[Video]) -> dict[str, Any]:
        """Latents, text, and the videos' numbers; `count` are tokens, which are patches."""
        batch = collate(samples, self.data.max_words)
        latents_BCFHW = batch["latents_BCFHW"]
        patch = self.shape["in_channels"] * torch.tensor(self.shape["patch_size"]).prod()
        return {**batch, "count": latents_BCFHW.numel() // int(patch)}

    def count(self, batch: Batch) -> int:
        """Patches of all videos."""
        return int(batch["count"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Squared error of the velocity, a mean over each patch, summed over patches.

        A video's time and noise are decided by seed, step and video alone.
        """
        seeds = [self._seed(self._steps.done, number) for number in batch["numbers"]]
        uniform_B, noise_BCFHW = draws(seeds, batch["latents_BCFHW"].shape[1:], self._device(batch))
        return self._errors(model, batch, uniform_B, noise_BCFHW)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """The same at the same times and with the same noise in every evaluation."""
        numbers, device = batch["numbers"], self._device(batch)
        seeds = [self._seed(-1, number) for number in numbers]
        _, noise_BCFHW = draws(seeds, batch["latents_BCFHW"].shape[1:], device)
        uniform_B = torch.tensor([(number + 0.5) * GOLDEN % 1 for number in numbers], device=device)
        error = self._errors(model, batch, uniform_B, noise_BCFHW)
        return {"error": error, "patches": float(batch["count"])}

    def _errors(
        self, model: nn.Module, batch: Batch, uniform_B: Tensor, noise_BCFHW: Tensor
    ) -> Tensor:
        time_B = times(uniform_B, self.task.density, self.task.shift, *self.range)
        latents_BCFHW, words_BSD = batch["latents_BCFHW"], batch["words_BSD"]
        if latents_BCFHW.dtype == torch.float64:  # where all is meant to be exact
            noise_BCFHW = noise_BCFHW.double()
        error_B = errors(model, latents_BCFHW, words_BSD, time_B, noise_BCFHW)
        return error_B.sum() * (batch["count"] / len(latents_BCFHW))

    def _seed(self, step: int, number: int) -> int:
        words = f"{self.seed}/{step}/{number}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1

    @staticmethod
    def _device(batch: Batch) -> torch.device:
        device: torch.device = batch["latents_BCFHW"].device
        return device

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Mean squared error of the velocity; 2 is that of a model that says 0."""
        return {"loss": sums["error"] / max(sums["patches"], 1.0)}

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """Type and file size of the weights."""
        add_weight_arguments(parser)

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """A folder that diffusers loads, to put into a pipeline's."""
        size = write_folder(model, read, out, options)
        place = EXPERTS.get(self.task.expert, "transformer")
        return f"{size / 2**30:.2f} GiB in {options.dtype}, for {place} of a pipeline"

    def flops(self, batch: Batch) -> float:
        """See `models.wan.build.training_flops`."""
        videos = len(batch["numbers"])
        words = int(batch["words_BSD"].shape[1])
        return training_flops(self.shape, batch["count"] // videos, words, videos)

    def describe(self) -> dict[str, str]:
        """Model, times and videos."""
        shape, (train, held_out) = self.shape, self.parts
        width = shape["num_attention_heads"] * shape["attention_head_dim"]
        low, high = self.range
        sizes = sorted(train.shapes())
        several = f" and {len(sizes) - 1} other sizes" if len(sizes) > 1 else ""
        what = "noise in the place of" if self.data.files is None else "from files,"
        return {
            "model": f"wan, {shape['num_layers']} layers x {width}, {shape['in_channels']} channels",
            "expert": f"{self.task.expert}: times {low:g} to {high:g}, {self.task.density} shifted by "
            f"{self.task.shift:g}",
            "data": f"{what} {len(train):,} videos of {' x '.join(map(str, sizes[0]))}{several}, "
            f"{len(held_out):,} held out",
        }
