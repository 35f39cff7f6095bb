"""The adapters of a run: what trains in each, on every rank alike.

M matrices
"""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from models.lelora.adapter import update_norms
from models.lelora.budget import cost
from models.lelora.inject import Target, adapters_of, refresh
from models.lelora.row_steps import RowSteps
from models.lelora.spectrum import Atoms
from models.lelora.switch import Directions, Switched, switch
from models.lelora.windows import needed
from parallel.torch_private import local_slices
from recipes.abilities import Training
from recipes.lelora.brain import Brain, Setting
from recipes.lelora.config import LeloraConfig
from recipes.lelora.shards import moments_of, put_back, rest, whole_of
from recipes.lelora.spectra import Spectra, find_spectra

T = TypeVar("T")
AT_ONCE = 2**24
"""Entries of adapters that are worked on together."""


class Adapters:
    """All adapters, their directions, and the setting that they have."""

    def __init__(
        self, config: LeloraConfig, training: Training, targets: Sequence[Target], brain: Brain,
        spectra: Spectra | None = None,
    ) -> None:  # fmt: skip
        """Collective: decomposes what is not kept or given. No matrix trains anything yet."""
        self.config, self.targets, self.brain = config, targets, brain
        self.optimizer = training.optimizer
        self.adapters = [adapters_of(training.model, targets)[target.name] for target in targets]
        self.spectra = spectra or find_spectra(
            training.model, targets, self._wanted(), config.cache_dir
        )
        self.atoms = [self.spectra.atoms[target.name] for target in targets]
        self.norms_M = torch.stack([atoms.values_K.double().norm() for atoms in self.atoms])
        self.row_steps = RowSteps(training.optimizer, self.adapters, local_slices)
        M = len(targets)
        self.setting = Setting((0,) * M, (-1,) * M, (1.0,) * M)
        self.ages_M, self.moved_M = torch.zeros(M), torch.zeros(M)

    def _wanted(self) -> dict[str, list[int]]:
        """The components whose directions some setting may ask for."""
        brain, wanted = self.brain, {}
        kind = "principal" if self.config.window == "gaussian" else self.config.window
        for target in self.targets:
            key, k = f"{brain.seed}/{target.name}", target.shape.components
            wanted[target.name] = needed(brain.space.windows, kind, brain.allowed, k, key)
        return wanted

    def apply(self, setting: Setting, budget: int) -> dict[str, object]:
        """Switch every matrix whose setting is another, those that become cheaper first. Collective.

        A switch that would lose too much of the fold is refused, and one that the budget has no room
        for after that. If what stays is too much, the refused ones happen after all. Returns what was
        done, in names and numbers.
        """
        before, M = self.setting, len(self.targets)
        now = [before.of_matrix(matrix) for matrix in range(M)]
        then = [setting.of_matrix(matrix) for matrix in range(M)]
        changed = [matrix for matrix in range(M) if now[matrix] != then[matrix]]
        gains = {m: self._cost(m, then[m]) - self._cost(m, now[m]) for m in changed}
        spent = self.brain.cost(before)
        refused: list[int] = []
        done: list[Switched] = []
        for matrix in sorted(changed, key=lambda m: (gains[m], m)):
            fits = gains[matrix] <= 0 or spent + gains[matrix] <= budget
            made = self._switch(matrix, then[matrix], self.config.fold_tolerance) if fits else None
            if made is None or made.refused:
                refused.append(matrix)
                continue
            done.append(made)
            spent += gains[matrix]
        for matrix in list(refused):
            if spent > budget and gains[matrix] < 0:
                done.append(self._switch(matrix, then[matrix], 1.0))
                spent += gains[matrix]
                refused.remove(matrix)
        assert spent <= budget, f"{spent} trainable parameters exceed the {budget} allowed"
        made_M = [now[m] if m in refused else then[m] for m in range(M)]
        self.setting = Setting(*(tuple(values) for values in zip(*made_M, strict=True)))
        for matrix in range(M):
            moved = matrix in gains and matrix not in refused
            self.moved_M[matrix] = float(moved)
            self.ages_M[matrix] = 0.0 if moved else self.ages_M[matrix] + 1
        return {
            "switched": int(self.moved_M.sum()),
            "rows": sum(switched.arrived + switched.left for switched in done),
            "refused": [self.targets[matrix].name for matrix in refused],
            "discarded": max((switched.discarded for switched in done), default=0.0),
        }

    def _cost(self, matrix: int, setting: tuple[int, int, float]) -> int:
        return cost(self.config.param, self.targets[matrix].shape, setting[0])

    def _switch(self, matrix: int, setting: tuple[int, int, float], tolerance: float) -> Switched:
        width, start, scale = setting
        adapter = self.adapters[matrix]
        whole, moments = whole_of(adapter), moments_of(adapter, self.optimizer)
        components = self.brain.components(matrix, width, start)
        done = switch(
            adapter.kind, whole, moments, components, scale, self._directions(matrix), tolerance
        )
        if not done.refused:
            put_back(adapter, self.optimizer, whole, moments)
            refresh(adapter, self.row_steps.horizon)
        return done

    def directions(self) -> list[Directions]:
        """Of every matrix."""
        return [self._directions(matrix) for matrix in range(len(self.targets))]

    def _directions(self, matrix: int) -> Directions:
        atoms = self.atoms[matrix]
        if self.config.window != "gaussian":
            return atoms.pick
        key = f"{self.brain.seed}/{self.targets[matrix].name}"
        return lambda components: gaussian(atoms, components, key)

    def go_on(self, setting: Setting) -> None:
        """After tensors were restored: what is known on the host follows from them."""
        self.setting = setting
        for adapter in self.adapters:
            rest(adapter, self.optimizer)
            refresh(adapter, self.row_steps.horizon)

    def drift(self) -> Tensor:
        """Norm of each matrix's update, as a share of the matrix's. Collective."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for matrix, adapter in enumerate(self.adapters):
            shape = adapter.outputs, adapter.inputs, adapter.rows
            alike.setdefault(shape, []).append(matrix)
        found_M = torch.zeros(len(self.adapters), dtype=torch.float64)
        for (outputs, inputs, rows), matrices in alike.items():
            entries = (outputs + inputs) * (rows + self.config.fold_rank)
            for some in split(matrices, max(AT_ONCE // entries, 1)):
                wholes = [whole_of(self.adapters[matrix]) for matrix in some]
                stacked = {name: torch.stack([of[name] for of in wholes]) for name in wholes[0]}
                found_M[some] = update_norms(self.config.param, stacked).cpu()
        return found_M / self.norms_M.clamp(min=1e-30)

    def fingerprint(self) -> int:
        """Of the buffers, which every rank has whole: equal where these are, bit for bit."""
        found: list[Tensor] = []
        for words in (torch.int32, torch.int64):
            bits = [
                buffer.contiguous().view(words).flatten()
                for adapter in self.adapters
                for buffer in adapter.buffers()
                if buffer.element_size() == words.itemsize
            ]
            size = AT_ONCE // max((of.numel() for of in bits), default=1)
            found += [torch.cat(some).sum(dtype=torch.int64) for some in split(bits, max(size, 1))]
        return sum(torch.stack(found).tolist()) % 2**50


def split(items: Sequence[T], size: int) -> list[list[T]]:
    """In parts of at most `size`."""
    return [list(items[at : at + size]) for at in range(0, len(items), size)]


def gaussian(atoms: Atoms, components: Sequence[int], key: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random directions of length 1 in the place of components; the same ones for a number and key."""
    outputs, inputs = atoms.shape
    right_rN = torch.zeros(len(components), inputs)
    for row, component in enumerate(components):
        digest = hashlib.blake2b(f"{key}/{component}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        right_rN[row] = nn.functional.normalize(torch.randn(inputs, generator=generator), dim=0)
    return torch.zeros(outputs, len(components)), torch.ones(len(components)), right_rN
