"""Pretraining: a causal language model learns to predict the next token of packed documents."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from configs.values import at_least
from models.attention import document_mask
from models.causal_lm import (
    CausalLMConfig,
    attention_kind,
    attention_width,
    build_causal_lm,
    check_fits,
    init_weights,
    local_folder,
    matmul_parameters,
    next_token_loss,
    transformers_config,
)
from models.hf_folder import Read, add_weight_arguments, write_hf_folder
from models.stored_weights import Stored, locate, storage_rules
from recipes.task import Batch, DataError
from recipes.text.corpus import corpus_files
from recipes.text.packing import PackedSequences, Sequence_S, collate
from recipes.text.tokens import TokenFile, Tokenizer, load_tokenizer, tokenized


@dataclass(kw_only=True)
class PretrainConfig:
    """The `task` node."""

    name: str = "pretrain"


@dataclass(kw_only=True)
class TextConfig:
    """The `data` node."""

    files: list[str] | None = None
    """Local globs (** works) of text files or .jsonl; null: the sources of Python's own library."""
    text_key: str = "text"
    """Where a line of a .jsonl file holds its text."""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer; null: bytes."""
    sequence_length: int = 256
    """Tokens a sequence."""
    holdout: float = 0.05
    """Share of the documents that evaluation uses and training never sees."""
    cache_dir: str = "~/.cache/springtide"
    """Where tokenized corpora are kept; on many nodes, a folder that every node sees or its own."""

    def __post_init__(self) -> None:
        if self.files == []:
            raise ValueError(
                "data.files is empty: set data.files to globs of text or .jsonl files, such as "
                "'data.files=[corpus/**/*.txt]'"
            )
        at_least("data.sequence_length", self.sequence_length, 2)
        if not 0 <= self.holdout < 1:
            raise ValueError(f"data.holdout={self.holdout}: set data.holdout to 0 or more, below 1")


class PretrainTask:
    """The trainer's first task; see `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": PretrainConfig,
        "model": CausalLMConfig,
        "data": TextConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: PretrainConfig, model: CausalLMConfig, data: TextConfig, seed: int
    ) -> None:
        del task
        self.model_config, self.data_config, self.seed = model, data, seed
        self._flops_per_token = self._flops_per_pair = 0.0
        self._model: nn.Module | None = None
        self._storage_rules: list[Any] = []
        self._attention = ""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded when first needed."""
        return load_tokenizer(self.data_config.tokenizer)

    @cached_property
    def hf_config(self) -> Any:
        """The transformers configuration of the model; its vocabulary holds the tokenizer's."""
        config = transformers_config(self.model_config, self.tokenizer.size)
        vocab_size = config.get_text_config().vocab_size
        if vocab_size < self.tokenizer.size:
            raise ValueError(
                f"model.vocab_size={vocab_size} is smaller than the tokenizer's {self.tokenizer.size} "
                f"ids: set model.vocab_size={self.tokenizer.size} or more"
            )
        return config

    @cached_property
    def _parts(self) -> tuple[TokenFile, TokenFile]:
        data = self.data_config
        cache = Path(os.environ.get("SPRINGTIDE_CACHE", data.cache_dir)).expanduser()
        files = corpus_files(data.files)
        return tokenized(files, data.text_key, self.tokenizer, data.holdout, cache)

    def check(self) -> None:
        """Load the tokenizer, find the model, and tokenize the corpus."""
        check_fits(self.hf_config, self.data_config.sequence_length)
        self.build_model()
        self.weights_folder()
        train, held_out = self._parts
        if not len(train.tokens):
            where = " ".join(self.data_config.files or ["the standard library"])
            raise DataError(
                f"no text to train on in {where} ({len(held_out.starts) - 1} documents held out): "
                "set data.files, or data.holdout=0"
            )

    def build_model(self) -> nn.Module:
        """The transformers model on the meta device."""
        model = build_causal_lm(self.model_config, self.hf_config)
        self._flops_per_token = 6.0 * matmul_parameters(model)
        self._flops_per_pair = 12.0 * attention_width(model)
        self._attention = attention_kind(self.model_config, self.hf_config)
        self._model, self._storage_rules = model, storage_rules(model)
        return model

    def __getstate__(self) -> dict[str, Any]:
        """What data workers need, where they are started afresh: not the model."""
        return {**self.__dict__, "_model": None, "_storage_rules": []}

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

    def train_samples(self) -> PackedSequences:
        """Packed sequences of the training documents, in an order that the seed decides."""
        return self._sequences(self._parts[0], self.seed)

    def eval_samples(self) -> PackedSequences | None:
        """Packed sequences of the held-out documents, in the corpus's order."""
        held_out = self._parts[1]
        return self._sequences(held_out, None) if len(held_out.tokens) else None

    def _sequences(self, part: TokenFile, seed: int | None) -> PackedSequences:
        return PackedSequences(part, self.data_config.sequence_length, self.tokenizer.end, seed)

    def collate(self, samples: Sequence[Sequence_S]) -> dict[str, Any]:
        """See `recipes.text.packing.collate`."""
        return collate(samples)

    def count(self, batch: Batch) -> int:
        """Labels that are not ignored."""
        return int(batch["count"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the batch's labels, in nats."""
        tokens_BS, boundaries = batch["tokens_BS"], batch["cu_seq_lens"]
        documents: dict[str, Any] = {}
        if self._attention == "packed":
            documents = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            documents |= {f"max_length_{side}": batch["max_length"] for side in "qk"}
            if tokens_BS.device.type == "cpu":  # no flash kernel: one mask serves all layers
                documents["attention_mask"] = document_mask(boundaries, *tokens_BS.shape)
        output = model(input_ids=tokens_BS, position_ids=batch["positions_BS"], **documents)
        return next_token_loss(output.logits, batch["labels_BS"])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """Summed loss and its count."""
        return {"nats": self.loss(model, batch), "labels": float(batch["count"])}

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Loss per token, and per byte of text, which compares across tokenizers."""
        loss = sums["nats"] / max(sums["labels"], 1.0)
        held_out = self._parts[1]
        tokens_per_byte = len(held_out.tokens) / max(held_out.num_bytes, 1)
        return {"loss": loss, "nats_per_byte": loss * tokens_per_byte}

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
        tokens = batch["tokens_BS"].numel()
        return self._flops_per_token * tokens + self._flops_per_pair * float(batch["pairs"])

    def describe(self) -> dict[str, str]:
        """Model, corpus and sequences."""
        config = self.hf_config.get_text_config()
        train, held_out = self._parts
        files = " ".join(self.data_config.files or ["sources of Python's standard library"])
        tokenizer = self.data_config.tokenizer or "bytes"
        return {
            "model": f"{config.model_type}, {config.num_hidden_layers} layers x "
            f"{config.hidden_size}, vocabulary {config.vocab_size:,}",
            "data": f"{files}: {len(train.starts) - 1:,} documents, {len(train.tokens):,} tokens "
            f"({tokenizer}), {len(held_out.tokens):,} held out",
            "sequences": f"{self.data_config.sequence_length:,} tokens, documents packed"
            + ("" if len(held_out.tokens) else "; none held out, so no evaluation"),
        }
