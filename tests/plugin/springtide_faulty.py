"""A third party's task: pretraining in which one rank fails at one step, as it is told to."""

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from models.causal_lm import CausalLMConfig
from recipes.pretrain import PretrainTask
from recipes.text.config import TextConfig


@dataclass(kw_only=True)
class FaultyConfig:
    name: str = "faulty"
    fault: str = "none"
    """none, raise, nan, inf, exit, hang, unlabelled."""
    rank: int = 1
    at: int = 3
    """The forward pass that fails, and all later ones up to `until`."""
    until: int = 3
    hub_token: str = ""


class FaultyTask(PretrainTask):
    configs = {"task": FaultyConfig, "model": CausalLMConfig, "data": TextConfig}

    def __init__(self, *, task, model, data, seed):
        super().__init__(task=task, model=model, data=data, seed=seed)
        self.fault, self.calls = task, 0

    def collate(self, samples):
        batch = super().collate(samples)
        if self.fault.fault == "unlabelled":
            batch["labels_BS"].fill_(-100)
            batch["count"] = 0
        return batch

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.calls += model.training
        here = dist.get_rank() == self.fault.rank
        if not (here and self.fault.at <= self.calls <= self.fault.until):
            return loss
        if self.fault.fault == "raise":
            raise RuntimeError("this rank was told to fail")
        if self.fault.fault == "nan":
            return loss * torch.nan
        if self.fault.fault == "inf":  # an infinite loss whose gradient is finite
            return loss + torch.inf
        if self.fault.fault == "exit":
            os._exit(0)
        if self.fault.fault == "hang":
            time.sleep(1000)
        return loss
