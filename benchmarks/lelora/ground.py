"""What all methods begin from: the base model, its spectra, and the directions of its inputs.

L matrices of one shape, M outputs, N inputs, K components
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from models.lelora.spectrum import decompose


class Base(Protocol):
    """A pre-trained model in fp32, its matrices of one shape together."""

    @property
    def matrices(self) -> list[Tensor]:
        """Of each group of layers: (L, M, N), layer by layer."""

    @property
    def rest(self) -> dict[str, Tensor]:
        """Everything else, by transformers' names."""

    @property
    def layers(self) -> int:
        """How many the model has; a group has as many matrices of each."""

    @property
    def names(self) -> list[list[str]]:
        """Of the matrices, group by group, as transformers has them."""

    @property
    def words(self) -> str:
        """Name of the table that has a row for each token."""


@dataclass(frozen=True)
class Spectrum:
    """All components of the matrices of one shape."""

    left_LMK: Tensor
    values_LK: Tensor
    right_LKN: Tensor


@dataclass(frozen=True)
class Ground:
    """See the top of the file."""

    base: Base
    spectra: list[Spectrum]
    look: Callable[[], list[Tensor]]
    """Gives `inputs`; not called where nobody wants these."""
    rank: int
    """LoRA's: it decides how much trains."""
    steps: int
    drawn: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Random components that were drawn before, by seed and number."""

    @property
    def names(self) -> list[list[str]]:
        """Of the matrices, group by group."""
        return self.base.names

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Directions in which the inputs of matrices vary, the most first: (L, K, N) of each group."""
        return self.look()


def in_order(ground: Ground) -> list[str]:
    """The matrices' names, layer by layer: the order in which a `Setting` has matrices."""
    layers, found = ground.base.layers, []
    for layer in range(layers):
        for names in ground.names:
            each = len(names) // layers
            found += names[layer * each : (layer + 1) * each]
    return found


def spectra_of(base: Base) -> list[Spectrum]:
    """Exact decompositions, on the base model's device."""
    found = []
    for w_LMN in base.matrices:
        atoms = [decompose(w_MN, range(min(w_MN.shape))) for w_MN in w_LMN]
        parts = (
            torch.stack([getattr(a, name) for a in atoms]).to(w_LMN.device)
            for name in ("left_MJ", "values_K", "right_JN")
        )
        found.append(Spectrum(*parts))
    return found


class Sums:
    """Of x x^T over the inputs x of each matrix, padding included."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def __call__(self, name: str, x_1XN: Tensor) -> None:
        """Add the inputs of the only run."""
        x_XN = x_1XN[0].float()
        self.by_name[name] = self.by_name.get(name, 0) + x_XN.T @ x_XN


def eigenvectors(base: Base, sums: Mapping[str, Tensor]) -> list[Tensor]:
    """Of the sums of each matrix, as rows, the largest first: (L, K, N) of each group."""
    return [
        torch.stack(
            [torch.linalg.eigh(sums[n].double()).eigenvectors.float().T.flip(0) for n in names]
        )
        for names in base.names
    ]
