"""How much each matrix did for the loss, summed step by step.

    M matrices; one more place, the last, is for all else that trains

The alternative to Simpson's rule on meta samples (`recipes.lelora.credit`): the next batch's gradient
times the step, which costs no pass; but where steps are large it sees noise and curvature, and its sum
had the wrong sign in most periods of our pilot.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recipes.lelora.credit import Measured, Parameters, added_up
from recipes.lelora.ranks import this_rank
from recipes.lelora.shards import copy_all, local


class PathCredit:
    """Step by step: the gradient of the next batch, times the step that led to where it is taken."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Parameters, max_norm: float
    ) -> None:
        self.parameters, self.max_norm = parameters, max_norm
        self.before = {name: p.detach().clone() for name, p in parameters.named.items()}
        device = next((local(t).device for t in self.before.values()), torch.device("cpu"))
        self.total_M = torch.zeros(parameters.size + 1, dtype=torch.float64, device=device)
        self._now_M = torch.zeros_like(self.total_M)
        self.on = True
        optimizer.register_step_pre_hook(self._look)

    def begin(self) -> None:
        """From here on: what a switch changed is no step."""
        self.total_M.zero_()
        self._follow()

    def _follow(self) -> None:
        copy_all([local(before) for before in self.before.values()], self.parameters.values())

    @torch.no_grad()
    def _look(self, *_: Any) -> None:
        """Before a step: the gradient belongs to where the last step led."""
        if not self.on:
            return
        parameters = self.parameters
        before = [local(before) for before in self.before.values()]
        steps = parameters.stacked(list(torch._foreach_sub(before, parameters.values())))
        self._now_M = parameters.dots(parameters.stacked(parameters.gradients()), steps)
        self._follow()

    def after_step(self, norm: Tensor) -> None:
        """Undo the clipping, which came before the look, and add."""
        clipped = torch.ones_like(self.total_M[0])
        if self.max_norm:
            clipped = torch.clamp(self.max_norm / (norm.double() + 1e-6), max=1.0)
        self.total_M += torch.nan_to_num(self._now_M / clipped, 0.0, 0.0, 0.0)

    def instead_of(self, measured: Measured) -> Measured:
        """The same period with this credit. Collective."""
        credit = added_up(self.total_M.clone())
        return replace(measured, credit_M=credit[:-1].clone(), rest=float(credit[-1]))

    def state(self) -> dict[str, Tensor]:
        """Sums over all ranks, and the weights before the last step. Collective."""
        before = {f"before/{name}": tensor.clone() for name, tensor in self.before.items()}
        return {"total": added_up(self.total_M.clone()), **before}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned: rank 0 has the sums."""
        self.total_M.copy_(state["total"] * float(this_rank() == 0))
        for name, before in self.before.items():
            local(before).copy_(local(state[f"before/{name}"]))
