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
from models.hybrid.config import HybridConfig
from models.hybrid.cost import training_flops
from models.hybrid.documents import Documents
from models.hybrid.experts import Experts
from models.hybrid.hf import read_folder, twin, write_folder
from models.hybrid.model import Hybrid, Output, Rows, init_weights, whole
from models.hybrid.shape import BLOCK_TOPK, SLIDING_WINDOW, Shape
from models.stored_weights import Stored, locate, storage_rules
from parallel.repacking.layout import Ints
from parallel.repacking.plan import Plan
from parallel.repacking.planner import Planner
from parallel.repacking.ranks import PlannedRanks, fixed, one_parent
from parallel.sequence import SequenceRanks
from recipes.balance import balance_part
from recipes.plans import PlanWatch, foreseen, fullest, settings_in_words
from recipes.pretrain import PretrainTask, check_vocabulary
from recipes.repacking import model_shape, planned_rows
from recipes.task import Batch, DataError
from recipes.text.config import SequencesConfig, TextConfig
from recipes.text.joined import join
from recipes.text.packing import IGNORED
from recipes.text.planned import Unread, full_batch, planned_batch


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
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard", "sequence"})

    def __init__(
        self, *, task: HybridTaskConfig, model: Any, data: SequencesConfig, seed: int
    ) -> None:
        super().__init__(task=task, model=model, data=data, seed=seed)
        self._ranks: PlannedRanks | None = None
        self._planner: Planner | None = None
        self._watch: PlanWatch | None = None

    @cached_property
    def shape(self) -> Shape:
        """Every size and choice; the vocabulary holds the tokenizer's."""
        config: Any = self.model_config
        folder = read_folder(config.path) if config.path else {}
        shape: Shape = config.shape(folder, self.tokenizer.size)
        check_vocabulary(shape.vocab_size, self.tokenizer.size)
        return shape

    def share_sequences(self, ranks: SequenceRanks) -> None:
        """See `recipes.abilities.SharesSequences`."""
        if ranks.sliding_window != "exchange":
            raise ValueError(
                f"parallel.sequence.sliding_window={ranks.sliding_window}: task hybrid exchanges heads "
                "in all layers: set parallel.sequence.sliding_window=exchange"
            )
        self.plan_samples(fixed(ranks))

    def plan_samples(self, ranks: PlannedRanks) -> None:
        """See `recipes.abilities.PlansSamples`."""
        self._ranks, self._planner = ranks, ranks.planner(model_shape(self.shape, ranks))
        if self._planner is not None and ranks.rank == 0:  # which reports
            self._watch = PlanWatch(self._planner)

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

    def experts(self, model: nn.Module) -> list[nn.Module]:
        """See `recipes.abilities.HasExperts`."""
        return [module for module in model.modules() if isinstance(module, Experts)]

    def init_weights(self, module: nn.Module) -> None:
        """See `models.hybrid.model.init_weights`."""
        init_weights(module, self.shape.init_std)

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, Stored]:
        """By transformers' rules for the model with the same tensors."""
        other = twin(self.shape)
        return locate(other, storage_rules(other), stored)

    def train_samples(self) -> Any:
        """See `PretrainTask`; where ranks share samples, without reading them."""
        return self.data.train if self._ranks is None else Unread(self.data.train)

    def eval_samples(self) -> Any:
        """Likewise."""
        held_out = self.data.held_out
        return held_out if self._ranks is None or held_out is None else Unread(held_out)

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """See `recipes.text.joined.join` and, where ranks share samples, `recipes.text.planned`."""
        if self._ranks is None:
            return join(samples)
        return planned_batch(samples, self._plan, self._ranks)

    def _plan(self, lengths: Ints) -> Plan:
        assert self._ranks is not None
        if self._planner is None:
            return one_parent(lengths, self._ranks.size)
        try:
            return self._planner.plan(lengths)
        except ValueError as error:  # samples that ranks cannot hold, which no key shows
            raise DataError(str(error)) from error

    def rows(self, batch: Batch) -> Rows:
        """What the model is told about its rows: whole documents, or what a plan has put here."""
        if self._ranks is not None:
            return planned_rows(batch, self._ranks)
        return whole(Documents(tuple(batch["lengths"]), batch["cu_seq_lens"]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the batch's labels, in nats, and this rank's part of the balance."""
        if self._ranks is not None:
            self._ranks.check(batch["plan"])
        if self._watch is not None:
            self._watch.note(batch["plan"], batch["plan_seconds"])
        out: Output = model(batch["tokens_T"], self.rows(batch))
        nats = next_token_loss(out.logits_TV, batch["labels_T"])
        return nats + self._balance(out, batch["count"]) if self.balance else nats

    def _balance(self, out: Output, count: int) -> Tensor:
        """Times the labels of all ranks; see `recipes.balance`."""
        active = self.shape.active_experts
        return self.balance * balance_part(out.chances_LE, out.visits_LE, active, count)

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

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """For transformers where it can run the model; the tokenizer beside it."""
        size = write_folder(self.shape, read, out, options)
        kept = self.tokenizer.save(out)
        return f"{size / 2**30:.2f} GiB in {options.dtype}, {kept}"

    def flops(self, batch: Batch) -> float:
        """See `models.hybrid.cost`."""
        if self._ranks is not None:  # its even share, whatever it computes of it
            return training_flops(self.shape, batch["plan"].lengths) / self._ranks.size
        return training_flops(self.shape, batch["lengths"])

    def largest(self, batch: Batch) -> Batch:
        """See `recipes.abilities.Foresees`."""
        if self._planner is None:
            return batch
        return full_batch(*fullest(self._planner, batch["plan"]))

    def foresee(self, batch: Batch) -> dict[str, str]:
        """See `recipes.abilities.Foresees`."""
        return {} if self._planner is None else foreseen(self._planner, batch["plan"])

    def figures(self, step: int, steps: int, seconds: Sequence[float]) -> dict[str, Any]:
        """See `recipes.abilities.HasFigures`: of plans, where there are any."""
        return {} if self._watch is None else self._watch.figures(step, steps, seconds)

    def panels(self) -> list[dict[str, Any]]:
        """See `recipes.abilities.HasPanels`."""
        return [] if self._watch is None else self._watch.panels()

    def describe(self) -> dict[str, str]:
        """Model, attention, experts, corpus, sequences, and what the planner may do."""
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
            **({"plans": settings_in_words(self._planner)} if self._planner is not None else {}),
        }
