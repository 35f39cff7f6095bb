"""Videos as latents with vectors of their text, out of safetensors files.

A file holds any number of videos: `NAME/latents` (C, F, H, W), normalized as Wan's autoencoder says, and
`NAME/words` (S, D), of the text's own length, each in any floating type.

Legend: C channels, F frames, H and W places of a frame, all of latents; S vectors of a text, D numbers.
"""

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recipes.task import DataError

LATENTS, WORDS = "latents", "words"


@dataclass(frozen=True)
class Video:
    """One sample."""

    latents_CFHW: Tensor
    words_SD: Tensor
    number: int
    """By which its noise is drawn."""


@dataclass(frozen=True)
class Entry:
    """Where a video is, and its sizes."""

    file: str
    name: str
    shape: tuple[int, ...]
    words: tuple[int, ...]


class Stored:
    """A map-style dataset of videos in files."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Video:
        entry = self.entries[index]
        with safe_open(entry.file, framework="pt") as tensors:
            latents, words = (
                tensors.get_tensor(f"{entry.name}/{what}") for what in (LATENTS, WORDS)
            )
        return Video(latents.float(), words.float(), index)

    def shapes(self) -> set[tuple[int, ...]]:
        """All sizes of latents."""
        return {entry.shape for entry in self.entries}

    def fingerprint(self) -> str:
        """Equal for equal names and sizes in the same order, wherever the files are."""
        digest = hashlib.blake2b(digest_size=16)
        for entry in self.entries:
            digest.update(
                f"{Path(entry.file).name} {entry.name} {entry.shape} {entry.words}\n".encode()
            )
        return digest.hexdigest()


class Drawn:
    """Noise of one size in the place of videos."""

    def __init__(self, number: int, shape: tuple[int, ...], words: tuple[int, int]) -> None:
        self.number, self.shape, self.words = number, shape, words

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Video:
        generator = torch.Generator().manual_seed(index)
        latents = torch.randn(self.shape, generator=generator)
        return Video(latents, torch.randn(self.words, generator=generator), index)

    def shapes(self) -> set[tuple[int, ...]]:
        """The one size."""
        return {self.shape}

    def fingerprint(self) -> str:
        """What decides the noise."""
        return f"drawn {self.number} {self.shape} {self.words}"


def find_entries(patterns: Sequence[str]) -> list[Entry]:
    """All videos in the files, by file and name. Raises `DataError`."""
    files = sorted({name for pattern in patterns for name in glob.glob(pattern, recursive=True)})
    if not files:
        raise DataError(f"no file matches {', '.join(patterns)}: set data.files")
    return [entry for file in files for entry in _entries(file)]


def _entries(file: str) -> list[Entry]:
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {file} ({error}): remove it, or set data.files") from error
    names = sorted({key.rpartition("/")[0] for key in shapes})
    entries = []
    for name in names:
        latents, words = shapes.get(f"{name}/{LATENTS}"), shapes.get(f"{name}/{WORDS}")
        if latents is None or words is None or len(latents) != 4 or len(words) != 2:
            raise DataError(
                f"{file}: {name or 'a tensor'} is no video: {name}/{LATENTS} (C, F, H, W) and "
                f"{name}/{WORDS} (S, D) are expected, as recipes.wan.make_latents writes them"
            )
        entries.append(Entry(file, name, latents, words))
    return entries


def is_held_out(entry: Entry, share: float) -> bool:
    """By the video's name alone, so that more videos move none."""
    digest = hashlib.blake2b(
        f"{Path(entry.file).stem}/{entry.name}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def collate(videos: Sequence[Video], max_words: int) -> dict[str, Any]:
    """Join videos of one size; texts are filled up with zeros."""
    shapes = {tuple(video.latents_CFHW.shape) for video in videos}
    if len(shapes) > 1:
        raise DataError(
            f"latents of {', '.join(map(str, sorted(shapes)))} are in one micro-batch: set "
            "trainer.micro_batch_size=1 (and trainer.eval_batch_size, if it is set), or data.files to "
            "videos of one size"
        )
    size = videos[0].words_SD.shape[1]
    words_BSD = torch.zeros(len(videos), max_words, size)
    for number, video in enumerate(videos):
        words_BSD[number, : len(video.words_SD)] = video.words_SD
    return {
        "latents_BCFHW": torch.stack([video.latents_CFHW for video in videos]),
        "words_BSD": words_BSD,
        "numbers": [video.number for video in videos],
    }
