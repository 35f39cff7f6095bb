"""Evaluation: the task's sums over the held-out samples, added over batches and ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from collectives.host import all_sum
from trainer import stop
from trainer.data import eval_batches
from trainer.run import Job


@torch.no_grad()
def evaluate(job: Job) -> dict[str, float] | None:
    """The task's figures on the held-out part, equal on every rank; None if asked to stop."""
    if job.eval_samples is None:
        return {}
    sums: dict[str, torch.Tensor] = {}
    batches = eval_batches(
        job.task,
        job.eval_samples,
        job.plan,
        limit=job.config.trainer.eval_samples,
        rank=job.data_rank,
        workers=job.config.trainer.workers,
        device=job.device,
    )
    job.model.eval()
    try:
        for batch, counts in batches:
            if all_sum([float(stop.requested())])[0]:
                return None
            for name, value in job.task.evaluate(job.model, batch).items():
                part = torch.as_tensor(value, dtype=torch.float64, device=job.device)
                sums[name] = sums.get(name, torch.zeros_like(part)) + (part if counts else 0)
    finally:
        job.model.train()
        for module in job.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return dict(job.task.summarize(add_over_ranks(sums)))


def add_over_ranks(sums: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The sums of all ranks, in one message: a number for each scalar, a CPU tensor for the others."""
    names = sorted(sums)
    total = torch.cat([sums[name].reshape(-1) for name in names])
    dist.all_reduce(total)
    parts = total.cpu().split([sums[name].numel() for name in names])
    return {
        name: part.view(sums[name].shape) if sums[name].dim() else part.item()
        for name, part in zip(names, parts, strict=True)
    }
