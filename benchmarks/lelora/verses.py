"""The subject of a language model: verses of one translation, given those of another.

S steps, P runs, B pairs of a batch, X pairs, T tokens of a pair, U targets of a pair, V words
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.lelora.decoder import Decoder, Layers, hidden, logits
from benchmarks.lelora.gguf import Packed, dequantised
from benchmarks.lelora.ground import Ground, Spectrum, Sums, eigenvectors
from benchmarks.lelora.subject import Scored, Tuning
from benchmarks.lelora.training import Plan, Run, Together, orders
from models.lelora.padded import Padded
from models.lelora.spectrum import decompose_stack
from models.lelora.stacked import Factors, Form, beside

CHUNK = 800
"""Pairs of all runs that are scored at a time."""
EVA_PAIRS = 256
JUDGING = 400
"""Training pairs that judge populations: two thirds the rounds, the others the contest."""
TUNING = Tuning(
    {"rslora": 1e-3, "pissa": 5e-4, "mica": 4e-3, "adalora": 4e-3, "loraxs": 4e-3, "full": 2e-4}, 2e-3,
    tried=3, seeds=(1000,), by_loss=True,
)  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """A text is the source, then its targets; padded with zeros."""

    ids_XT: Tensor
    first_X: Tensor
    """Where the targets begin."""
    lengths_X: Tensor
    chapters_X: Tensor
    """Numbers of chapters, from 0."""
    targets: int
    """U: the most that a pair has."""

    def __len__(self) -> int:
        return len(self.lengths_X)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids (..., T), places before each target (..., U), and the targets (..., U): -100 for none."""
        ids = self.ids_XT[rows].long()
        at = (
            self.first_X[rows].long()[..., None] - 1 + torch.arange(self.targets, device=ids.device)
        )
        there = at < self.lengths_X[rows][..., None] - 1
        at = at.clamp(max=ids.shape[-1] - 2)
        return ids, at, ids.gather(-1, at + 1).masked_fill(~there, -100)

    def part(self, rows: slice) -> "Pairs":
        """Some of them."""
        return Pairs(self.ids_XT[rows], self.first_X[rows], self.lengths_X[rows], self.chapters_X[rows],
                     self.targets)  # fmt: skip


def pairs_of(stored: Mapping[str, Tensor], part: str, device: torch.device) -> Pairs:
    """What `benchmarks.lelora.prepare_kjv` has packed."""
    ids, first, lengths, chapters = (
        stored[f"kjv/{part}/{kind}"].to(torch.int32).to(device)
        for kind in ("ids", "first", "lengths", "chapters")
    )
    every = [stored[f"kjv/{p}/{kind}"].int() for p in ("train", "validation", "test")
             for kind in ("lengths", "first")]  # fmt: skip
    most = max(int((of - begin).max()) for of, begin in zip(every[::2], every[1::2], strict=True))
    return Pairs(ids, first, lengths, chapters, most)


def decoder_of(stored: Mapping[str, Tensor], device: torch.device) -> Decoder:
    """The language model: the numbers that its file stands for, in fp32."""
    named = {}
    for name, tensor in stored.items():
        if name.startswith("model/"):
            _, name, kind, columns = name.split("/")
            shape = (-1, int(columns)) if int(columns) else (-1,)
            named[name] = dequantised(Packed(shape, int(kind), tensor.to(device)))
    heads, narrow_heads, theta, epsilon = stored["about"].tolist()
    return Decoder.of(named, int(heads), int(narrow_heads), theta, epsilon)


class Writers(Together):
    """Language models, trained on the targets of pairs."""

    def __init__(
        self, base: Decoder, train: Pairs, plan: Plan, forms: Sequence[Form], runs: Sequence[Run],
        dtype: torch.dtype, rows_SPB: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.train_pairs = base, train
        self.shared = [w.to(dtype) for w in base.matrices]
        if rows_SPB is None:
            rows_SPB = orders([run.seed for run in runs], len(train), plan)
        super().__init__(base, plan, forms, runs, dtype, rows_SPB)

    def layers(self) -> Layers:
        """Of all runs, as they are now."""
        if self.everything:
            every = [form.weights(self.dtype) for form in self.forms]
            whole = [torch.cat(of) if len(of) > 1 else of[0] for of in zip(*every, strict=True)]
            return Layers(self.decoder, [], [], whole)
        factors = beside([form.factors(self.dtype) for form in self.forms])
        return Layers(self.decoder, self.shared, factors)

    def nats(
        self, layers: Layers, rest: dict[str, Tensor], pairs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of each target, (P, B, U), 0 where there is none; and logits, (P B U, V)."""
        ids_PBT, at_PBU, targets_PBU = pairs
        logits_PXV = logits(self.decoder, rest, layers, ids_PBT, at_PBU)
        flat = logits_PXV.flatten(0, 1)
        found = nn.functional.cross_entropy(flat, targets_PBU.flatten(), reduction="none")
        return found.view_as(targets_PBU), flat

    def losses(self, rows_PB: Tensor) -> Tensor:
        """Nats of a target, in the mean over a run's batch."""
        pairs = self.train_pairs[rows_PB]
        nats_PBU, _ = self.nats(self.layers(), self.cast(self.rest), pairs)
        targets_P = (pairs[2] >= 0).flatten(1).sum(1)
        return nats_PBU.flatten(1).sum(1) / targets_P

    @torch.no_grad()
    def score(self, part: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        """Nats and what is right of each pair, (P, X), and its targets (X)."""
        layers, rest = self.layers(), self.cast(self.rest)
        P, nats, right, targets = len(self.optimizer.lr_P), [], [], []
        for rows in torch.arange(len(part), device=self.device).split(max(CHUNK // P, 1)):
            pairs = part[rows.expand(P, len(rows))]
            nats_PBU, flat = self.nats(layers, rest, pairs)
            nats.append(nats_PBU.double().sum(2))
            right.append((flat.argmax(-1).view_as(pairs[2]) == pairs[2]).sum(2))
            targets.append((pairs[2][0] >= 0).sum(1))
        return torch.cat(nats, 1).cpu(), torch.cat(right, 1).cpu(), torch.cat(targets).cpu()


@torch.no_grad()
def input_directions(base: Decoder, part: Pairs, pairs: int) -> list[Tensor]:
    """Eigenvectors of the sum of x x^T over the inputs x of each matrix, padding included, as rows."""
    sums = Sums()
    none = [
        Factors(w.new_zeros(1, *w.shape[:2], 1), w.new_zeros(1, len(w), 1, w.shape[2]))
        for w in base.matrices
    ]
    layers = Layers(base, base.matrices, none, look=sums)
    for rows in torch.arange(min(pairs, len(part)), device=part.first_X.device).split(32):
        hidden(base, base.rest, layers, part[rows[None]][0])
    return eigenvectors(base, sums.by_name)


class Verses:
    """See `benchmarks.lelora.subject.Subject`."""

    def __init__(
        self, stored: Mapping[str, Tensor], *, rank: int, steps: int, device: torch.device,
        pairs: int | None = None,
    ) -> None:  # fmt: skip
        """Of validation and test, only the first `pairs`."""
        self.base = decoder_of(stored, device)
        every = {p: pairs_of(stored, p, device) for p in ("train", "validation", "test")}
        self.train = every["train"]
        every = {p: of.part(slice(pairs)) for p, of in every.items()}
        judging = min(JUDGING, len(self.train) // 4)
        self.learning = self.train.part(slice(len(self.train) - judging))
        edge = len(self.train) - judging // 3
        self.judging = (
            self.train.part(slice(len(self.train) - judging, edge)),
            self.train.part(slice(edge, None)),
        )
        self.parts = every
        whole = ("validation", "test") if pairs is None else ()
        self.bytes = {p: int(stored[f"kjv/{p}/bytes"]) for p in whole}
        look = partial(input_directions, self.base, self.train, EVA_PAIRS)
        spectra = [Spectrum(*decompose_stack(w_LMN)) for w_LMN in self.base.matrices]
        self.ground = Ground(self.base, spectra, look, rank, steps)

    def __call__(self, task: str) -> "Verses":
        """The only task."""
        assert task == "kjv"
        return self

    def together(
        self, plan: Plan, forms: Sequence[Form], runs: Sequence[Run], dtype: torch.dtype, *,
        judged: bool = False,
    ) -> Writers:  # fmt: skip
        """Runs side by side. No policy decides during these."""
        assert not any(isinstance(form, Padded) for form in forms)
        train = self.learning if judged else self.train
        return Writers(self.base, train, plan, forms, runs, dtype)

    def scored(self, together: Together, part: str) -> list[Scored]:
        """With the nats and targets of each chapter."""
        assert isinstance(together, Writers)
        nats_PX, right_PX, targets_X = together.score(self.parts[part])
        chapters_X = self.parts[part].chapters_X.cpu().long()
        targets_C = torch.bincount(chapters_X, targets_X.double())
        there_C = targets_C > 0  # not, where only some pairs are scored
        found = []
        for nats_X, right_X in zip(nats_PX, right_PX, strict=True):
            nats_C = torch.bincount(chapters_X, nats_X)
            kept = {"nats": [round(x, 4) for x in nats_C[there_C].tolist()],
                    "targets": [int(x) for x in targets_C[there_C].tolist()],
                    "bytes": self.bytes.get(part, 0)}  # fmt: skip
            total = float(targets_X.sum())
            found.append(Scored(float(nats_X.sum()) / total, float(right_X.sum()) / total, kept))
        return found

    def judged(self, together: Together, check: bool) -> Tensor:
        """Nats of each pair, in such a unit that their mean is that of a target."""
        assert isinstance(together, Writers)
        nats_PX, _, targets_X = together.score(self.judging[check])
        return nats_PX / targets_X.double().mean()
