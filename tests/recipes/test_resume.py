"""A resumed run reads what one run would have read: real tasks, mixtures, any ranks and workers."""

import json

import pytest
import torch

import trainer.data
from models.causal_lm import CausalLMConfig
from recipes.pretrain import PretrainConfig, PretrainTask
from recipes.sft import ChatConfig, SFTConfig, SFTTask
from recipes.text.config import TextConfig
from tests.trainer.test_data import plan
from trainer.data import fingerprint, training_steps

SMALL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
STRETCHES = [(1, 4, 1, 2, 0), (2, 1, 2, 3, 1), (4, 1, 1, 2, 0), (1, 2, 2, 2, 3)]
"""Ranks, micro-batch, accumulation, steps, workers."""


def made(kind, packing, tmp_path, seed=0):
    """A task on two sources; made anew, as a resumed run makes it."""
    mixture = {}
    for name, number in (("a", 9), ("b", 4)):
        rows = [{"prompt": f"{name} {n}", "completion": "x" * n, "text": name * (3 * n + 1)}
                for n in range(1, number)]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        mixture[name] = {"files": [str(tmp_path / f"{name}.jsonl")], "weight": number / 3}
    config, task = (ChatConfig, SFTTask) if kind == "sft" else (TextConfig, PretrainTask)
    data = config(
        mixture=mixture, packing=packing, long_documents="truncate", sequence_length=40, holdout=0.0,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    node = SFTConfig() if kind == "sft" else PretrainConfig()
    return task(task=node, model=CausalLMConfig(**SMALL), data=data, seed=seed)


def rows_of(batch):
    """A batch's sequences without their padding, which depends on what is beside them."""
    for tokens, labels in zip(
        batch["tokens_BS"].tolist(), batch["labels_BS"].tolist(), strict=True
    ):
        used = max((at for at, label in enumerate(labels) if label != -100), default=-1) + 1
        yield tokens[: used + 1], labels[:used]


def read(task, split, start, steps, workers):
    """What all ranks together read, a list for each step."""
    ranks, micro, accumulation = split
    samples, read_by = task.train_samples(), []
    for rank in range(ranks):
        stretch = training_steps(
            task, samples, plan(ranks, micro, accumulation), start=start, steps=steps, rank=rank,
            seed=7, workers=workers, device=torch.device("cpu"),
        )  # fmt: skip
        read_by.append([[list(rows_of(m)) for m in step.micros] for step in stretch])
    return [
        [row for micro_batch in zip(*(r[s] for r in read_by), strict=True) for part in micro_batch for row in part]
        for s in range(steps)
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("packing", ["stream", "whole", "none"])
@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_other_ranks_and_workers_go_on_with_exactly_the_rest(kind, packing, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.data, "all_sum", lambda values: values)  # one rank at a time
    alone = read(made(kind, packing, tmp_path), (1, 4, 1), 0, 9, 0)
    position, together = 0, []
    for *split, steps, workers in STRETCHES:
        task = made(kind, packing, tmp_path)
        together += read(task, split, position, steps, workers)
        position += 4 * steps
    assert together == alone
    assert len(task.train_samples()) < 4 * 9  # an epoch ended on the way
    assert fingerprint(task.train_samples()) == fingerprint(
        made(kind, packing, tmp_path).train_samples()
    )
    other = made(kind, packing, tmp_path, seed=1)
    assert fingerprint(task.train_samples()) != fingerprint(other.train_samples())
