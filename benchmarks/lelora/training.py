"""Runs of any methods and learning rates, trained side by side on one device.

    P runs, B texts of a batch, S steps

Every run has its own matrices, order of texts, clipping and AdamW, and is what it would be alone. What
a run's loss is, `benchmarks.lelora.classifying` and `benchmarks.lelora.verses` say.

Products are in 16 bits on a GPU (what trains is not); with float16, gradients are made 4096 times
larger for the way back. A step is recorded once as a CUDA graph and then replayed, since the host would
be slower.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lelora.ground import Base
from models.lelora.population import StackedAdamW
from models.lelora.stacked import Form, Whole

LOSS_SCALE = 4096.0
WARMUP = 0.1
"""Share of the steps in which learning rates rise; then they fall to 0."""


@dataclass(frozen=True)
class Plan:
    """How every run is trained."""

    steps: int = 500
    batch_size: int = 32
    max_norm: float = 1.0
    head_lr: float = 1e-3
    """Of a new classifier, as in the recipe; a run's own rate is of everything else."""


@dataclass(frozen=True)
class Run:
    """One training, whatever its method: what its seed and learning rate are."""

    seed: int
    lr: float


def orders(
    seeds: Sequence[int], texts: int, plan: Plan, without: Mapping[int, Sequence[int]] | None = None
) -> Tensor:
    """Rows of the training part, (steps, P, B): every text once in each epoch, by the seed.

    Texts `without` which a seed trains are passed over: the others stay in their order.
    """
    needed = plan.steps * plan.batch_size
    of_seed = {}
    for seed in set(seeds):
        generator = torch.Generator().manual_seed(seed)
        trains = torch.ones(texts, dtype=torch.bool)
        trains[list((without or {}).get(seed, ()))] = False
        epochs = -(-needed // int(trains.sum()))
        drawn = torch.cat([torch.randperm(texts, generator=generator) for _ in range(epochs)])
        of_seed[seed] = drawn[trains[drawn]][:needed].view(plan.steps, plan.batch_size)
    return torch.stack([of_seed[seed] for seed in seeds], 1)


class Together:
    """All runs; `forms` are of consecutive runs. Where a form is `Whole`, all of them must be."""

    def __init__(
        self, base: Base, plan: Plan, forms: Sequence[Form], runs: Sequence[Run], dtype: torch.dtype,
        rows_SPB: Tensor, head: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """`rows_SPB` are those of the training part; `head` trains at a rate of its own."""
        self.base, self.plan, self.forms, self.dtype = base, plan, forms, dtype
        P = len(runs)
        assert sum(form.runs for form in forms) == P
        self.device = base.matrices[0].device
        self.everything = any(isinstance(form, Whole) for form in forms)
        assert not self.everything or all(isinstance(form, Whole) for form in forms)
        own = list(base.rest.values())
        if self.everything:
            own = [t.expand(P, *t.shape).clone().requires_grad_() for t in own]
        self.rest = dict(zip(base.rest, own, strict=True))
        if not self.everything:
            self.rest, own = self.cast(self.rest), []
        self.parameters = [p for form in forms for p in form.parameters]
        slices: list[slice] = []
        begin = 0
        for form in forms:
            slices += [slice(begin, begin + form.runs)] * len(form.parameters)
            begin += form.runs
        rates = [None] * (len(self.parameters) + len(own)) + [plan.head_lr] * len(head)
        more = [*own, *head]
        self.parameters += more
        lr_P = torch.tensor([run.lr for run in runs], device=self.device)
        self.optimizer = StackedAdamW(
            self.parameters, lr_P, slices + [slice(None)] * len(more), rates=rates,
            max_norm=plan.max_norm,
        )  # fmt: skip
        self.rows_SPB = rows_SPB.to(self.device)
        steps = torch.arange(plan.steps, dtype=torch.float64)
        warm = torch.clamp((steps + 1) / max(WARMUP * plan.steps, 1), max=1.0)
        self.share_S = (warm * (1 - steps / plan.steps)).to(self.device)
        self.at = torch.zeros((), dtype=torch.long, device=self.device)
        self.scale = LOSS_SCALE if dtype == torch.float16 else 1.0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.after: Callable[[int], None] = lambda step: None
        """What happens between steps: is called with the number of those that are done."""
        self.notes: list[dict[str, Any]] = [{} for _ in runs]
        """What is to be kept of each run, beside its scores."""

    def losses(self, rows_PB: Tensor) -> Tensor:
        """Each run's mean loss on its rows of the training part, (P,)."""
        raise NotImplementedError

    def gradients(self, rows_PB: Tensor, share: float = 1.0) -> tuple[Tensor, list[Tensor]]:
        """Each run's mean loss, (P,), and gradients of it times `share`."""
        loss_P = self.losses(rows_PB)
        found = torch.autograd.grad(loss_P.sum() * (share * self.scale), self.parameters)
        return loss_P.detach(), [g / self.scale for g in found]

    def cast(self, rest: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is no matrix, for products."""
        return {n: t if n == self.base.words else t.to(self.dtype) for n, t in rest.items()}

    def step(self) -> None:
        """One optimizer step of all runs."""
        _, gradients = self.gradients(self.rows_SPB.index_select(0, self.at[None])[0])
        gradients = self._by_form(gradients, "masked")
        gradients = self._by_form(self.optimizer.clipped(gradients), "before_step")
        self.optimizer.step(gradients, self.share_S.index_select(0, self.at[None])[0])
        self._by_form(gradients, "after_step")
        self.at += 1

    def _by_form(self, gradients: list[Tensor], what: str) -> list[Tensor]:
        found: list[Tensor] = []
        begin = 0
        for form in self.forms:
            own = gradients[begin : begin + len(form.parameters)]
            found += getattr(form, what)(own) or own
            begin += len(own)
        return found + gradients[begin:]

    def train(self) -> float:
        """All steps; returns seconds, those of recording the graph left out."""
        if self.device.type == "cuda":
            self._record()
        begin = time.monotonic()
        for done in range(1, self.plan.steps + 1):
            self.graph.replay() if self.graph is not None else self.step()
            self.after(done)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - begin

    def _state(self) -> list[Tensor]:
        moments = [x for pair in self.optimizer.moments for x in pair]
        allocated = [x for f in self.forms for x in vars(f).values() if isinstance(x, Tensor)]
        allocated += [
            x
            for f in self.forms
            for name in ("importance", "change", "age")
            for x in getattr(f, name, [])
        ]
        counts = [self.optimizer.done, self.optimizer.skipped_P, self.at]
        return [*self.parameters, *moments, *allocated, *counts]

    def _record(self) -> None:
        """The step as a graph; what trying it out has changed is put back."""
        kept = [x.detach().clone() for x in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
            self.graph = graph
        except RuntimeError as error:  # slower, and the same
            print(f"a step could not be recorded, so the host makes each: {error}", file=sys.stderr)
        with torch.no_grad():
            for x, value in zip(self._state(), kept, strict=True):
                x.copy_(value)
