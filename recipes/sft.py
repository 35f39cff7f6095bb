"""Supervised fine-tuning: a causal language model learns the assistant's part of conversations."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from models.causal_lm import CausalLMConfig
from models.hf_folder import Read
from recipes.chat.conversation import COLUMNS, read_conversation
from recipes.chat.questions import read_docstrings
from recipes.chat.template import Template, load_template
from recipes.pretrain import PretrainConfig, PretrainTask
from recipes.text.config import SequencesConfig, SourceConfig
from recipes.text.documents import Document, Encoder
from recipes.text.rows import BadRows, Reader, Row, read_json_lines, read_parquet
from recipes.text.tokenizers import Tokenizer


@dataclass(kw_only=True)
class SFTConfig(PretrainConfig):
    """The `task` node."""

    name: str = "sft"


@dataclass(kw_only=True)
class ChatPart(SourceConfig):
    """One source of a mixture of conversations."""

    weight: float = 1.0


@dataclass(kw_only=True)
class ChatConfig(SequencesConfig):
    """The `data` node of task `sft`."""

    chat_template: str | None = None
    """plain: each turn is its role's name, a line break, its text and the closing token; a file: a Jinja
    template for the tokenizer; null: the tokenizer's own, and plain for bytes."""
    packing: str = "whole"
    """whole: conversations that fit are put together, the rest is padding; none: one conversation a
    sequence, padded; stream: one after the other, cut where a sequence ends."""
    long_documents: str = "truncate"
    """What happens to conversations longer than a sequence: truncate (keep the beginning), drop or
    split."""

    part: ClassVar[type[SourceConfig]] = ChatPart


class ChatEncoder:
    """Every row is one conversation, of which the assistant's part is learnt."""

    columns = COLUMNS
    readers: ClassVar[Mapping[str, Reader]] = {
        "jsonl": read_json_lines,
        "parquet": read_parquet,
        "docstrings": read_docstrings,
    }

    def __init__(self, tokenizer: Tokenizer, template: Template) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.fingerprint = f"chat {template.fingerprint} {tokenizer.fingerprint} {tokenizer.end}"

    def encode(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Document]:
        """See `recipes.text.documents.Encoder`."""
        for row in rows:
            assert isinstance(row.value, dict)
            try:
                conversation = read_conversation(row.value)
                documents = list(self.template.tokens(conversation))
            except UnicodeError as error:  # a lone surrogate
                bad.add(row.where, f"not UTF-8 ({getattr(error, 'reason', error)})")
                continue
            except ValueError as error:
                bad.add(row.where, str(error))
                continue
            content = json.dumps(conversation.messages, sort_keys=True, default=str).encode()
            said = [conversation.messages[answer]["content"] for answer in conversation.answers]
            sizes = [len(text.encode()) for text in said]
            if len(documents) == 1:
                sizes = [sum(sizes)]
            for (ids, learnt), size in zip(documents, sizes, strict=True):
                yield Document(ids, content, size, learnt, row.where)


class SFTTask(PretrainTask):
    """Next-token prediction, as in pretraining, on conversations of which only answers are labels."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": SFTConfig,
        "model": CausalLMConfig,
        "data": ChatConfig,
    }
    library = "questions about Python's standard library, answered by its docstrings"

    def __init__(self, *, task: Any, model: CausalLMConfig, data: ChatConfig, seed: int) -> None:
        super().__init__(task=task, model=model, data=data, seed=seed)
        self.chat_template = data.chat_template

    @cached_property
    def template(self) -> Template:
        """Loaded when first needed."""
        return load_template(self.tokenizer, self.chat_template)

    def encoder(self, source: SourceConfig) -> Encoder:
        """How documents are made of a source's rows."""
        del source
        return ChatEncoder(self.tokenizer, self.template)

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """As for pretraining, with the chat template that was trained on."""
        assert self.template  # puts a template of one's own into the tokenizer
        return super().export(model, read, out, options)

    def __getstate__(self) -> dict[str, Any]:
        """As for pretraining, and no template."""
        return {name: value for name, value in super().__getstate__().items() if name != "template"}
