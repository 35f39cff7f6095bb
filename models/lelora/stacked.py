"""What many runs side by side train of their matrices, by method: whole weights, run by run.

    P runs, L matrices of one shape, M outputs, N inputs, R rows (padded), K rows of a product

`models.lelora.population` adds each run's adapter to what a shared layer gives, so that no run has a
base model of its own. Where the model is small, this here is faster, and the same for every method: a
form makes each run's whole weights out of what the run trains, and gradients come back the same way. In
16 bits, a small update on top of a weight can be less than that weight's last bit; so a form also gives
its update by itself (`factors`), for products of its own. Matrices of one shape are one tensor.
Everything is worked out in `dtype`; what trains is in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Where one run's low-rank adapters begin, for each group of matrices of one shape."""

    a_LRN: list[Tensor]
    b_LMR: list[Tensor]
    gate_LR: list[Tensor]
    """What the product of a row is multiplied by; 0: no such row."""
    anchored: bool = False
    """The first product is taken off the base weight, so that the function stays (PiSSA)."""
    trains_b: bool = True


@dataclass(frozen=True)
class Factors:
    """Runs' layers beside weights that all share: (1 + stretch) (W x + left right x)."""

    left_PLMK: Tensor
    right_PLKN: Tensor
    stretch_PLM: Tensor | None = None
    """Without the 1, which would take all but the first of a small change's bits. None: 0."""


class Form:
    """Some runs of one method. `parameters` are those that train, their first axes count runs."""

    base: Sequence[Tensor]
    """(L, M, N) of each group, the same for all runs."""

    def __init__(self, runs: int, parameters: Sequence[Tensor]) -> None:
        self.runs = runs
        self.parameters = [p.detach().clone().requires_grad_() for p in parameters]

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """(P, L, M, N) of each group: the base and what is added to it."""
        return [
            added(w, of.left_PLMK, of.right_PLKN, dtype)
            for w, of in zip(self.base, self.factors(dtype), strict=True)
        ]

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """Of each group, where not whole weights train."""
        raise NotImplementedError

    def masked(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients before clipping, without those of what does not train."""
        return gradients

    def before_step(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients after clipping, as the optimizer gets them."""
        return gradients

    def after_step(self, gradients: list[Tensor]) -> None:
        """What else happens to the parameters in a step."""


class Whole(Form):
    """Everything trains."""

    def __init__(self, base: Sequence[Tensor], runs: int) -> None:
        super().__init__(runs, [w.float().expand(runs, *w.shape) for w in base])

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The parameters themselves."""
        return [p.to(dtype) for p in self.parameters]


class Frozen(Form):
    """No matrix trains."""

    def __init__(self, base: Sequence[Tensor], runs: int) -> None:
        super().__init__(runs, [])
        self.base = base

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The base for every run."""
        return [w.to(dtype).expand(self.runs, *w.shape) for w in self.base]

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """Nothing is added."""
        runs = self.runs
        return [
            Factors(
                w.new_zeros(runs, *w.shape[:2], 1, dtype=dtype),
                w.new_zeros(runs, len(w), 1, w.shape[2], dtype=dtype),
            )
            for w in self.base
        ]


class Products(Form):
    """W + B diag(gate) A, without what it was at the start if it is anchored."""

    def __init__(self, base: Sequence[Tensor], starts: Sequence[Rows]) -> None:
        a = [torch.stack(of) for of in zip(*(s.a_LRN for s in starts), strict=True)]
        b = [torch.stack(of) for of in zip(*(s.b_LMR for s in starts), strict=True)]
        super().__init__(len(starts), [*a, *b])
        self.base, self.groups = base, len(base)
        device = base[0].device
        self.gate = [
            torch.stack(of)[..., None, :] for of in zip(*(s.gate_LR for s in starts), strict=True)
        ]
        trains_b = torch.tensor([float(s.trains_b) for s in starts], device=device)
        self.trains_b_P = None if all(s.trains_b for s in starts) else trains_b
        anchored_P = torch.tensor([float(s.anchored) for s in starts], device=device)
        self.anchors: list[tuple[Tensor, Tensor]] = []
        if any(s.anchored for s in starts):
            kept = anchored_P.view(-1, 1, 1, 1)
            self.anchors = [
                (x.clone(), -y * g * kept) for x, y, g in zip(a, b, self.gate, strict=True)
            ]

    def products(self, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Left and right factors of the update."""
        right, left = self.parameters[group], self.parameters[self.groups + group]
        left = left * self.gate[group]
        if self.anchors:
            right0, left0 = self.anchors[group]
            left, right = torch.cat([left, left0], -1), torch.cat([right, right0], -2)
        return left.to(dtype), right.to(dtype)

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """The update."""
        return [Factors(*self.products(n, dtype)) for n in range(self.groups)]

    def masked(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients before clipping, without those of what does not train."""
        if self.trains_b_P is None:
            return gradients
        mask = self.trains_b_P.view(-1, 1, 1, 1)
        return [g if n < self.groups else g * mask for n, g in enumerate(gradients)]


class Magnitudes(Products):
    """DoRA: rows of W + B A, brought to lengths that train. Their own lengths count as constant."""

    def __init__(self, base: Sequence[Tensor], starts: Sequence[Rows]) -> None:
        super().__init__(base, starts)
        lengths = [torch.linalg.vector_norm(w, dim=-1).expand(self.runs, -1, -1) for w in base]
        self.parameters += [length.clone().requires_grad_() for length in lengths]

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """Directions times lengths."""
        found = []
        for n, w in enumerate(self.base):
            whole = added(w, *self.products(n, dtype), dtype)
            length = torch.linalg.vector_norm(whole.detach(), dim=-1, dtype=torch.float32)
            factor = self.parameters[2 * self.groups + n] / length
            found.append(whole * factor[..., None].to(dtype))
        return found

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """The update, and lengths over those of W + B A."""
        found = []
        for n, w in enumerate(self.base):
            left, right = self.products(n, torch.float32)
            with torch.no_grad():
                length = lengths(w.float(), left, right)
            stretch = (self.parameters[2 * self.groups + n] - length) / length
            found.append(Factors(left.to(dtype), right.to(dtype), stretch.to(dtype)))
        return found


class Cores(Form):
    """W + U R V with fixed outer factors, the same for all runs; R begins at zero (LoRA-XS)."""

    def __init__(
        self, base: Sequence[Tensor], left_LMR: list[Tensor], right_LRN: list[Tensor], runs: int
    ) -> None:
        sizes = [(runs, len(u), u.shape[-1], u.shape[-1]) for u in left_LMR]
        super().__init__(runs, [base[0].new_zeros(size, dtype=torch.float32) for size in sizes])
        self.base, self.left, self.right = base, left_LMR, right_LRN

    def factors(self, dtype: torch.dtype) -> list[Factors]:
        """The update."""
        return [
            Factors(u.to(dtype) @ core.to(dtype), v.to(dtype).expand(self.runs, *v.shape))
            for u, core, v in zip(self.left, self.parameters, self.right, strict=True)
        ]


def added(w_LMN: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """W + left right in one product, summed in fp32 where `dtype` has fewer bits."""
    P, L, M, K = left.shape
    N = right.shape[-1]
    base = w_LMN.to(dtype).expand(P, L, M, N).reshape(P * L, M, N)
    found = torch.baddbmm(base, left.reshape(P * L, M, K), right.reshape(P * L, K, N))
    return found.view(P, L, M, N)


def lengths(w_LMN: Tensor, left_PLMK: Tensor, right_PLKN: Tensor) -> Tensor:
    """Of the rows of W + left right, (P, L, M), without making these."""
    across_PLMK = w_LMN @ right_PLKN.transpose(-1, -2)
    gram_PLKK = right_PLKN @ right_PLKN.transpose(-1, -2)
    both = left_PLMK * (2 * across_PLMK + left_PLMK @ gram_PLKK)
    return (w_LMN.square().sum(-1) + both.sum(-1)).clamp(min=0).sqrt()


def beside(factors: Sequence[list[Factors]]) -> list[Factors]:
    """Those of all forms as one for each group, with as many rows as the widest has, in eights.

    Products of 16 bits are slow where rows do not begin at multiples of 16 bytes.
    """
    found = []
    for of in zip(*factors, strict=True):
        widest = -(-max(f.left_PLMK.shape[-1] for f in of) // 8) * 8
        left, right = [], []
        for f in of:
            more = widest - f.left_PLMK.shape[-1]
            left.append(torch.nn.functional.pad(f.left_PLMK, (0, more)))
            right.append(torch.nn.functional.pad(f.right_PLKN, (0, 0, 0, more)))
        stretch = None
        if any(f.stretch_PLM is not None for f in of):
            each = [
                f.left_PLMK.new_zeros(f.left_PLMK.shape[:-1])
                if f.stretch_PLM is None
                else f.stretch_PLM
                for f in of
            ]
            stretch = torch.cat(each)
        found.append(Factors(torch.cat(left), torch.cat(right), stretch))
    return found
