"""A tiny encoder, texts whose label is a letter in them, and steering, on the ranks of a test."""

import random
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from models.encoder import EncoderConfig
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh
from parallel.norm import clip, global_norm
from parallel.weights import load_safetensors, materialize
from recipes.abilities import Training
from recipes.lelora.classify import LeloraClassifyConfig, LeloraClassifyTask
from recipes.lelora.config import LeloraConfig, PolicyConfig
from recipes.lelora.labelled import LabelledConfig
from trainer.optim import OptimConfig, build_optimizer

MODEL = {"num_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
         "max_positions": 32, "dropout": 0.0, "config": {"initializer_range": 0.2}}  # fmt: skip
BATCH, STEPS = 8, 32


def write_texts(folder, number=120):
    """Which of three letters a word has decides its label."""
    draw = random.Random(0)
    lines = []
    for _ in range(number):
        letter = draw.choice("abc")
        word = [draw.choice("xyz") for _ in range(6)]
        word[draw.randrange(6)] = letter
        lines.append(f"{''.join(word)}\t{letter}")
    file = Path(folder) / "texts.tsv"
    file.write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    return file


def make_task(folder, policy=None, model=None, task=None, **lelora):
    settings = {"rank": 2, "widths": [0, 1, 2, 4], "period": 5, "first": 5, "until": 0.75,
                "meta_share": 0.2, "min_reliability": -1.0, "max_switched": 1.0, "fold_rank": 8,
                "targets": ["query", "value", "dense"], "exclude": ["pooler.dense"],
                "cache_dir": str(folder)}  # fmt: skip
    config = LeloraConfig(
        **(settings | lelora),
        policy=PolicyConfig(
            **({"hold": 0.5, "dim": 8, "layers": 1, "horizon": 2} | (policy or {}))
        ),
    )
    return LeloraClassifyTask(
        task=LeloraClassifyConfig(**({"probe": 0, "head_lr": None} | (task or {}))), model=EncoderConfig(**(MODEL | (model or {}))), seed=0, lelora=config,
        data=LabelledConfig(files=[str(Path(folder) / "texts.tsv")], max_length=16, holdout=0.2),
    )  # fmt: skip


def write_base(folder):
    """An encoder without a classifier, as people have it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(5)
    config = BertConfig(vocab_size=259, num_hidden_layers=2, hidden_size=16, intermediate_size=24,
                        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.2)  # fmt: skip
    BertModel(config).save_pretrained(Path(folder) / "base")


class Run:
    """What `trainer.run` joins, with a loop that does the same."""

    def __init__(self, folder, lr=1e-2, run_dir="run", steps=STEPS, parallel=None, **settings):
        ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.ranks, self.lr = ranks, lr
        self.task = make_task(folder, **settings)
        self.task.check()
        self.train_samples = self.task.train_samples()
        self.model = self.task.build_model()
        parallel = ParallelConfig(**(parallel or {}))
        parallelize(self.model, build_mesh({"shard": ranks}, "cpu"), parallel)
        materialize(self.model, torch.device("cpu"), self.task.init_weights, 0)
        if folder_of_base := self.task.weights_folder():
            load_safetensors(
                self.model, folder_of_base, partial(self.task.locate_weights, self.model)
            )
        self.optimizer = build_optimizer(
            self.model.parameters(),
            OptimConfig(lr=lr, weight_decay=0.0, betas=[0.9, 0.99]),
            self.task.own_rates(self.model),
        )
        (Path(folder) / run_dir).mkdir(exist_ok=True)
        self.steering = self.task.steering(
            Training(self.model, self.optimizer, torch.device("cpu"), Path(folder) / run_dir, 0, steps,
                     ranks, self.rank, BATCH // ranks, 1.0, lambda step: 1.0)
        )  # fmt: skip
        self.step = 0

    def advance(self, steps, poison_at=()):
        """Train; `poison_at` are steps after which the classifier's weights are multiplied by -30."""
        for _ in range(steps):
            first = self.step * BATCH
            numbers = [(first + n) % len(self.train_samples) for n in range(BATCH)]
            mine = numbers[self.rank * BATCH // self.ranks : (self.rank + 1) * BATCH // self.ranks]
            batch = self.task.collate([self.train_samples[n] for n in mine])
            set_last_micro_batch(self.model, last=True, every=True)
            (self.task.loss(self.model, batch) * self.ranks / BATCH).backward()
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm, _ = global_norm(grads, torch.zeros(1))
            clip(grads, norm, 1.0)
            self.optimizer.found_inf = torch.zeros(())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step in poison_at:
                with torch.no_grad():
                    for parameter in self.model.classifier.parameters():
                        parameter.to_local().mul_(-30)
            if self.steering is not None:
                self.steering.after_step(self.step, norm)
        return self

    def weights(self):
        """All that trains and all buffers of adapters, whole."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
            for name, t in named
            if t.requires_grad or ".adapter." in name
        }
