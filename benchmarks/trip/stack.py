"""Several trainings of one model in step: one call computes all of them, and a GPU replays whole steps.

    S members, T steps, B samples a step

A study's models are so small that a GPU spends its time on starting their kernels. So what differs by
seed or learning rate only is stacked: every parameter gets a first dimension of S members, and
`torch.func.vmap` calls the task's own loss over it. Each member has its own optimizer, over views of the
stack, and its own clipping; so it learns what it would learn alone (a test holds it to that). On a GPU,
after a few steps a whole one is recorded as a CUDA graph, and replayed: batches, rates and losses are
tables on the device, and nothing is left to the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel.weights import materialize
from recipes.task import Batch
from recipes.trip import TripTask
from trainer.config import Config
from trainer.optim import build_optimizer, learning_rate

WARM_UP = 3
"""Steps before one is recorded: what is made once has been made then."""
Loss = Callable[[nn.Module, Batch], Tensor]


class Stack:
    """S models in training, which differ by seed and peak learning rate."""

    def __init__(
        self,
        task: TripTask,
        config: Config,
        members: Sequence[tuple[float, int]],
        order_TSB: Tensor,
        batch_of: Callable[[Tensor], Batch],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        graphs: bool = True,
    ) -> None:
        """`members`: learning rate and seed of each; `order_TSB`: the samples of each step.

        `dtype`: what a step computes in; weights and moments are of 32 bits. `graphs`: replay recorded
        steps, on a GPU.
        """
        models = [task.build_model() for _ in members]
        for model, (_, seed) in zip(models, members, strict=True):
            materialize(model, device, task.init_weights, seed)
        self.task, self.config, self.model, self.dtype = task, config, models[0], dtype
        self.parameters: dict[str, Tensor] = stack_module_state(models)[0]
        self.batch_of = batch_of
        optims = [replace(config.optim, lr=lr) for lr, _ in members]
        T, S, _ = order_TSB.shape
        self.order_TSB = order_TSB.to(device)
        rates = [[learning_rate(optim, step, T) for optim in optims] for step in range(1, T + 1)]
        self.rates_TS = torch.tensor(rates, device=device)
        self.now = torch.zeros(1, dtype=torch.long, device=device)
        self.rate_S = torch.zeros(S, device=device)
        self.losses_S = torch.zeros(S, device=device)
        """Sums of the steps' mean losses, until somebody sets them to zero."""
        self.views = [
            [nn.Parameter(p.detach()[s]) for p in self.parameters.values()] for s in range(S)
        ]
        self.optimizers = [
            build_optimizer(views, optim) for views, optim in zip(self.views, optims, strict=True)
        ]
        for optimizer, rate in zip(self.optimizers, self.rate_S.unbind(), strict=True):
            for group in optimizer.param_groups:
                group["lr"], group["capturable"] = rate, device.type == "cuda"
        self.graphs = graphs and device.type == "cuda"
        self.graph: Any = None
        self.done = 0

    def run(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            elif not self.graphs:
                self._step()
            elif self.done < WARM_UP:
                self._aside()
            else:
                graph = self.graph = self._record()
                graph.replay()
            self.done += 1

    def _aside(self) -> None:
        """A step by a stream of its own, as what is recorded later will be."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self) -> Any:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        rows_SB = self.order_TSB.index_select(0, self.now)[0].long()
        self.rate_S.copy_(self.rates_TS.index_select(0, self.now)[0])
        compute = {name: p.to(self.dtype) for name, p in self.parameters.items()}
        # no fused kernel: under `vmap` it would not keep what its backward pass needs
        with sdpa_kernel(SDPBackend.MATH):
            losses_S = vmap(self._loss, randomness="different")(compute, rows_SB)
        gradients = torch.autograd.grad(losses_S.sum(), list(self.parameters.values()))
        for s, (views, optimizer) in enumerate(zip(self.views, self.optimizers, strict=True)):
            for view, gradient in zip(views, gradients, strict=True):
                view.grad = gradient[s].contiguous()  # fused kernels read it as the parameter lies
            if self.config.optim.max_norm:
                nn.utils.clip_grad_norm_(views, self.config.optim.max_norm)
            optimizer.step()
        self.losses_S += losses_S.detach()
        self.now += 1

    def _loss(self, parameters: dict[str, Tensor], rows_B: Tensor) -> Tensor:
        call: Any = partial(self._call, parameters)
        return self.task.loss(call, self.batch_of(rows_B)) / len(rows_B)

    def _call(self, parameters: dict[str, Tensor], *inputs: Any) -> Any:
        return functional_call(self.model, parameters, inputs)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Log-odds of a batch by every member, (S, B), with nothing left out."""
        self.model.eval()
        with sdpa_kernel(SDPBackend.MATH):
            logits_SB = vmap(self._logits, in_dims=(0, None))(self.parameters, batch)
        self.model.train()
        return logits_SB

    def _logits(self, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        call: Any = partial(self._call, parameters)
        return self.task.logits(call, batch)
