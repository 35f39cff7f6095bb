"""The subject of an encoder: which label does a text have?"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.lelora.classifying import Classifiers
from benchmarks.lelora.data import Data, Part, base_of, task_of
from benchmarks.lelora.encoder import Encoder, encode
from benchmarks.lelora.ground import Ground, Spectrum, Sums, eigenvectors, spectra_of
from benchmarks.lelora.methods import online_config
from benchmarks.lelora.online import Online, meta_rows
from benchmarks.lelora.subject import Scored, Tuning
from benchmarks.lelora.training import Plan, Run, Together, orders
from models.lelora.padded import Padded
from models.lelora.stacked import Form
from models.linear_probe import Probe, fit_probe
from recipes.lelora.classify import LeloraClassifyConfig
from recipes.lelora.head import probe_rows

EVA_TEXTS = 256
"""As many as the recipe reads in 8 batches of 32."""
PROBE_TEXTS = LeloraClassifyConfig().probe
JUDGING = 0.15
"""Share of the training texts that judge populations: two thirds the rounds, the others the contest."""
TUNING = Tuning(
    {"rslora": 1.5e-3, "pissa": 1e-3, "mica": 6e-3, "adalora": 6e-3, "loraxs": 6e-3, "full": 2e-4,
     "head": 1.2e-2}, 3e-3,
)  # fmt: skip


@torch.no_grad()
def input_directions(base: Encoder, part: Part, texts: int) -> list[Tensor]:
    """Eigenvectors of the sum of x x^T over the inputs x of each matrix, padding included, as rows."""
    sums = Sums()
    for rows in torch.arange(min(texts, len(part)), device=part.labels_X.device).split(32):
        ids, lengths, _ = part[rows[None]]
        encode(base, base.rest, [w[None] for w in base.matrices], ids, lengths, sums)
    return eigenvectors(base, {f"bert.{name}": of for name, of in sums.by_name.items()})


@torch.no_grad()
def probe_of(base: Encoder, part: Part, labels: int, texts: int = PROBE_TEXTS) -> Probe:
    """The recipe's first classifier, with its seed 0."""
    rows = torch.tensor(probe_rows(len(part), texts, 0), device=part.labels_X.device)
    found = []
    for some in rows.split(256):
        ids, lengths, _ = part[some[None]]
        found.append(encode(base, base.rest, [w[None] for w in base.matrices], ids, lengths)[0])
    return fit_probe(torch.cat(found), part.labels_X[rows], labels)


class Classification:
    """See `benchmarks.lelora.subject.Subject`."""

    def __init__(
        self, base: Encoder, spectra: list[Spectrum], stored: Mapping[str, Tensor], task: str,
        rank: int, steps: int,
    ) -> None:  # fmt: skip
        self.base, self.data = base, task_of(stored, task, base.matrices[0].device)
        train = self.data.train
        self.ground = Ground(
            base, spectra, partial(input_directions, base, train, EVA_TEXTS), rank, steps
        )
        self.probe = probe_of(base, train, self.data.labels)
        self.learning, judging = train.split(1 - JUDGING)
        self.judging = judging.split(2 / 3)

    def together(
        self, plan: Plan, forms: Sequence[Form], runs: Sequence[Run], dtype: torch.dtype, *,
        judged: bool = False,
    ) -> Classifiers:  # fmt: skip
        """Runs side by side."""
        data = replace(self.data, train=self.learning) if judged else self.data
        if isinstance(forms[0], Padded):
            return self._online(data, plan, forms[0], runs, dtype)
        return Classifiers(self.base, data, plan, forms, runs, dtype, self.probe)

    def _online(
        self, data: Data, plan: Plan, form: Padded, runs: Sequence[Run], dtype: torch.dtype
    ) -> Classifiers:
        """The same, each with a policy of its own that decides."""
        config, texts = online_config(self.ground), len(data.train)
        apart = {run.seed: meta_rows(config, texts, run.seed) for run in runs}
        rows_SPB = orders([run.seed for run in runs], texts, plan, apart)
        found = Classifiers(self.base, data, plan, [form], runs, dtype, self.probe, rows_SPB)
        Online(found, form, self.ground, config, runs, texts, [found.head_PCD, found.bias_PC])
        return found

    def scored(self, together: Together, part: str) -> list[Scored]:
        """With a bit for each text."""
        assert isinstance(together, Classifiers)
        scores = together.score(getattr(self.data, part))
        return [
            Scored(float(loss), float(correct_X.double().mean()), {
                "texts": len(correct_X),
                "correct": base64.b64encode(np.packbits(correct_X.numpy()).tobytes()).decode(),
            })
            for loss, correct_X in zip(scores.loss_P, scores.correct_PX, strict=True)
        ]  # fmt: skip

    def judged(self, together: Together, check: bool) -> Tensor:
        """Nats of each text."""
        assert isinstance(together, Classifiers)
        return together.score(self.judging[check]).loss_PX


class Classifications:
    """The subject of each task, made when it is first wanted."""

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        *,
        rank: int,
        steps: int,
        device: torch.device,
        heads: int = 12,
    ) -> None:
        self.stored, self.rank, self.steps = stored, rank, steps
        self.base = base_of(stored, device, heads)
        self.spectra = spectra_of(self.base)
        self.made: dict[str, Classification] = {}

    def __call__(self, task: str) -> Classification:
        """Its texts and what methods begin from."""
        if task not in self.made:
            self.made[task] = Classification(
                self.base, self.spectra, self.stored, task, self.rank, self.steps
            )
        return self.made[task]
