"""Adam counts steps per tensor; rows that arrive later need a count of their own.

    R rows of an adapter

Adam divides its moments by 1 - beta^t, because they began at 0. A row whose moments begin at 0 when
the tensor's count t is far along lacks that: its first updates would be up to six times too large. The
right update of a row that has done s steps is the one that the optimizer makes, times

    sqrt((1 - beta2^s) / (1 - beta2^t)) (1 - beta1^t) / (1 - beta1^s)

(but for `eps`, which is then scaled, too). So young rows are moved by that share of what the optimizer
moved them, and the fused optimizer stays as it is.

Rows that came with their tensor have its count, and a share of 1: adapters that have no others are left
alone. Whether an adapter has is looked up after a switch or loading, which is when the host waits; from
step to step, it never does, and all adapters are worked on at once, for it is calls that cost.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.lelora.adapter import Adapter

NEGLIGIBLE = 1e-3
"""A count of steps is of no account any more where the correction is less than this."""


@dataclass(frozen=True)
class _Part:
    """A parameter some of whose rows are younger than it is; E counts the entries of all of them."""

    parameter: Tensor
    local: Tensor
    place_E: slice
    shape: tuple[int, ...]
    """Of its entries: R along each axis that counts rows, else 1."""


@dataclass(frozen=True)
class _Younger:
    """All of them, and where each entry's age is in `torch.cat(ages)`."""

    parts: Sequence[_Part]
    ages: Sequence[Tensor]
    rows_2E: Tensor
    """An entry between two rows is as young as the younger of them."""
    parts_E: Tensor


class RowSteps:
    """Corrects what an AdamW does to the rows of adapters that are younger than their tensors."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        adapters: Iterable[Adapter],
        slices_of: Callable[[Tensor], tuple[slice, ...]] | None = None,
    ) -> None:
        """`slices_of` tells which part of a tensor is here, where tensors are sharded."""
        self.adapters = list(adapters)
        self.slices_of = slices_of or (lambda tensor: (slice(None),) * tensor.ndim)
        self._younger: _Younger | None = None
        self._before: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.beta1, self.beta2 = optimizer.param_groups[0]["betas"]
        self.horizon = math.log(2 * NEGLIGIBLE) / math.log(self.beta2) if self.beta2 else 0.0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Remember where young rows are, and how much of the update is not theirs."""
        if any(adapter.has_younger is None for adapter in self.adapters):
            self._younger = self._look(optimizer)
        if self._younger is not None:
            parts = self._younger.parts
            rest_E = 1 - self._share(self._younger, optimizer)
            rests = [
                rest_E[part.place_E]
                .view(part.shape)
                .expand(part.parameter.shape)[self.slices_of(part.parameter)]
                for part in parts
            ]
            self._before = [part.local.clone() for part in parts], rests

    def _look(self, optimizer: torch.optim.Optimizer) -> _Younger | None:
        """What there is to correct from now on; waits for the device."""
        unknown: list[tuple[Adapter, Tensor]] = []
        for adapter in self.adapters:
            if adapter.has_younger is None:
                steps = _steps(adapter, optimizer) if adapter.young_steps > 0 else {}
                adapter.has_younger = False
                if steps:
                    buffers = dict(adapter.named_buffers())
                    step = torch.stack(list(steps.values())).max().to(buffers["age_R"].device)
                    lives_R = buffers["components_R"] >= 0
                    unknown.append((adapter, (lives_R & (buffers["age_R"] < step)).any()))
        found = torch.stack([flag for _, flag in unknown]).tolist() if unknown else []
        for (adapter, _), has_younger in zip(unknown, found, strict=True):
            adapter.has_younger = has_younger
        return _gathered([a for a in self.adapters if a.has_younger], optimizer)

    def _share(self, younger: _Younger, optimizer: torch.optim.Optimizer) -> Tensor:
        """The factor for each entry, (E,)."""
        age_E = torch.cat(list(younger.ages))[younger.rows_2E].amin(0)
        steps = [optimizer.state[part.parameter]["step"] for part in younger.parts]
        step_E = torch.stack(steps).to(age_E.device)[younger.parts_E]
        count_2E = torch.stack([age_E, step_E]) + 1
        one_2E, two_2E = (1 - beta**count_2E for beta in (self.beta1, self.beta2))
        return torch.sqrt(two_2E[0] / two_2E[1]) * one_2E[1] / one_2E[0]

    @torch.no_grad()
    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Young rows get their share; all rows are a step older, unless the step was skipped."""
        before, rests = self._before
        if before and self._younger is not None:
            torch._foreach_lerp_([part.local for part in self._younger.parts], before, rests)
        self._before = [], []
        counted = [adapter for adapter in self.adapters if adapter.young_steps > 0]
        if not counted:
            return
        ages = [adapter.get_buffer("age_R") for adapter in counted]
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is None:
            torch._foreach_add_(ages, 1.0)
        else:
            torch._foreach_add_(ages, (1 - skipped).reshape(()).to(ages[0].device))
        for adapter in counted:
            adapter.young_steps -= 1
            if adapter.young_steps == 0 and adapter.has_younger:
                adapter.has_younger = None


def _steps(adapter: Adapter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Counts of those of its parameters that have been stepped."""
    states = {name: optimizer.state.get(getattr(adapter, name), {}) for name in adapter.trained}
    return {name: state["step"] for name, state in states.items() if state}


def _gathered(adapters: Sequence[Adapter], optimizer: torch.optim.Optimizer) -> _Younger | None:
    """Their parameters, in one list of entries."""
    parts: list[_Part] = []
    rows, owners, first, end = [], [], 0, 0
    for adapter in adapters:
        R = adapter.rows
        own_R = torch.arange(first, first + R)
        first += R
        for name in _steps(adapter, optimizer):
            letters = name.rpartition("_")[2]
            pair = (own_R[:, None], own_R) if letters.count("R") == 2 else (own_R, own_R)
            rows.append(torch.stack([of.flatten() for of in torch.broadcast_tensors(*pair)]))
            owners.append(torch.full((rows[-1].shape[1],), len(parts)))
            parameter = getattr(adapter, name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            place_E = slice(end, end := end + rows[-1].shape[1])
            shape = tuple(R if letter == "R" else 1 for letter in letters)
            parts.append(_Part(parameter, local, place_E, shape))
    if not parts:
        return None
    ages = [adapter.get_buffer("age_R") for adapter in adapters]
    device = ages[0].device
    return _Younger(parts, ages, torch.cat(rows, 1).to(device), torch.cat(owners).to(device))
