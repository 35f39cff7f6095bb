"""Batches for the loop: shuffled by the seed, split over ranks, read in the background.

Sample number `n` of a run (0, 1, 2, ...) is decided by the seed alone: epoch `n // len`, and in it
position `n % len` of that epoch's shuffle. A step takes the next `batch_size` numbers; each rank
reads its share. So the position in the data is one number, and it means the same on any number of
ranks and workers.

    numbers of a step    0 1 2 3 4 5 6 7        batch 8, 2 ranks, micro-batch 2
    micro-batch 0        0 1|2 3                 rank 0 | rank 1
    micro-batch 1                4 5|6 7
"""

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from collectives.host import all_sum
from parallel.waits import waiting
from recipes.task import Batch, DataError, Samples, Task
from trainer import rundir, stop
from trainer.plan import Plan


@dataclass(frozen=True)
class Step:
    """What one rank needs for one optimizer step."""

    micros: list[Batch]
    """On the device."""
    count: float
    """Labels over all ranks and micro-batches."""
    flops: float
    """Floating-point operations over all ranks."""
    samples: Callable[[], list[int]]
    """Which samples of the dataset the step has, over all ranks; worked out when asked for."""
    own: Callable[[], list[int]]
    """Which of them this rank has."""
    stop: bool
    """Some rank was asked to stop: leave the loop instead."""


def fingerprint(samples: Samples) -> str:
    """What tells these samples from others: their own `fingerprint()`, else how many there are."""
    own = getattr(samples, "fingerprint", None)
    return str(own()) if callable(own) else f"{len(samples)} samples"


def check_enough(samples: Samples, batch_size: int) -> None:
    """Raise `DataError` if the samples do not fill one step: it would train on some of them twice."""
    if len(samples) < batch_size:
        raise DataError(
            f"{len(samples)} samples do not fill one batch of {batch_size}: set trainer.batch_size to "
            "less, or give more data"
        )


def training_steps(
    task: Task,
    samples: Samples,
    plan: Plan,
    *,
    start: int,
    steps: int,
    rank: int,
    seed: int,
    workers: int,
    device: torch.device,
) -> Iterator[Step]:
    """`steps` steps from sample number `start` on, for data-parallel rank `rank`.

    The ranks agree on each step's label count, and on stopping, by one small sum on the host.
    """
    indices = MicroBatches(len(samples), plan, start, steps, rank, seed)
    loader = iter(_loader(task, samples, indices, workers, device))
    for number in range(steps):
        host_batches = [next(loader) for _ in range(plan.accumulation)]
        counts = [float(task.count(batch)) for batch in host_batches]
        flops = [task.flops(batch) for batch in host_batches]
        with waiting():  # for the slowest rank's data
            count, total_flops, stops = all_sum([sum(counts), sum(flops), float(stop.requested())])
        numbers = range(start + number * indices.batch, start + (number + 1) * indices.batch)
        yield Step(
            micros=[to_device(batch, device) for batch in host_batches],
            count=count,
            flops=total_flops,
            samples=partial(indices.of_numbers, numbers),
            own=partial(indices.of_step, number),
            stop=stops > 0,
        )


@dataclass(frozen=True)
class MicroBatches(Sequence[list[int]]):
    """The sample indices of each micro-batch of one rank, worked out when asked for."""

    length: int
    plan: Plan
    start: int
    steps: int
    rank: int
    seed: int

    def __len__(self) -> int:
        return self.steps * self.plan.accumulation

    def __getitem__(self, micro: Any) -> list[int]:  # type: ignore[override]
        if not 0 <= micro < len(self):
            raise IndexError(micro)
        size = self.plan.micro_batch_size
        first = self.start + (micro * self.plan.data_parallel + self.rank) * size
        return self.of_numbers(range(first, first + size))

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        plan = self.plan
        return plan.data_parallel * plan.micro_batch_size * plan.accumulation

    def of_step(self, number: int) -> list[int]:
        """This rank's samples of the step that is `number` after the first."""
        micros = range(number * self.plan.accumulation, (number + 1) * self.plan.accumulation)
        return [sample for micro in micros for sample in self[micro]]

    def of_numbers(self, numbers: range) -> list[int]:
        """The samples that have these numbers in the run."""
        places = [divmod(number, self.length) for number in numbers]
        return [shuffled(at, self.length, f"{self.seed}/{epoch}") for epoch, at in places]


def shuffled(position: int, length: int, key: str) -> int:
    """Where a shuffle of `range(length)` that `key` decides has `position`.

    A keyed Feistel network on the next power of four, walked until it lands below `length`
    (Black & Rogaway 2002): a permutation without a table, whatever the length.
    """
    half = max((length - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        value = left << half | right
        if value < length:
            return value


def eval_batches(
    task: Task,
    samples: Samples,
    plan: Plan,
    *,
    limit: int | None,
    rank: int,
    workers: int,
    device: torch.device,
) -> Iterator[tuple[Batch, bool]]:
    """Every sample (or the first `limit`) once over all ranks, in order.

    All ranks get equally many batches. A rank that has no sample left gets one that counts for
    nothing: the second item says whether the batch counts.
    """
    total = min(len(samples), limit or len(samples))
    size, round_size = plan.eval_batch_size, plan.eval_batch_size * plan.data_parallel
    indices = []
    for begin in range(0, total, round_size):
        mine = begin + rank * size
        indices.append(list(range(mine, min(mine + size, total))))
    loader = _loader(task, samples, [part or [0] for part in indices], workers, device)
    for part, batch in zip(indices, loader, strict=True):
        yield to_device(batch, device), bool(part)


def _loader(
    task: Task, samples: Samples, indices: Sequence[list[int]], workers: int, device: torch.device
) -> DataLoader[Any]:
    return DataLoader(
        samples,  # type: ignore[arg-type]
        batch_sampler=indices,
        collate_fn=task.collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=partial(_start_worker, _parent_of_workers()) if workers else None,
        # Its own generator, so that reading data leaves the training's random state alone.
        generator=torch.Generator(),
    )


def _parent_of_workers() -> int | None:
    """This process, unless workers are the children of a fork server."""
    return os.getpid() if multiprocessing.get_start_method() == "fork" else None


def _start_worker(parent: int | None, _number: int) -> None:
    """A signal to the process group is the rank's to answer, not its workers'; they go with it."""
    stop.ignore()
    stop.die_with_parent(parent)
    rundir.unlock()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
