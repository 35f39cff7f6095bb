"""Many runs side by side as one batched model: one base, as many adapters, heads and learning rates.

    P runs, B samples, M outputs, N inputs, R rows of an adapter

A batch is repeated for every run, run by run, and goes through the base model once. Beside each adapted
layer, every run has its own adapter (`dir_ab`), and every linear layer of a head is one for each run. No
run sees another: their losses are added, so each has the gradients it would have alone; gradients are
clipped and steps are made run by run. So the result is that of separate runs, but for rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.lelora.inject import Target
from models.lelora.switch import Directions


@dataclass(frozen=True)
class Member:
    """One run: what it trains of each matrix, and how fast."""

    components: Sequence[Sequence[int]]
    """Of each target."""
    scales: Sequence[float]
    """Of each target."""
    lr: float


class StackedAdapter(nn.Module):
    """The adapters of all runs beside one layer; rows that a run does not have are closed."""

    def __init__(self, members: Sequence[Member], matrix: int, directions: Directions) -> None:
        super().__init__()
        rows = max(1, *(len(member.components[matrix]) for member in members))
        found = [directions(list(member.components[matrix])) for member in members]
        M, N = found[0][0].shape[0], found[0][2].shape[1]
        a_PRN = torch.zeros(len(members), rows, N)
        gate_PR = torch.zeros(len(members), rows)
        for run, (member, (_, _, right_rN)) in enumerate(zip(members, found, strict=True)):
            a_PRN[run, : len(right_rN)] = right_rN
            gate_PR[run, : len(right_rN)] = member.scales[matrix]
        self.a_PRN = nn.Parameter(a_PRN)
        self.b_PMR = nn.Parameter(torch.zeros(len(members), M, rows))
        self.register_buffer("gate_PR", gate_PR)

    def forward(self, x_N: Tensor) -> Tensor:
        """What to add, for inputs whose first axis counts samples of the first run, the second, ..."""
        runs = self.a_PRN.shape[0]
        gate_P1R = self.get_buffer("gate_PR")[:, None]
        x_PXN = x_N.reshape(runs, -1, x_N.shape[-1])
        h_PXR = torch.bmm(x_PXN, self.a_PRN.transpose(1, 2)) * gate_P1R
        return torch.bmm(h_PXR, self.b_PMR.transpose(1, 2)).view(*x_N.shape[:-1], -1)


class StackedLinear(nn.Module):
    """A linear layer of its own for each run, all beginning with the same values."""

    def __init__(self, linear: nn.Linear, runs: int) -> None:
        super().__init__()
        self.weight_PMN = nn.Parameter(linear.weight.detach().expand(runs, -1, -1).clone())
        bias = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        self.bias_P1M = nn.Parameter(bias.detach().expand(runs, 1, -1).clone())
        self.bias_P1M.requires_grad_(linear.bias is not None)

    def forward(self, x_N: Tensor) -> Tensor:
        """As a linear layer; the first axis counts samples run by run."""
        x_PXN = x_N.reshape(self.weight_PMN.shape[0], -1, x_N.shape[-1])
        y_PXM = torch.baddbmm(self.bias_P1M, x_PXN, self.weight_PMN.transpose(1, 2))
        return y_PXM.view(*x_N.shape[:-1], -1)


class StackedAdamW:
    """AdamW without decay, as torch makes it, for parameters whose first axis counts runs.

    Each run has its own learning rate and its own clipping. A run whose gradient is not finite makes no
    step. Nothing of it waits for the device, so steps can be recorded in a CUDA graph.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr_P: Tensor,
        runs: Sequence[slice] | None = None,
        *,
        rates: Sequence[float | None] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_norm: float = 1.0,
    ) -> None:
        """`runs` says which runs each parameter is of; None: each is of all.

        `rates` are those of parameters that do not follow their run's.
        """
        self.parameters, self.lr_P = list(parameters), lr_P
        self.slices = list(runs or [slice(None)] * len(self.parameters))
        self.rates = list(rates or [None] * len(self.parameters))
        self.betas, self.eps, self.max_norm = betas, eps, max_norm
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.done = torch.zeros((), dtype=torch.float64, device=lr_P.device)
        """Steps."""
        self.ages: list[Tensor | None] = [None] * len(self.parameters)
        """Steps of the entries of each parameter, where they did not all begin together: tensors that
        go with it, and that whoever gives them counts up before a step. None: `done`."""
        self.skipped_P = torch.zeros_like(lr_P)
        """Of them, those that a run has not made."""

    @torch.no_grad()
    def clipped(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Each run's gradients at a norm of at most `max_norm`; zeros where they are not finite."""
        squares_P = torch.zeros_like(self.lr_P)
        for g, of in zip(gradients, self.slices, strict=True):
            squares_P[of] += g.flatten(1).square().sum(1)
        fine_P = torch.isfinite(squares_P)
        self.skipped_P += (~fine_P).to(self.skipped_P)
        clip_P = torch.ones_like(squares_P)
        if self.max_norm:
            clip_P = torch.clamp(self.max_norm / (squares_P.sqrt() + 1e-6), max=1.0)
        return [
            (g * _along(clip_P[of], g)).masked_fill(_along(~fine_P[of], g), 0.0)
            for g, of in zip(gradients, self.slices, strict=True)
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], share: float | Tensor = 1.0) -> None:
        """One step; `share` is of the learning rates."""
        (beta1, beta2), done = self.betas, self.done.add_(1)
        for p, g, (mean, square), of, own, age in zip(
            self.parameters,
            gradients,
            self.moments,
            self.slices,
            self.rates,
            self.ages,
            strict=True,
        ):
            t = done if age is None else age.double()
            mean.lerp_(g, 1 - beta1)
            square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = (square.sqrt() / (1 - beta2**t).sqrt().to(p.dtype)).add_(self.eps)
            now = share / (1 - beta1**t)
            rate = (_along(self.lr_P[of], p) if own is None else own) * now
            p.sub_(rate.to(p.dtype) * mean / denominator)


class Population:
    """A model that is all runs of `members` at once, and their AdamW."""

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        directions: Sequence[Directions],
        members: Sequence[Member],
        heads: Sequence[str] = (),
        *,
        head_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_norm: float = 1.0,
    ) -> None:
        """Changes `model`: what it was is frozen. Its dropout must be off. `head_lr` None: the runs'.

        Raises `ValueError` for a head that has something else than linear layers to train.
        """
        self.model, self.runs = model, len(members)
        model.requires_grad_(False)
        device = next(model.parameters()).device
        stacks: list[nn.Module] = []
        for matrix, target in enumerate(targets):
            layer = model.get_submodule(target.name)
            adapter = StackedAdapter(members, matrix, directions[matrix]).to(device)
            layer.adapter = adapter
            layer.register_forward_hook(_add)
            stacks.append(adapter)
        adapters = [p for stack in stacks for p in stack.parameters()]
        for head in heads:
            stacks += self._stack_head(model.get_submodule(head), head)
        self.parameters = [p for stack in stacks for p in stack.parameters() if p.requires_grad]
        rates = [None] * len(adapters) + [head_lr] * (len(self.parameters) - len(adapters))
        lr_P = torch.tensor([member.lr for member in members], device=device)
        self.optimizer = StackedAdamW(
            self.parameters, lr_P, rates=rates, betas=betas, eps=eps, max_norm=max_norm
        )

    def _stack_head(self, head: nn.Module, name: str) -> list[nn.Module]:
        stacks: list[nn.Module] = []
        for inner in list(head.modules()):
            if isinstance(inner, nn.Linear):
                inner.stacked = StackedLinear(inner, self.runs)
                inner.register_forward_hook(_instead)
                stacks.append(inner.stacked)
            elif any(True for _ in inner.parameters(recurse=False)) and not isinstance(
                inner, StackedLinear
            ):
                raise ValueError(
                    f"the head {name} has {type(inner).__name__}, and populations stack linear layers "
                    "only: set lelora.population=0"
                )
        return stacks

    def repeated(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch for every run."""
        return {
            name: value.repeat(self.runs, *[1] * (value.ndim - 1))
            if isinstance(value, Tensor) and value.ndim
            else value
            for name, value in batch.items()
        }

    def step(self, loss: Tensor, share: float = 1.0) -> None:
        """One optimizer step from the *sum* of all runs' losses; `share` is of the learning rates."""
        gradients = torch.autograd.grad(loss, self.parameters)
        self.optimizer.step(self.optimizer.clipped(gradients), share)

    def by_run(self, values: Tensor) -> Tensor:
        """(P B, ...) as (P, B, ...)."""
        return values.view(self.runs, -1, *values.shape[1:])


def _along(values_P: Tensor, like: Tensor) -> Tensor:
    return values_P.view(-1, *[1] * (like.ndim - 1))


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = layer.adapter(inputs[0])  # type: ignore[operator]
    return output + added


def _instead(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    del output
    made: Tensor = layer.stacked(inputs[0])  # type: ignore[operator]
    return made


@torch.no_grad()
def losses(
    population: Population,
    batches: Sequence[Mapping[str, Any]],
    each: Callable[[nn.Module, Mapping[str, Any]], Tensor],
) -> Tensor:
    """Loss of every sample of `batches` in every run, (P, X); `each` gives one loss a sample."""
    found = [
        population.by_run(each(population.model, population.repeated(batch))).cpu()
        for batch in batches
    ]
    return torch.cat(found, 1)
