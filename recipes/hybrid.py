"""Pretraining of a hybrid model: layers of several kinds of attention, and mixtures of experts.

Data, evaluation and export are those of `recipes.pretrain`; sequences are joined end to end, without
padding, and the loss has a part that keeps the load of experts even.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from configs.values import at_least
from models.causal_lm import next_token_loss, next_token_losses
from models.hf_folder import Read
from models.hybrid.balance import balance_loss
from models.hybrid.config import HybridConfig
from models.hybrid.cost import training_flops
from models.hybrid.documents import Documents
from models.hybrid.hf import read_folder, twin, write_folder
from models.hybrid.model import Hybrid, Output, Rows, init_weights, whole
from models.hybrid.shape import BLOCK_TOPK, SLIDING_WINDOW, Shape
from models.stored_weights import Stored, locate, storage_rules
from parallel.sums import sum_over_ranks
from recipes.pretrain import PretrainTask, check_vocabulary
from recipes.task import Batch
from recipes.text.config import SequencesConfig, TextConfig
from recipes.text.joined import join
from recipes.text.packing import IGNORED, Sequence_S


@dataclass(kw_only=True)
class HybridTaskConfig:
    """The `task` node."""

    name: str = "hybrid"
    balance: float = 0.01
    """Weight of the load-balance loss, which is 1 when all experts of a layer are visited equally often;
    0: none."""

    def __post_init__(self) -> None:
        at_least("task.balance", self.balance, 0)


class HybridTask(PretrainTask):
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": HybridTaskConfig,
        "model": HybridConfig,
        "data": TextConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: HybridTaskConfig, model: Any, data: SequencesConfig, seed: int
    ) -> None:
        super().__init__(task=task, model=model, data=data, seed=seed)
        self.balance = task.balance

    @cached_property
    def shape(self) -> Shape:
        """Every size and choice; the vocabulary holds the tokenizer's."""
        config: Any = self.model_config
        folder = read_folder(config.path) if config.path else {}
        shape: Shape = config.shape(folder, self.tokenizer.size)
        check_vocabulary(shape.vocab_size, self.tokenizer.size)
        return shape

    def check(self) -> None:
        """Load the tokenizer, read the folder's description, and tokenize the corpus."""
        if self.data_config.sequence_length > self.shape.max_positions:
            raise ValueError(
                f"data.sequence_length={self.data_config.sequence_length} is longer than the "
                f"{self.shape.max_positions} positions of the model: set "
                f"model.max_positions={self.data_config.sequence_length} or more"
            )
        self.weights_folder()
        self.data.check()

    def build_model(self) -> nn.Module:
        """On the meta device."""
        with torch.device("meta"):
            return Hybrid(self.shape)

    def init_weights(self, module: nn.Module) -> None:
        """See `models.hybrid.model.init_weights`."""
        init_weights(module, self.shape.init_std)

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, Stored]:
        """By transformers' rules for the model with the same tensors."""
        other = twin(self.shape)
        return locate(other, storage_rules(other), stored)

    def collate(self, samples: Sequence[Sequence_S]) -> dict[str, Any]:
        """See `recipes.text.joined.join`."""
        return join(samples)

    def rows(self, batch: Batch) -> Rows:
        """What the model is told about its rows: here they are whole documents."""
        return whole(Documents(tuple(batch["lengths"]), batch["cu_seq_lens"]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the batch's labels, in nats, and this rank's part of the balance."""
        out: Output = model(batch["tokens_T"], self.rows(batch))
        nats = next_token_loss(out.logits_TV, batch["labels_T"])
        return nats + self._balance(out, batch["count"]) if self.balance else nats

    def _balance(self, out: Output, count: int) -> Tensor:
        """Times the labels of all ranks: the trainer divides by them, as it does for `nats`.

        With several micro-batches each has a balance of its own, weighted by its labels.
        """
        if not out.visits_LE.numel():
            return out.chances_LE.sum()
        own = out.visits_LE.double()
        sums = sum_over_ranks(torch.cat([own.flatten(), own.new_full((1,), count)]))
        visits_LE, labels = sums[:-1].view_as(own), sums[-1]
        rows = (visits_LE[0].sum() / self.shape.active_experts).clamp(min=1)
        return self.balance * labels * balance_loss(out.chances_LE, visits_LE, rows)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """Summed loss and its count, with several sources those of each, too; and visits to experts."""
        out: Output = model(batch["tokens_T"], self.rows(batch))
        labels_T, sources_T = batch["labels_T"], batch["sources_T"]
        nats_T = next_token_losses(out.logits_TV[:, None], labels_T[:, None]).flatten()
        sums: dict[str, Tensor | float] = {
            "nats": nats_T.sum(), "labels": float(batch["count"]), "visits": out.visits_LE,
        }  # fmt: skip
        for number in range(len(self.data.parts) if len(self.data.parts) > 1 else 0):
            here_T = sources_T == number
            sums[f"nats/{number}"] = (nats_T * here_T).sum()
            sums[f"labels/{number}"] = ((labels_T != IGNORED) & here_T).sum()
        return sums

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """As for pretraining, and the load of the busiest expert in multiples of the mean one."""
        figures = super().summarize(sums)
        if sums["visits"].numel():
            load_LE = sums["visits"] / sums["visits"].mean(1, keepdim=True).clamp(min=1)
            figures["expert_load"] = load_LE.max().item()
        return figures

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """For transformers where it can run the model; the tokenizer beside it."""
        size = write_folder(self.shape, read, out, options)
        kept = self.tokenizer.save(out)
        return f"{size / 2**30:.2f} GiB in {options.dtype}, {kept}"

    def flops(self, batch: Batch) -> float:
        """See `models.hybrid.cost`."""
        return training_flops(self.shape, batch["lengths"])

    def describe(self) -> dict[str, str]:
        """Model, attention, experts, corpus and sequences."""
        shape = self.shape
        kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(shape.kinds).items())
        sizes = {
            SLIDING_WINDOW: f"windows of {shape.window:,} tokens",
            BLOCK_TOPK: f"{shape.top_k} of blocks of {shape.block:,} tokens",
        }
        used = "; ".join(words for kind, words in sizes.items() if kind in shape.kinds)
        return {
            "model": f"hybrid, {shape.num_layers} layers x {shape.hidden_size}, vocabulary "
            f"{shape.vocab_size:,}",
            "attention": f"{kinds}" + (f"; {used}" if used else ""),
            "experts": f"{shape.active_experts} of {shape.num_experts} and a shared one, in "
            f"{shape.moe_layers} layers",
            **self.data.describe(self.data_config.tokenizer or "bytes"),
            "rows": "sequences joined end to end; what is padding elsewhere is left out",
        }
