"""Texts as tokens: of a transformers tokenizer, or bytes."""

from dataclasses import dataclass
from typing import Any

from recipes.lelora.labelled import Labelled

FIRST_ID = 3
"""Byte values begin here: 0 is padding, 1 begins a text, 2 ends it."""


@dataclass(frozen=True)
class Texts:
    """Samples: the tokens of a text, and its label."""

    tokens: list[list[int]]
    source: Labelled

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.tokens[index], self.source.labels[index]

    def fingerprint(self) -> str:
        """Of texts and labels."""
        return self.source.fingerprint()


def encoded(part: Labelled, tokenizer: Any, length: int) -> Texts:
    """At most `length` tokens of each text, special ones included; `tokenizer` None: bytes."""
    if tokenizer is not None:
        ids = tokenizer(part.texts, truncation=True, max_length=length)["input_ids"]
        return Texts([list(tokens) for tokens in ids], part)
    texts = (text.encode(errors="replace")[: length - 2] for text in part.texts)
    return Texts([[1, *(FIRST_ID + byte for byte in text), 2] for text in texts], part)
