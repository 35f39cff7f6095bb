"""Tokenizers, and the tokens of a whole corpus on disk.

A corpus is tokenized once, by whichever process comes first, into flat files that every rank of
every run maps into memory. Any token can then be read at any time, so the position in the data is
one number and resuming is exact.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recipes.task import DataError
from recipes.text.corpus import is_held_out, read_documents

FORMAT = 1
"""Raise it when the files below change their meaning: old caches are then left unused."""


class Tokenizer(Protocol):
    """What packing needs to know of a tokenizer."""

    size: int
    """Number of token ids; the embedding must have at least as many rows."""
    end: int
    """The id that closes every document."""
    fingerprint: str
    """Equal fingerprints mean equal tokens."""

    def encode(self, documents: Sequence[bytes]) -> list[Any]:
        """Token ids of each document, without special tokens."""
        ...

    def save(self, folder: Path) -> str:
        """Put the tokenizer's files into a folder of weights; returns what a reader should know."""
        ...


class ByteTokenizer:
    """Every byte is a token; one more id closes a document."""

    size = 257
    end = 256
    fingerprint = "bytes"

    def encode(self, documents: Sequence[bytes]) -> list[Any]:
        """Byte values as uint8 arrays."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def save(self, folder: Path) -> str:
        """There are no files: ids are byte values."""
        del folder
        return f"token ids are byte values, {self.end} ends a document"


class FolderTokenizer:
    """A transformers tokenizer from a local folder (or hub name, where there is a network)."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"data.tokenizer={path} cannot be loaded ({reason}): set data.tokenizer to a "
                "folder with a tokenizer, or to null for bytes"
            ) from error
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(f"data.tokenizer={path} has no end-of-text token to close documents")
        self.size = max(self._tokenizer.get_vocab().values()) + 1
        self.end = int(end)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        identity = backend.to_str() if backend else json.dumps(self._tokenizer.get_vocab())
        self.fingerprint = hashlib.blake2b(identity.encode()).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> list[Any]:
        """Token ids as lists; bytes that are not UTF-8 become replacement characters."""
        texts = [document.decode("utf-8", "replace") for document in documents]
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"])

    def save(self, folder: Path) -> str:
        """As transformers keeps it."""
        self._tokenizer.save_pretrained(folder)
        return "with its tokenizer"


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer at `path`, or bytes."""
    return ByteTokenizer() if path is None else FolderTokenizer(path)


@dataclass(frozen=True)
class TokenFile:
    """One part (training or held-out) of a tokenized corpus, mapped into memory."""

    tokens: NDArray[Any]
    """All documents one after the other, each closed by the tokenizer's end id."""
    starts: NDArray[np.int64]
    """Where each document starts in `tokens`; one more entry than documents."""
    num_bytes: int
    """Bytes of text that the documents had."""
    folder: Path | None = None

    def __reduce__(self) -> Any:
        """A process that is started afresh maps the same files, rather than getting a copy."""
        if self.folder is None:
            return type(self), (self.tokens, self.starts, self.num_bytes)
        return _open, (self.folder,)


def tokenized(
    files: Sequence[Path], text_key: str, tokenizer: Tokenizer, holdout: float, cache: Path
) -> tuple[TokenFile, TokenFile]:
    """The training and the held-out part of a corpus, tokenized now unless `cache` has them.

    The cache is keyed by the files' paths, sizes and times, so a changed corpus is read anew.
    Safe to call from many processes at once: one works, the others wait for it.
    """
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    identity = json.dumps([FORMAT, stats, text_key, tokenizer.fingerprint, tokenizer.end, holdout])
    folder = cache / f"tokens-{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}"
    try:
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / f"{folder.name}.lock").open("w") as lock:
                with suppress(OSError):  # a file system without locks: both work, one result stays
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not folder.is_dir():
                    _write(folder, read_documents(files, text_key), tokenizer, holdout)
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or cache} ({error.strerror}): set data.cache_dir"
        ) from error
    return _open(folder / "train"), _open(folder / "held_out")


def _write(folder: Path, documents: Iterator[bytes], tokenizer: Tokenizer, share: float) -> None:
    """Tokenize into a temporary folder and rename it, so that `folder` is whole or absent."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
        parts = {name: _PartWriter(temporary / name, dtype) for name in ("train", "held_out")}
        while chunk := list(islice(documents, 256)):
            for document, ids in zip(chunk, tokenizer.encode(chunk), strict=True):
                part = parts["held_out" if is_held_out(document, share) else "train"]
                part.add(
                    [*ids, tokenizer.end]
                    if isinstance(ids, list)
                    else np.append(ids.astype(dtype), dtype(tokenizer.end)),
                    len(document),
                )
        for part in parts.values():
            part.close()
        if not folder.is_dir():
            os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class _PartWriter:
    def __init__(self, folder: Path, dtype: Any) -> None:
        folder.mkdir()
        self.folder, self.dtype = folder, dtype
        self.file = (folder / "tokens.bin").open("wb")
        self.starts, self.num_bytes = [0], 0

    def add(self, ids: Any, num_bytes: int) -> None:
        self.file.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.starts.append(self.starts[-1] + len(ids))
        self.num_bytes += num_bytes

    def close(self) -> None:
        self.file.close()
        np.save(self.folder / "starts.npy", np.asarray(self.starts, dtype=np.int64))
        meta = {"dtype": np.dtype(self.dtype).name, "num_bytes": self.num_bytes}
        (self.folder / "meta.json").write_text(json.dumps(meta))


def _open(folder: Path) -> TokenFile:
    meta = json.loads((folder / "meta.json").read_text())
    starts = np.load(folder / "starts.npy")
    file = folder / "tokens.bin"
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        tokens: NDArray[Any] = np.empty(0, dtype=meta["dtype"])
    else:
        tokens = np.memmap(file, dtype=meta["dtype"], mode="r")
    return TokenFile(tokens, starts, meta["num_bytes"], folder)
