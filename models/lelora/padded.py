"""Adapters of many runs side by side whose rows are switched between steps, each run's by itself.

    P runs, L matrices of one shape, M outputs, N inputs, R rows (padded), C rows of what is folded

What one `models.lelora.adapter.Adapter` (`dir_ab`) holds, stacked over matrices and runs, under the
same names. Nothing changes its shape or place, so a step that was recorded in a CUDA graph stays right
after a switch. Adam's count of steps is each row's own: see `models.lelora.row_steps`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.lelora.stacked import Factors, Form


class Padded(Form):
    """Without any row at first: a switch gives some."""

    def __init__(self, base: Sequence[Tensor], runs: int, rows: int, fold_rows: int) -> None:
        def zeros(*sizes: int | str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
            """Of each group; letters stand for the sizes of its matrices."""
            found = []
            for w in base:
                letters = {"L": w.shape[0], "M": w.shape[1], "N": w.shape[2]}
                shape = [letters[s] if isinstance(s, str) else s for s in sizes]
                found.append(torch.zeros(shape, dtype=dtype, device=w.device))
            return found

        a, b = zeros(runs, "L", rows, "N"), zeros(runs, "L", "M", rows)
        super().__init__(runs, [*a, *b])
        self.base, self.groups, self.rows, self.fold_rows = base, len(base), rows, fold_rows
        self.gate, self.age = zeros(runs, "L", rows), zeros(runs, "L", rows)
        self.scale = [scale.fill_(1.0) for scale in zeros(runs, "L")]
        self.components = [of.fill_(-1) for of in zeros(runs, "L", rows, dtype=torch.int64)]
        self.fold_b = zeros(runs, "L", "M", fold_rows)
        self.fold_a = zeros(runs, "L", fold_rows, "N")
        self.steps_P = torch.zeros(runs, device=base[0].device)
        """Steps that a run has made, for what trains beside its adapters."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """(P, L, ...) of each group, by the names that an adapter has for them."""
        return {
            "a_RN": self.parameters[: self.groups], "b_MR": self.parameters[self.groups :],
            "fold_b_MC": self.fold_b, "fold_a_CN": self.fold_a, "gate_R": self.gate,
            "scale": self.scale, "age_R": self.age, "components_R": self.components,
        }  # fmt: skip

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """Rows, then the fold."""
        found = []
        for n in range(self.groups):
            a, b = self.parameters[n], self.parameters[self.groups + n]
            left = torch.cat([b * self.gate[n][..., None, :], self.fold_b[n]], -1)
            right = torch.cat([a, self.fold_a[n]], -2)
            found.append(Factors(left.to(dtype), right.to(dtype)))
        return found

    def ages(self) -> list[Tensor]:
        """Steps of the rows of each parameter, in a shape that goes with it."""
        return [age[..., None] for age in self.age] + [age[..., None, :] for age in self.age]

    @torch.no_grad()
    def before_step(self, gradients: list[Tensor]) -> list[Tensor]:
        """All rows are a step older."""
        for age in (*self.age, self.steps_P):
            age += 1
        return gradients
