"""What `benchmarks.lelora.prepare` has packed, on a device."""

import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from benchmarks.lelora.encoder import Encoder


@dataclass(frozen=True)
class Part:
    """Texts: T tokens at most, padded with zeros."""

    ids_XT: Tensor
    lengths_X: Tensor
    labels_X: Tensor

    def __len__(self) -> int:
        return len(self.labels_X)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, lengths and labels of rows (any shape)."""
        flat = rows.reshape(-1)
        ids = self.ids_XT.index_select(0, flat).view(*rows.shape, -1).long()
        lengths = self.lengths_X.index_select(0, flat).view(rows.shape)
        return ids, lengths, self.labels_X.index_select(0, flat).view(rows.shape).long()

    def split(self, share: float) -> tuple["Part", "Part"]:
        """The first ones and the others."""
        edge = round(share * len(self))
        return self.first(edge), Part(
            self.ids_XT[edge:], self.lengths_X[edge:], self.labels_X[edge:]
        )

    def first(self, number: int) -> "Part":
        """Of these, the first ones."""
        return Part(self.ids_XT[:number], self.lengths_X[:number], self.labels_X[:number])


@dataclass(frozen=True)
class Data:
    """A task's parts."""

    train: Part
    validation: Part
    test: Part
    labels: int


def read(file: Path) -> dict[str, Tensor]:
    """Everything by name."""
    content = file.read_bytes()
    return load(lzma.decompress(content) if file.suffix == ".xz" else content)


def task_of(stored: Mapping[str, Tensor], task: str, device: torch.device) -> Data:
    """One task on `device`."""

    def part(name: str) -> Part:
        found = (stored[f"{task}/{name}/{kind}"] for kind in ("ids", "lengths", "labels"))
        return Part(*(tensor.to(device, torch.int32) for tensor in found))

    train, validation, test = (part(name) for name in ("train", "validation", "test"))
    labels = 1 + max(int(of.labels_X.max()) for of in (train, validation, test))
    return Data(train, validation, test, labels)


def base_of(stored: Mapping[str, Tensor], device: torch.device, heads: int = 12) -> Encoder:
    """The encoder."""
    named = {
        name.removeprefix("model/"): tensor.to(device).float()
        for name, tensor in stored.items()
        if name.startswith("model/")
    }
    return Encoder.of(named, heads)
