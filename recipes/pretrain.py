"""Pretraining: a causal language model learns to predict the next token of packed documents."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from configs.values import at_least
from models.architectures import attention_kind, told_apart
from models.causal_lm import (
    CausalLMConfig,
    attention_width,
    build_causal_lm,
    check_fits,
    init_weights,
    local_folder,
    matmul_parameters,
    next_token_loss,
    next_token_losses,
    transformers_config,
)
from models.hf_folder import Read, add_weight_arguments, write_hf_folder
from models.routing import Listener, Routed, routed
from models.sharing import check_heads
from models.stored_weights import Stored, locate, storage_rules
from parallel.sequence import SequenceRanks, SharedRows
from recipes.balance import balance_part, expert_load
from recipes.task import Batch
from recipes.text import inspect
from recipes.text.config import SequencesConfig, SourceConfig, TextConfig
from recipes.text.data import TextData
from recipes.text.documents import Encoder, TextEncoder
from recipes.text.mixture import Interleaved, Mixture
from recipes.text.packing import IGNORED, Sequence_S, collate
from recipes.text.sharing import own_part
from recipes.text.tokenizers import Tokenizer, load_tokenizer


@dataclass(kw_only=True)
class PretrainConfig:
    """The `task` node."""

    name: str = "pretrain"
    balance: float = 0.0
    """Weight of a load-balance loss for models with mixtures of experts, which is 1 when all experts of
    a layer are visited equally often by the tokens of a micro-batch on all ranks together; 0: none."""

    def __post_init__(self) -> None:
        at_least("task.balance", self.balance, 0)


def check_vocabulary(vocab_size: int, ids: int) -> None:
    """Raise `ValueError` if the embedding has fewer rows than the tokenizer has ids."""
    if vocab_size < ids:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {ids} ids: set "
            f"model.vocab_size={ids} or more"
        )


class PretrainTask:
    """The trainer's first task; see `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": PretrainConfig,
        "model": CausalLMConfig,
        "data": TextConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard", "sequence"})
    library = "sources of Python's standard library"
    """What a source without files is made of."""

    def __init__(
        self, *, task: Any, model: CausalLMConfig, data: SequencesConfig, seed: int
    ) -> None:
        self.model_config, self.data_config, self.seed = model, data, seed
        self.balance: float = getattr(task, "balance", 0.0)
        self._routers: Listener | None = None
        self._flops_per_token = self._flops_per_pair = 0.0
        self._model: nn.Module | None = None
        self._storage_rules: list[Any] = []
        self._attention = ""
        self._shared: SequenceRanks | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded when first needed."""
        return load_tokenizer(self.data_config.tokenizer)

    @cached_property
    def hf_config(self) -> Any:
        """The transformers configuration of the model; its vocabulary holds the tokenizer's."""
        config = transformers_config(self.model_config, self.tokenizer.size)
        check_vocabulary(config.get_text_config().vocab_size, self.tokenizer.size)
        return config

    def encoder(self, source: SourceConfig) -> Encoder:
        """How documents are made of a source's rows."""
        return TextEncoder(self.tokenizer, source.text_key)  # type: ignore[attr-defined]

    @cached_property
    def data(self) -> TextData:
        """The corpus in tokens: made when first needed, and kept on disk."""
        return TextData(
            self.data_config,
            self.encoder,
            end=self.tokenizer.end,
            seed=self.seed,
            library=self.library,
        )

    def share_sequences(self, ranks: SequenceRanks) -> None:
        """See `recipes.abilities.SharesSequences`."""
        self._shared = ranks

    def check(self) -> None:
        """Load the tokenizer, find the model, and tokenize the corpus."""
        check_fits(self.hf_config, self.data_config.sequence_length)
        if self._shared is not None:
            check_heads(self.hf_config, self._shared.size)
        self.build_model()
        self.weights_folder()
        self.data.check()

    def build_model(self) -> nn.Module:
        """The transformers model on the meta device."""
        packed = self.data_config.packing != "none"
        shared = self._shared is not None
        model = build_causal_lm(self.model_config, self.hf_config, packed, shared)
        self._flops_per_token = 6.0 * matmul_parameters(model)
        self._flops_per_pair = 12.0 * attention_width(model)
        self._attention = attention_kind(
            self.model_config.attention, self.hf_config, packed, shared
        )
        self._model, self._storage_rules = model, storage_rules(model)
        if self.balance:
            self._routers = Listener(model, f"task.balance={self.balance:g}")
        return model

    def __getstate__(self) -> dict[str, Any]:
        """What data workers need, where they are started afresh: neither the model nor the data."""
        kept = {name: value for name, value in self.__dict__.items() if name != "data"}
        return {**kept, "_model": None, "_storage_rules": [], "_routers": None}

    def init_weights(self, module: nn.Module) -> None:
        """The architecture's own initialisation."""
        assert self._model is not None, "build_model comes first"
        init_weights(self._model, module)

    def weights_folder(self) -> Path | None:
        """`model.path`, if its weights are wanted."""
        config = self.model_config
        return local_folder(config.path) if config.path and config.load_weights else None

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, Stored]:
        """By transformers' own rules."""
        return locate(model, self._storage_rules, stored)

    def train_samples(self) -> Mixture:
        """Sequences of the training documents, in an order that the seed decides."""
        return self.data.train

    def eval_samples(self) -> Interleaved | None:
        """Sequences of the held-out documents, each source in the corpus's order."""
        return self.data.held_out

    def collate(self, samples: Sequence[Sequence_S]) -> dict[str, Any]:
        """See `recipes.text.packing.collate`; where ranks share sequences, this one's part."""
        batch = collate(samples, self.tokenizer.end)
        if self._shared is not None:
            return own_part(batch, self._shared, self.tokenizer.end)
        return batch

    def count(self, batch: Batch) -> int:
        """Labels that are not ignored."""
        return int(batch["count"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the batch's labels, in nats; and this rank's part of the balance."""
        if self._routers is None:
            return next_token_loss(self._logits(model, batch), batch["labels_BS"])
        logits_BSV, (visits_LE, chances_LE) = self._logits_and_routing(model, batch)
        active = self.hf_config.get_text_config().num_experts_per_tok
        part = balance_part(chances_LE, visits_LE, active, batch["count"])
        return next_token_loss(logits_BSV, batch["labels_BS"]) + self.balance * part

    def _logits_and_routing(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Routed]:
        assert self._routers is not None
        with self._routers.listening() as heard:
            logits_BSV = self._logits(model, batch)
        return logits_BSV, routed(heard, batch["labels_BS"].flatten() != IGNORED)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens_BS, boundaries = batch["tokens_BS"], batch["cu_seq_lens"]
        shared = None
        if self._shared is not None:
            shared = SharedRows(self._shared, batch["layout"], boundaries)
        given: dict[str, Any] = {}
        if self._attention == "packed" or self.data_config.packing != "none":
            given = told_apart(
                self._attention, model.config, batch["positions_BS"], boundaries,
                batch["max_length"], shared,
            )  # fmt: skip
        # else one document from position 0, and padding that nothing before it can see
        output = model(input_ids=tokens_BS, **given)
        logits: Tensor = output.logits
        return logits

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """Summed loss and its count, with several sources those of each, too; and visits to experts."""
        sums: dict[str, Tensor | float] = {}
        if self._routers is None:
            logits_BSV = self._logits(model, batch)
        else:
            logits_BSV, (sums["visits"], _) = self._logits_and_routing(model, batch)
        if len(self.data.parts) == 1:
            nats = next_token_loss(logits_BSV, batch["labels_BS"])
            return {**sums, "nats": nats, "labels": float(batch["count"])}
        nats_BS = next_token_losses(logits_BSV, batch["labels_BS"])
        learnt_BS = batch["labels_BS"] != IGNORED
        sums |= {"nats": nats_BS.sum(), "labels": learnt_BS.sum()}
        for number in range(len(self.data.parts)):
            here_BS = batch["sources_BS"] == number
            sums[f"nats/{number}"] = (nats_BS * here_BS).sum()
            sums[f"labels/{number}"] = (learnt_BS & here_BS).sum()
        return sums

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """See `recipes.text.data.TextData.summarize`; and the load of the busiest expert."""
        figures = self.data.summarize(sums)
        if "visits" in sums and sums["visits"].numel():
            figures["expert_load"] = expert_load(sums["visits"])
        return figures

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """Type and file size of the weights."""
        add_weight_arguments(parser)

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """Weights and configuration for transformers, and the tokenizer beside them."""
        size = write_hf_folder(model, read, out, options)
        kept = self.tokenizer.save(out)
        return f"{size / 2**30:.2f} GiB in {options.dtype}, {kept}"

    def flops(self, batch: Batch) -> float:
        """Matrix products (6 per parameter and token) plus attention inside the documents."""
        tokens = batch["tokens_BS"].numel() - batch["padding"]
        return self._flops_per_token * tokens + self._flops_per_pair * float(batch["pairs"])

    def describe(self) -> dict[str, str]:
        """Model, corpus and sequences."""
        config = self.hf_config.get_text_config()
        return {
            "model": f"{config.model_type}, {config.num_hidden_layers} layers x "
            f"{config.hidden_size}, vocabulary {config.vocab_size:,}"
            + ("; runs Python code of its own" if self.model_config.trust_remote_code else ""),
            **self.data.describe(self.data_config.tokenizer or "bytes"),
        }

    def show(self, sample: Sequence_S) -> Iterator[str]:
        """See `recipes.text.inspect.show`."""
        return inspect.show(sample, self.tokenizer, [part.short_name for part in self.data.parts])

    def where(self, index: int) -> Iterator[str]:
        """See `recipes.abilities.Locates`."""
        source, position = self.data.train.locate(index)
        return self.data.train.sources[source].where(position)

    def survey(self) -> dict[str, str]:
        """See `recipes.text.inspect.survey`."""
        return inspect.survey(self.data)
