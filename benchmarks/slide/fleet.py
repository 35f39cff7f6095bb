"""Trains many small models at once on one device.

A small model's step is hundreds of small kernels, which neither a host nor one stream can give to a GPU
fast enough. So a step of all models together is one CUDA graph with a branch for each: which rows a
batch has, and the learning rate, are looked up on the device. Rows of a like length make a batch,
padded to one of a few lengths, and each length has a graph. Elsewhere the same steps run one by one.

Weights are kept in fp32, and the model computes with a copy in the plan's type, as FSDP2 does. The best
evaluation's weights are kept.

R rows of data, B of a batch, N items of a sequence, S steps
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.slide.build import Decoder
from parallel.weights import materialize
from recipes.slide.gr_train import GrTrainTask
from trainer.optim import OptimConfig, build_optimizer, learning_rate

Columns = Mapping[str, Tensor]
MakeBatch = Callable[[dict[str, Tensor], int], dict[str, Tensor]]
"""From rows of the columns, and the items that a sequence may have, to what `task.loss` reads."""
WARMUP = 2
SPARE = 64
"""Rates beyond the last step, for steps that warm up."""


@dataclass
class Member:
    """One model, what it learns from, and how."""

    name: str
    task: GrTrainTask
    optim: OptimConfig
    seed: int
    columns: Columns
    lengths_R: Tensor
    """Items of each row's sequence."""
    make_batch: MakeBatch
    """Its `count` is what the summed loss is divided by."""
    start: Mapping[str, Tensor] | None = None
    """Weights to begin with; slots that they lack are zero."""
    by_target: bool = False
    """Divide by the mean count of a batch, so that each target weighs the same; else by the batch's own:
    batches of short sequences then weigh as much as those of long ones."""
    log: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """A model with the weights of its best evaluation."""

    model: Decoder
    weights: Mapping[str, Tensor]
    """In fp32."""
    log: Sequence[Mapping[str, float]]
    best: Mapping[str, float]


class Running:
    """A member while it trains."""

    def __init__(
        self, member: Member, schedule: "Schedule", dtype: torch.dtype, device: torch.device
    ) -> None:
        self.member, self.device = member, device
        model = member.task.build_model()
        materialize(model, device, member.task.init_weights, member.seed)
        if member.start is not None:
            state = model.state_dict()
            own = {name: member.start.get(name, torch.zeros_like(x)) for name, x in state.items()}
            model.load_state_dict(own)
        self.count: float | None = None
        if member.by_target:
            targets = float(member.columns["weights"].sum()) * member.task.data.ids.levels
            self.count = targets / len(member.lengths_R) * schedule.batch_size
        self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.model: Any = model.to(dtype).train()
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.optimizer = build_optimizer(self.masters, member.optim)
        rates = [learning_rate(member.optim, s + 1, schedule.steps) for s in range(schedule.steps)]
        self.rates_S = torch.tensor([*rates, *[0.0] * SPARE], device=device)
        self.rate = torch.zeros((), device=device)
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self.rate, device.type == "cuda"
        self.grads = [torch.zeros_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        generator = torch.Generator().manual_seed(member.seed)
        self.orders = [
            o.to(device) for o in schedule.orders(member.lengths_R, generator)
        ]  # (batches, B) for each length
        self.drawn = [torch.zeros((), dtype=torch.long, device=device) for _ in self.orders]
        self.done = torch.zeros((), dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.best: dict[str, float] | None = None
        self.kept: list[Tensor] = []

    def step(self, number: int, length: int) -> None:
        """One step on the next batch of this length; nothing here asks the host."""
        rows_B = self.orders[number].index_select(0, self.drawn[number][None])[0]
        columns = {name: x.index_select(0, rows_B) for name, x in self.member.columns.items()}
        batch = self.member.make_batch(columns, length)
        count = batch["count"] if self.count is None else self.count
        loss = self.member.task.loss(self.model, batch) / count
        grads = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_copy_(self.grads, grads)
            if self.member.optim.max_norm:
                nn.utils.clip_grad_norm_(self.masters, self.member.optim.max_norm)
            self.rate.copy_(self.rates_S.index_select(0, self.done[None])[0])
            self.optimizer.step()
            torch._foreach_copy_(self.parameters, tuple(self.masters))
            self.loss += loss.detach().float()
            self.done += 1
            self.drawn[number].add_(1).remainder_(len(self.orders[number]))

    @torch.no_grad()
    def rewind(self, begun: Sequence[Tensor]) -> None:
        """As if no step had been done since the weights were these."""
        for parameter, master, first in zip(self.parameters, self.masters, begun, strict=True):
            master.copy_(first)
            parameter.copy_(first)
        for state in self.optimizer.state.values():
            for moment in state.values():
                moment.zero_()
        for counter in (*self.drawn, self.done, self.loss):
            counter.zero_()

    def judge(self, evaluate: "Evaluate", step: int, since: int) -> None:
        """Evaluate, and keep the weights if they are the best so far, by NDCG."""
        self.model.eval()
        found = evaluate(self)
        self.model.train()
        loss = float(self.loss) / max(since, 1)
        self.loss.zero_()
        row = {"step": float(step), "loss": loss, **found}
        self.member.log.append(row)
        if self.best is None or found["ndcg@10"] > self.best["ndcg@10"]:
            self.best = row
            self.kept = [master.detach().clone() for master in self.masters]

    def finish(self) -> Trained:
        """With the weights that were kept."""
        assert self.best is not None
        names = [name for name, _ in self.model.named_parameters()]
        with torch.no_grad():
            for parameter, kept in zip(self.parameters, self.kept, strict=True):
                parameter.copy_(kept)
        weights = dict(zip(names, self.kept, strict=True))
        return Trained(self.model.eval(), weights, self.member.log, self.best)


Evaluate = Callable[[Running], Mapping[str, float]]
"""Figures on validation, with `ndcg@10` among them."""


@dataclass(frozen=True)
class Schedule:
    """How many steps, and of which lengths; the same for all members."""

    lengths: Sequence[int]
    """What sequences are padded to, ascending."""
    batch_size: int
    steps: int
    evaluations: int
    """Evenly over the steps, the last one at the end."""
    patience: float = 0.0
    """No evaluation before this share of the steps."""
    begins: bool = False
    """Also one before the first step: what never gets better stays as it was."""

    def bucket(self, lengths_R: Tensor) -> Tensor:
        """Which of the lengths each row is padded to."""
        return torch.bucketize(lengths_R, torch.tensor(self.lengths))

    def orders(self, lengths_R: Tensor, generator: torch.Generator) -> list[Tensor]:
        """For each length: rows in batches (batches, B), passes over them running into each other."""
        bucket_R, found = self.bucket(lengths_R), []
        for number in range(len(self.lengths)):
            rows = torch.nonzero(bucket_R == number)[:, 0]
            if not len(rows):
                found.append(torch.zeros(0, self.batch_size, dtype=torch.long))
                continue
            wanted = self.steps * self.batch_size  # at most, for all of them may be of this length
            wanted = int(wanted * len(rows) / len(lengths_R) * 1.1) + 2 * self.batch_size
            passes = -(-wanted // len(rows))
            order = torch.cat(
                [rows[torch.randperm(len(rows), generator=generator)] for _ in range(passes)]
            )
            whole = len(order) // self.batch_size
            found.append(order[: whole * self.batch_size].view(whole, self.batch_size))
        return found

    def sequence(self, lengths_R: Tensor, seed: int) -> list[int]:
        """The number of the length of each step: as often as rows have it."""
        share = torch.bincount(self.bucket(lengths_R), minlength=len(self.lengths)).double()
        exact = share / share.sum() * self.steps
        counts = exact.floor().long()
        for number in (exact - counts).argsort(descending=True)[: self.steps - int(counts.sum())]:
            counts[number] += 1
        numbers = torch.repeat_interleave(torch.arange(len(self.lengths)), counts)
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
        return [int(n) for n in numbers[order]]


def train(
    members: Sequence[Member],
    schedule: Schedule,
    evaluate: Evaluate,
    device: torch.device,
    dtype: torch.dtype,
    graphs: bool = True,
) -> dict[str, Trained]:
    """Train all members at once; by name."""
    torch.manual_seed(members[0].seed)
    running = [Running(member, schedule, dtype, device) for member in members]
    numbers = schedule.sequence(members[0].lengths_R, members[0].seed)
    replay = _graphs(running, schedule, sorted(set(numbers)), graphs and device.type == "cuda")
    marks = [
        round(schedule.steps * (n + 1) / schedule.evaluations)
        for n in range(schedule.evaluations)
        if (n + 1) / schedule.evaluations > schedule.patience
    ]
    if schedule.begins:
        for member in running:
            member.judge(evaluate, 0, 0)
    last, began = 0, time.monotonic()
    for step, number in enumerate(numbers, start=1):
        replay(number)
        if step in marks:
            for member in running:
                member.judge(evaluate, step, step - last)
                member.member.log[-1]["seconds"] = time.monotonic() - began
            last = step
    return {member.member.name: member.finish() for member in running}


def _graphs(
    running: Sequence[Running], schedule: Schedule, used: Sequence[int], captured: bool
) -> Callable[[int], None]:
    """What does a step of all members on batches of a length, by the length's number."""

    def one_by_one(number: int) -> None:
        for member in running:
            member.step(number, schedule.lengths[number])

    if not captured:
        return one_by_one
    streams = [torch.cuda.Stream() for _ in running]

    def side_by_side(number: int) -> None:
        main = torch.cuda.current_stream()
        for member, stream in zip(running, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                member.step(number, schedule.lengths[number])
        for stream in streams:
            main.wait_stream(stream)

    begun = [[master.detach().clone() for master in member.masters] for member in running]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    pool = torch.cuda.graph_pool_handle()
    made: dict[int, torch.cuda.CUDAGraph] = {}
    for number in used:
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                side_by_side(number)
        torch.cuda.synchronize()
        made[number] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made[number], pool=pool):
            side_by_side(number)
    for member, first in zip(running, begun, strict=True):
        member.rewind(first)
    return lambda number: made[number].replay()
