"""Tokenizers: bytes, or one of transformers."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recipes.task import DataError


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    size: int
    """Number of token ids; the embedding must have at least as many rows."""
    end: int
    """The id that closes every document."""
    fingerprint: str
    """Equal fingerprints mean equal tokens."""
    reads_bytes: bool
    """Whether documents may be any bytes; else they must be UTF-8."""

    def encode(self, documents: Sequence[bytes]) -> list[Any]:
        """Token ids of each document, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones by their names."""
        ...

    def save(self, folder: Path) -> str:
        """Put the tokenizer's files into a folder of weights; returns what a reader should know."""
        ...


class ByteTokenizer:
    """Every byte is a token; one more id closes a document."""

    size = 257
    end = 256
    fingerprint = "bytes"
    reads_bytes = True

    def encode(self, documents: Sequence[bytes]) -> list[Any]:
        """Byte values as uint8 arrays."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 by their values, the closing id as <end>."""
        pieces, run = [], bytearray()
        for token in [*ids, None]:
            if token is not None and token < 256:
                run.append(token)
                continue
            pieces.append(run.decode("utf-8", "backslashreplace"))
            run.clear()
            pieces.append("" if token is None else "<end>")
        return "".join(pieces)

    def save(self, folder: Path) -> str:
        """There are no files: ids are byte values."""
        del folder
        return f"token ids are byte values, {self.end} ends a document"


class FolderTokenizer:
    """A transformers tokenizer from a local folder (or hub name, where there is a network)."""

    reads_bytes = False

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        self.path = path
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # a damaged file: the library raises whatever it stumbles over
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"data.tokenizer={path} cannot be loaded ({reason}): set data.tokenizer to a "
                "folder with a tokenizer, or to null for bytes"
            ) from error
        end = self.hf.eos_token_id
        if end is None:
            raise DataError(f"data.tokenizer={path} has no end-of-text token to close documents")
        self.size = max(self.hf.get_vocab().values()) + 1
        self.end = int(end)
        backend = getattr(self.hf, "backend_tokenizer", None)
        identity = backend.to_str() if backend else json.dumps(self.hf.get_vocab())
        self.fingerprint = hashlib.blake2b(identity.encode()).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> list[Any]:
        """Token ids as lists. Raises `UnicodeDecodeError` for what is not UTF-8."""
        texts = [document.decode() for document in documents]
        return list(self.hf(texts, add_special_tokens=False)["input_ids"]) if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """As the tokenizer writes it."""
        text = self.hf.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)
        return str(text)

    def save(self, folder: Path) -> str:
        """As transformers keeps it."""
        self.hf.save_pretrained(folder)
        return "with its tokenizer"


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer at `path`, or bytes."""
    return ByteTokenizer() if path is None else FolderTokenizer(path)
