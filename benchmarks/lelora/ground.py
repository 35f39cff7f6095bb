"""What all methods begin from: the base model, its spectra, and the directions of its inputs.

L matrices of one shape, M outputs, N inputs, K components
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.lelora.data import Data, Part
from benchmarks.lelora.encoder import Base, encode, names_of
from models.lelora.spectrum import decompose
from models.linear_probe import Probe, fit_probe
from recipes.lelora.classify import LeloraClassifyConfig
from recipes.lelora.head import probe_rows

EVA_TEXTS = 256
"""As many as the recipe reads in 8 batches of 32."""
PROBE_TEXTS = LeloraClassifyConfig().probe


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
    inputs: list[Tensor]
    """Directions in which the inputs of each matrix vary, the most first: (L, K, N) of each group."""
    rank: int
    """LoRA's: it decides how much trains."""
    steps: int
    probe: Probe
    """Where every classifier begins."""
    drawn: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Random components that were drawn before, by seed and number."""

    @property
    def names(self) -> list[list[str]]:
        """Of the layers in a classifier of transformers, group by group."""
        return [[f"bert.{n}" for n in group] for group in names_of(self.base.layers)]


def in_order(ground: Ground) -> list[str]:
    """The layers' names, in the order in which the model has them (and a `Setting` has matrices)."""
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


@torch.no_grad()
def input_directions(base: Base, part: Part, texts: int) -> list[Tensor]:
    """Eigenvectors of the sum of x x^T over the inputs x of each matrix, padding included, as rows."""
    sums: dict[str, Tensor] = {}

    def look(name: str, x_1XN: Tensor) -> None:
        x_XN = x_1XN[0].float()
        sums[name] = sums.get(name, 0) + x_XN.T @ x_XN

    for rows in torch.arange(min(texts, len(part)), device=part.labels_X.device).split(32):
        ids, lengths, _ = part[rows[None]]
        encode(base, base.rest, [w[None] for w in base.matrices], ids, lengths, look)
    return [
        torch.stack(
            [torch.linalg.eigh(sums[n].double()).eigenvectors.float().T.flip(0) for n in names]
        )
        for names in names_of(base.layers)
    ]


@torch.no_grad()
def probe_of(base: Base, part: Part, labels: int, texts: int = PROBE_TEXTS) -> Probe:
    """The recipe's first classifier, with its seed 0."""
    rows = torch.tensor(probe_rows(len(part), texts, 0), device=part.labels_X.device)
    found = []
    for some in rows.split(256):
        ids, lengths, _ = part[some[None]]
        found.append(encode(base, base.rest, [w[None] for w in base.matrices], ids, lengths)[0])
    return fit_probe(torch.cat(found), part.labels_X[rows], labels)


def prepare(base: Base, spectra: list[Spectrum], data: Data, rank: int, steps: int) -> Ground:
    """Look at a task's inputs."""
    inputs = input_directions(base, data.train, EVA_TEXTS)
    probe = probe_of(base, data.train, data.labels)
    return Ground(base, spectra, inputs, rank, steps, probe)
