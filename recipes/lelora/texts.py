"""Texts as tokens: of a transformers tokenizer, or bytes.

B texts, S tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipes.lelora.labelled import Labelled
from recipes.task import DataError

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


def tokenizer_of(folder: str | None) -> Any:
    """Of transformers; None for `folder` None: bytes. Raises `DataError`."""
    if folder is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.tokenizer={folder} cannot be loaded ({str(error).splitlines()[0]}): set "
            "data.tokenizer to a folder with a tokenizer, or to null for bytes"
        ) from error


def padded(samples: Sequence[tuple[list[int], int]], padding: int) -> dict[str, Any]:
    """A batch, padded on the right to the longest text."""
    length = max(len(tokens) for tokens, _ in samples)
    tokens_BS = torch.full((len(samples), length), padding)
    mask_BS = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, (tokens, _) in enumerate(samples):
        tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
        mask_BS[row, : len(tokens)] = 1
    return {
        "tokens_BS": tokens_BS,
        "mask_BS": mask_BS,
        "labels_B": torch.tensor([label for _, label in samples]),
        "count": len(samples),
        "tokens": sum(len(tokens) for tokens, _ in samples),
    }
