"""How much each matrix did for the loss between two decisions.

    M matrices; one more place, the last, is for all else that trains

The loss falls along the way from the weights before to those after by the integral of its gradient, so
each matrix has its part of the integral: Simpson's rule, with gradients on the same meta samples at the
beginning, half-way and the end of a straight line. The parts add up to the drop, which is checked.
`recipes.lelora.path_credit` is the alternative.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.fsdp import set_last_micro_batch
from parallel.norm import copies
from recipes.lelora.meta import MetaBatches
from recipes.lelora.ranks import num_ranks
from recipes.lelora.shards import copy_all, local
from recipes.task import Batch

SIMPSON = ((0.0, 1 / 6), (0.5, 4 / 6), (1.0, 1 / 6))


@dataclass(frozen=True)
class Measured:
    """A period on the meta samples."""

    before: float
    """Mean loss of a label."""
    after: float
    credit_M: Tensor
    """Each matrix's part of the drop, in fp64 on the CPU."""
    rest: float
    """What else trained."""
    reliability: float
    """Correlation of the two halves' credit over matrices, for both halves together (Spearman-Brown)."""
    gradient_M: Tensor
    """Root of the mean square of the gradient at the end."""

    @property
    def gap(self) -> float:
        """How far the credit is from adding up to the drop, as a share of the drop."""
        total = float(self.credit_M.sum()) + self.rest
        drop = self.before - self.after
        return abs(total - drop) / max(abs(drop), 1e-12)


class Measures(Protocol):
    """Who tells what a period was worth."""

    def loss(self) -> float:
        """On the meta samples, now."""

    def measure(self, before: Mapping[str, Tensor]) -> Measured:
        """From the parameters in `before` to those that there are."""


class Parameters:
    """The parameters that train, in an order, and which matrix each belongs to.

    Parameters of one shape are worked on at once (G of them, with E entries each, of this rank): there
    are hundreds, most of them small, and the number of operations is what costs.
    """

    def __init__(self, model: nn.Module, owners: Sequence[str]) -> None:
        """`owners` are the adapters' names."""
        self.size = len(owners)
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        place = {name: number for number, name in enumerate(owners)}
        self.places = [place.get(name.rpartition(".")[0], self.size) for name in self.named]
        counts = [0] * (self.size + 1)
        for at, parameter in zip(self.places, self.named.values(), strict=True):
            counts[at] += parameter.numel()
        self.counts_M = torch.tensor(counts, dtype=torch.float64)
        alike: dict[torch.Size, list[int]] = {}
        for number, value in enumerate(self.values()):
            alike.setdefault(value.shape, []).append(number)
        self.groups = list(alike.values())
        world = num_ranks()
        every = list(self.named.values())
        self._copies = [copies(every[number], world) for group in self.groups for number in group]

    @cached_property
    def _sums_of(self) -> tuple[Tensor, Tensor]:
        """What to divide each sum by, in the order of `groups`, and which sums are a matrix's (M, S).

        The last sum is always 0, for matrices with fewer than S parameters.
        """
        order = [number for group in self.groups for number in group]
        mine: list[list[int]] = [[] for _ in range(self.size + 1)]
        for at, number in enumerate(order):
            mine[self.places[number]].append(at)
        most = max(map(len, mine))
        filled = [own + [len(order)] * (most - len(own)) for own in mine]
        device = next((value.device for value in self.values()), torch.device("cpu"))
        copies_P = torch.tensor(self._copies, dtype=torch.float64, device=device)
        return copies_P, torch.tensor(filled, device=device)

    def stacked(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """One of each parameter (this rank's part; None: zeros), by shape: (G, E) in fp64."""
        values = self.values()
        whole = [
            torch.zeros_like(value) if of is None else of
            for of, value in zip(tensors, values, strict=True)
        ]
        return [
            torch.stack([whole[n] for n in group])
            .view(len(group), values[group[0]].numel())
            .double()
            for group in self.groups
        ]

    def dots(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """This rank's share of each matrix's inner product of what is `stacked`; no sum over ranks."""
        copies_P, sums_MS = self._sums_of
        found = [(a_GE * b_GE).sum(1) for a_GE, b_GE in zip(left, right, strict=True)]
        sums_P = torch.cat(found) / copies_P
        return torch.cat([sums_P, sums_P.new_zeros(1)])[sums_MS].sum(1)

    def gradients(self) -> list[Tensor | None]:
        """This rank's parts."""
        return [local(p.grad) if p.grad is not None else None for p in self.named.values()]

    def values(self) -> list[Tensor]:
        """This rank's parts: the storage itself."""
        return [local(p).detach() for p in self.named.values()]


def added_up(tensor: Tensor) -> Tensor:
    """Over all ranks, on the CPU."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor.cpu()


class Meter:
    """Losses and gradients on the meta samples."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        batches: MetaBatches,
        parameters: Parameters,
        ranks: int,
        device: torch.device,
    ) -> None:
        self.model, self.task_loss, self.batches = model, loss, batches
        self.parameters, self.ranks, self.device = parameters, ranks, device
        own = torch.tensor(batches.own_count, dtype=torch.float64, device=device)
        self.labels = max(float(added_up(own)), 1.0)

    def _passes(self, half: int) -> Tensor:
        """Gradients of one half's share of the mean loss; returns this rank's sum of the loss."""
        for parameter in self.parameters.named.values():
            parameter.grad = None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, counts in self.batches.halves[half]:
            set_last_micro_batch(self.model, last=True, every=True)
            loss = self.task_loss(self.model, _moved(batch, self.device)) * float(counts)
            (loss * (self.ranks / self.labels)).backward()
            total += loss.detach().double()
        return total

    @torch.no_grad()
    def loss(self) -> float:
        """Mean loss of a label, without gradients."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(self.model):
            for half in self.batches.halves:
                for batch, counts in half:
                    total += (
                        self.task_loss(self.model, _moved(batch, self.device)).double() * counts
                    )
        return float(added_up(total)) / self.labels

    def measure(self, before: Mapping[str, Tensor]) -> Measured:
        """Simpson's rule from the parameters in `before` to those that there are."""
        parameters = self.parameters
        M = parameters.size + 1
        values = parameters.values()
        end = [value.clone() for value in values]
        begin = [local(before[name]) for name in parameters.named]
        step = torch._foreach_sub(end, begin)
        along = parameters.stacked(list(step))
        sums = torch.zeros(3 * M + 2, dtype=torch.float64, device=self.device)
        halves_M, squares_M = (sums[:M], sums[M : 2 * M]), sums[2 * M : 3 * M]
        with evaluating(self.model):
            for share, weight in SIMPSON:
                copy_all(
                    values, end if share == 1.0 else torch._foreach_add(begin, step, alpha=share)
                )
                for half, out_M in enumerate(halves_M):
                    loss = self._passes(half)
                    gradients = parameters.stacked(parameters.gradients())
                    out_M.sub_(parameters.dots(gradients, along), alpha=weight)
                    if share == 1.0:
                        squares_M += parameters.dots(gradients, gradients)
                    if share != 0.5:
                        sums[3 * M + int(share)] += loss
        for parameter in parameters.named.values():
            parameter.grad = None
        found = added_up(sums)
        halves = found[:M], found[M : 2 * M]
        credit = halves[0] + halves[1]
        squares = 4 * found[2 * M : 3 * M] / parameters.counts_M.clamp(min=1)  # two half losses
        return Measured(
            before=float(found[3 * M]) / self.labels,
            after=float(found[3 * M + 1]) / self.labels,
            credit_M=credit[:-1].clone(),
            rest=float(credit[-1]),
            reliability=reliability(halves[0][:-1], halves[1][:-1]),
            gradient_M=squares[:-1].sqrt(),
        )


def reliability(first_M: Tensor, second_M: Tensor) -> float:
    """Of the sum of two measurements, from their correlation r: 2 r / (1 + r), or r below 0."""
    a, b = first_M - first_M.mean(), second_M - second_M.mean()
    scale = float(a.norm() * b.norm())
    if not scale > 0:
        return 0.0
    r = float((a * b).sum()) / scale
    return 2 * r / (1 + r) if r > 0 else r


class evaluating:  # noqa: N801
    """Without dropout inside; afterwards ranks hold their shards of parameters again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train()
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
