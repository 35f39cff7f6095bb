"""Adam counts steps per tensor; rows that arrive later need a count of their own.

    R rows of an adapter

Adam divides its moments by 1 - beta^t, because they began at 0. A row whose moments begin at 0 when
the tensor's count t is far along lacks that: its first updates would be up to six times too large. The
right update of a row that has done s steps is the one that the optimizer makes, times

    sqrt((1 - beta2^s) / (1 - beta2^t)) (1 - beta1^t) / (1 - beta1^s)

(but for `eps`, which is then scaled, too). So young rows are moved by that share of what the optimizer
moved them, and the fused optimizer stays as it is.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.lelora.adapter import Adapter

NEGLIGIBLE = 1e-3
"""A count of steps is of no account any more where the correction is less than this."""


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
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self.beta1, self.beta2 = optimizer.param_groups[0]["betas"]
        self.horizon = math.log(2 * NEGLIGIBLE) / math.log(self.beta2) if self.beta2 else 0.0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Remember where young rows are, and how much of the update is theirs."""
        self._before = []
        for adapter in self.adapters:
            if adapter.young_steps <= 0:
                continue
            for name in adapter.trained:
                parameter = getattr(adapter, name)
                state = optimizer.state[parameter]
                if state:
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    share = self._share(adapter, name, state["step"])[self.slices_of(parameter)]
                    self._before.append((local, local.clone(), share))

    def _share(self, adapter: Adapter, name: str, step: Tensor) -> Tensor:
        """The factor for each entry of a whole tensor, in as many dimensions as it has."""
        letters = name.rpartition("_")[2]
        age_R = adapter.get_buffer("age_R")
        ages = [
            age_R.view([-1 if i == axis else 1 for i in range(len(letters))])
            for axis, letter in enumerate(letters)
            if letter == "R"
        ]
        age = (ages[0] if len(ages) == 1 else torch.minimum(*ages)) + 1
        t = step.to(age.device) + 1

        def corrected(beta: float, count: Tensor) -> Tensor:
            return 1 - torch.pow(torch.tensor(beta, device=age.device), count)

        share = torch.sqrt(corrected(self.beta2, age) / corrected(self.beta2, t))
        share = share * corrected(self.beta1, t) / corrected(self.beta1, age)
        parameter = getattr(adapter, name)
        return share.expand(parameter.shape)

    @torch.no_grad()
    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Young rows get their share; all rows are a step older, unless the step was skipped."""
        for parameter, before, share in self._before:
            parameter.copy_(before + (parameter - before) * share)
        self._before = []
        skipped = getattr(optimizer, "found_inf", None)
        for adapter in self.adapters:
            if adapter.young_steps > 0:
                age_R = adapter.get_buffer("age_R")
                age_R += 1 if skipped is None else (1 - skipped).to(age_R.device)
                adapter.young_steps -= 1
