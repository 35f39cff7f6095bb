"""The tokens of a whole corpus on disk.

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
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.task import DataError
from recipes.text.corpus import Source, is_held_out
from recipes.text.documents import Document, Encoder
from recipes.text.origins import OriginWriter
from recipes.text.rows import BadRows

FORMAT = 3
"""Raise it when the files below change their meaning: old caches are then left unused."""


@dataclass(frozen=True)
class TokenFile:
    """One part (training or held-out) of a tokenized corpus, mapped into memory."""

    tokens: NDArray[Any]
    """All documents one after the other."""
    starts: NDArray[np.int64]
    """Where each document starts in `tokens`; one more entry than documents."""
    num_bytes: int
    """Bytes of text that are learnt."""
    folder: Path | None = None
    learnt: NDArray[np.bool_] | None = None
    """For each token, whether predicting it is a label; None: every token is."""
    num_learnt: int = 0
    """How many tokens are learnt."""
    digest: str = ""
    """Equal for equal tokens, wherever the corpus lay."""

    def __reduce__(self) -> Any:
        """A process that is started afresh maps the same files, rather than getting a copy."""
        if self.folder is None:
            values = (self.tokens, self.starts, self.num_bytes, None, self.learnt)
            return type(self), (*values, self.num_learnt, self.digest)
        return _open, (self.folder,)


@dataclass(frozen=True)
class Corpus:
    """A tokenized source."""

    train: TokenFile
    held_out: TokenFile
    bad_rows: int
    """Rows that were skipped."""
    first_bad: list[str]
    """Where the first of them are, and what is wrong with each."""


def tokenized(
    source: Source, encoder: Encoder, holdout: float, max_bad_rows: int, cache: Path
) -> Corpus:
    """A corpus in tokens, tokenized now unless `cache` has them.

    The cache is keyed by the files' paths, sizes and times, so a changed corpus is read anew.
    Safe to call from many processes at once: one works, the others wait for it.
    """
    source.check_formats(encoder.readers)
    identity = json.dumps([FORMAT, source.identity(), encoder.fingerprint, holdout])
    folder = cache / f"tokens-{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}"
    try:
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / f"{folder.name}.lock").open("w") as lock:
                with suppress(OSError):  # a file system without locks: both work, one result stays
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not folder.is_dir():
                    _write(folder, source, encoder, holdout, BadRows(max_bad_rows))
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or cache} ({error.strerror}): set data.cache_dir"
        ) from error
    bad = BadRows(max_bad_rows, **json.loads((folder / "bad_rows.json").read_text()))
    bad.check()  # the limit may have been another when the cache was written
    return Corpus(_open(folder / "train"), _open(folder / "held_out"), bad.count, bad.first)


def _write(folder: Path, source: Source, encoder: Encoder, share: float, bad: BadRows) -> None:
    """Tokenize into a temporary folder and rename it, so that `folder` is whole or absent."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        dtype = np.uint16 if encoder.tokenizer.size <= 2**16 else np.uint32
        parts = {name: _PartWriter(temporary / name, dtype) for name in ("train", "held_out")}
        rows = source.rows(encoder.readers, encoder.columns, bad)
        while chunk := list(islice(rows, 256)):
            for document in encoder.encode(chunk, bad):
                side = "held_out" if is_held_out(document.content, share) else "train"
                parts[side].add(document)
        for part in parts.values():
            part.close()
        found = {"count": bad.count, "first": bad.first}
        (temporary / "bad_rows.json").write_text(json.dumps(found))
        if not folder.is_dir():
            os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class _PartWriter:
    def __init__(self, folder: Path, dtype: Any) -> None:
        folder.mkdir()
        self.folder, self.dtype = folder, dtype
        self.tokens = (folder / "tokens.bin").open("wb")
        self.learnt = (folder / "learnt.bin").open("wb")
        self.origins = OriginWriter()
        self.digest = hashlib.blake2b(digest_size=16)
        self.starts, self.num_bytes, self.num_learnt, self.masked = [0], 0, 0, False

    def add(self, document: Document) -> None:
        ids = np.asarray(document.ids, dtype=self.dtype).tobytes()
        self.tokens.write(ids)
        self.digest.update(len(document.ids).to_bytes(8, "big") + ids)
        self.starts.append(self.starts[-1] + len(document.ids))
        self.origins.add(document.where)
        self.num_bytes += document.num_bytes
        if document.learnt is None:
            self.num_learnt += len(document.ids)
        else:
            self.masked = True
            self.learnt.write(document.learnt.tobytes())
            self.digest.update(document.learnt.tobytes())
            self.num_learnt += int(document.learnt.sum())

    def close(self) -> None:
        self.tokens.close()
        self.learnt.close()
        if not self.masked:
            (self.folder / "learnt.bin").unlink()
        self.origins.write(self.folder)
        np.save(self.folder / "starts.npy", np.asarray(self.starts, dtype=np.int64))
        meta = {
            "dtype": np.dtype(self.dtype).name,
            "num_bytes": self.num_bytes,
            "num_learnt": self.num_learnt,
            "digest": self.digest.hexdigest(),
        }
        (self.folder / "meta.json").write_text(json.dumps(meta))


def _open(folder: Path) -> TokenFile:
    meta = json.loads((folder / "meta.json").read_text())
    learnt = folder / "learnt.bin"
    return TokenFile(
        tokens=_map(folder / "tokens.bin", meta["dtype"]),
        starts=np.load(folder / "starts.npy"),
        num_bytes=meta["num_bytes"],
        folder=folder,
        learnt=_map(learnt, "bool") if learnt.is_file() else None,
        num_learnt=meta["num_learnt"],
        digest=meta["digest"],
    )


def _map(file: Path, dtype: str) -> NDArray[Any]:
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
