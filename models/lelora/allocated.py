"""AdaLoRA for many runs side by side: triplets, and which of them a falling budget leaves.

    P runs, L matrices of one shape, M outputs, N inputs, R triplets of a matrix

As peft has it: an update B diag(E) A of which E begins at zero, a penalty for factors that are not
orthogonal, importance as a smoothed product of parameter and gradient, times its smoothed change, and a
budget of triplets over all matrices that falls with the cube of the time left. Nothing waits for the
device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.lelora.stacked import Factors, Form

SMOOTH = 0.85
"""How much of importance, and of its change, is kept from step to step."""
PENALTY = 0.5


@dataclass(frozen=True)
class Falling:
    """The number of triplets over the steps, as peft's `AdaLoraConfig` has them."""

    first: int
    """Of each matrix, at the start."""
    last: int
    """Of each matrix in the mean, at the end."""
    steps: int
    begin: int
    """Steps before the budget falls (`tinit`)."""
    end: int
    """Steps after it has fallen (`tfinal`)."""
    every: int
    """Steps between two cuts (`deltaT`)."""

    def of(self, step: int, matrices: int) -> tuple[int, bool, bool]:
        """After a step (from 1): triplets, whether they are cut, whether importance is updated."""
        full, final = self.first * matrices, self.last * matrices
        counts = step < self.steps - self.end
        if step <= self.begin:
            return full, False, counts
        if step > self.steps - self.end:
            return final, True, counts
        left = 1 - (step - self.begin) / (self.steps - self.end - self.begin)
        return int((full - final) * left**3 + final), step % self.every == 0, counts


class Allocated(Form):
    """Some runs of AdaLoRA. `start` has A (L, R, N) and B (L, M, R) of each group, for every run."""

    def __init__(
        self,
        base: Sequence[Tensor],
        start: Sequence[tuple[list[Tensor], list[Tensor]]],
        falling: Falling,
        alpha: float,
    ) -> None:
        a = [torch.stack(of) for of in zip(*(s[0] for s in start), strict=True)]
        b = [torch.stack(of) for of in zip(*(s[1] for s in start), strict=True)]
        e = [x.new_zeros(*x.shape[:3]) for x in a]
        super().__init__(len(start), [*a, *b, *e])
        self.base, self.groups, self.scale = base, len(base), alpha / (falling.first + 1e-5)
        self.matrices = sum(len(w) for w in base)
        plan = [falling.of(step, self.matrices) for step in range(1, falling.steps + 1)]
        device = base[0].device
        self.cut = torch.tensor(
            [falling.first * self.matrices - budget for budget, _, _ in plan], device=device
        )
        self.cuts = torch.tensor([cuts for _, cuts, _ in plan], device=device)
        self.counts = torch.tensor([counts for _, _, counts in plan], device=device)
        self.importance = [torch.zeros_like(p) for p in self.parameters]
        self.change = [torch.zeros_like(p) for p in self.parameters]
        self.done = torch.zeros((), dtype=torch.long, device=device)

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """The update."""
        found = []
        for n in range(self.groups):
            a, b, e = (self.parameters[k * self.groups + n] for k in range(3))
            found.append(Factors((b * (self.scale * e)[..., None, :]).to(dtype), a.to(dtype)))
        return found

    def before_step(self, gradients: list[Tensor]) -> list[Tensor]:
        """With the gradient of |A A^T - 1| and |B^T B - 1|, mean over factors."""
        factors = self.parameters[: 2 * self.groups]
        with torch.enable_grad():
            total = gradients[0].new_zeros(())
            for number, factor in enumerate(factors):
                rows = factor if number < self.groups else factor.transpose(-1, -2)
                product = rows @ rows.transpose(-1, -2)
                eye = torch.eye(product.shape[-1], device=product.device)
                total = total + torch.linalg.matrix_norm(product - eye).sum()
            penalty = torch.autograd.grad(PENALTY * total / (2 * self.matrices), factors)
        summed = [g + p for g, p in zip(gradients, penalty, strict=False)]
        return [*summed, *gradients[len(factors) :]]

    @torch.no_grad()
    def after_step(self, gradients: list[Tensor]) -> None:
        """Importance follows, and what the budget leaves no place for becomes zero."""
        at = torch.clamp(self.done, max=len(self.cut) - 1)[None]
        counts = self.counts.index_select(0, at)[0]
        for p, g, kept, change in zip(
            self.parameters, gradients, self.importance, self.change, strict=True
        ):
            now = (p * g).abs()
            mean = SMOOTH * kept + (1 - SMOOTH) * now
            spread = SMOOTH * change + (1 - SMOOTH) * (now - mean).abs()
            kept.copy_(torch.where(counts, mean, kept))
            change.copy_(torch.where(counts, spread, change))
        scores = [x * y for x, y in zip(self.importance, self.change, strict=True)]
        groups = self.groups
        of_triplets = [
            scores[2 * groups + n] + scores[n].mean(-1) + scores[groups + n].mean(-2)
            for n in range(groups)
        ]
        every_PT = torch.cat([s.flatten(1) for s in of_triplets], 1)
        cut = self.cut.index_select(0, at)[0]
        place = torch.clamp(cut - 1, min=0).expand(len(every_PT), 1)
        threshold_P1 = every_PT.sort(1).values.gather(1, place)
        cuts = self.cuts.index_select(0, at)[0] & (cut > 0)
        for n, score in enumerate(of_triplets):
            gone = (score <= threshold_P1[..., None]) & cuts
            self.parameters[2 * groups + n].masked_fill_(gone, 0.0)
        self.done += 1

    def ranks(self) -> Tensor:
        """Triplets of all matrices that are left, (P,)."""
        return sum(
            ((e != 0).flatten(1).sum(1) for e in self.parameters[2 * self.groups :]),
            torch.zeros(self.runs, dtype=torch.long, device=self.done.device),
        )
