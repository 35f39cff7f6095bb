"""Classifiers of texts, trained side by side: an encoder's matrices and a linear layer on top.

S steps, P runs, B texts of a batch, X texts, D hidden, C labels
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.lelora.data import Data, Part
from benchmarks.lelora.encoder import Encoder, encode
from benchmarks.lelora.training import Plan, Run, Together, orders
from models.lelora.stacked import Form
from models.linear_probe import Probe

CHUNK = 100
"""Texts that are scored at a time, by all runs."""


@dataclass(frozen=True)
class Scores:
    """Of one part, by run."""

    loss_PX: Tensor
    correct_PX: Tensor
    """Booleans."""

    @property
    def loss_P(self) -> Tensor:  # noqa: N802
        """Mean over the texts."""
        return self.loss_PX.mean(1)


class Classifiers(Together):
    """All of them begin with the classifier `probe`."""

    def __init__(
        self, base: Encoder, data: Data, plan: Plan, forms: Sequence[Form], runs: Sequence[Run],
        dtype: torch.dtype, probe: Probe, rows_SPB: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.encoder, self.data = base, data
        self.head_PCD, self.bias_PC = (
            part.to(base.matrices[0].device).expand(len(runs), *part.shape).clone().requires_grad_()
            for part in probe
        )
        if rows_SPB is None:
            rows_SPB = orders([run.seed for run in runs], len(data.train), plan)
        head = [self.head_PCD, self.bias_PC]
        super().__init__(base, plan, forms, runs, dtype, rows_SPB, head)

    def matrices(self) -> list[Tensor]:
        """Whole weights of all runs, group by group."""
        every = [form.weights(self.dtype) for form in self.forms]
        return [torch.cat(of) if len(of) > 1 else of[0] for of in zip(*every, strict=True)]

    def logits(
        self, matrices: list[Tensor], rest: dict[str, Tensor], texts: tuple[Tensor, ...]
    ) -> Tensor:
        """(P, B, C) in fp32."""
        pooled_PBD = encode(self.encoder, rest, matrices, texts[0], texts[1])
        return torch.baddbmm(self.bias_PC[:, None], pooled_PBD, self.head_PCD.transpose(1, 2))

    def losses(self, rows_PB: Tensor) -> Tensor:
        """Cross-entropy of the labels."""
        texts = self.data.train[rows_PB]
        logits_PBC = self.logits(self.matrices(), self.cast(self.rest), texts)
        loss_X = nn.functional.cross_entropy(
            logits_PBC.flatten(0, 1), texts[2].flatten(), reduction="none"
        )
        return loss_X.view_as(rows_PB).mean(1)

    @torch.no_grad()
    def score(self, part: Part) -> Scores:
        """Loss and what is right, of every run."""
        matrices, rest, P = self.matrices(), self.cast(self.rest), len(self.head_PCD)
        losses, correct = [], []
        for rows in torch.arange(len(part), device=self.device).split(CHUNK):
            texts = part[rows.expand(P, len(rows))]
            logits_PBC = self.logits(matrices, rest, texts)
            of = nn.functional.cross_entropy(
                logits_PBC.flatten(0, 1), texts[2].flatten(), reduction="none"
            )
            losses.append(of.view(P, -1))
            correct.append(logits_PBC.argmax(-1) == texts[2])
        return Scores(torch.cat(losses, 1).cpu(), torch.cat(correct, 1).cpu())
