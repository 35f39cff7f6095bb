"""Documents from local files: one per text file, or one per line of a JSON Lines file."""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.task import DataError

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}
"""Folders of the standard library that are not its sources, or that not every machine has."""


def corpus_files(patterns: Sequence[str] | None) -> list[Path]:
    """The files that `patterns` match, sorted; without patterns, Python's standard library.

    Raises `DataError` if a pattern matches nothing.
    """
    if not patterns:
        return _standard_library()
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(m) for m in glob.glob(str(Path(pattern).expanduser()), recursive=True)]
        files = [m for m in matches if m.is_file()]
        if not files:
            what = "matches folders only" if matches else "matches no file"
            raise DataError(f"data.files: {pattern} {what}: set data.files to existing files")
        found.update(files)
    return sorted(found)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in root.rglob("*.py") if SKIPPED.isdisjoint(f.relative_to(root).parts)]
    if not files:
        raise DataError(f"no Python sources under {root}: set data.files to text files of your own")
    return sorted(files)


def read_documents(files: Sequence[Path], text_key: str) -> Iterator[bytes]:
    """The documents as UTF-8 bytes, empty ones left out.

    `.jsonl` files hold one JSON object a line with the text under `text_key`; any other file is
    one document. Raises `DataError` that names file and line.
    """
    for file in files:
        try:
            if file.suffix == ".jsonl":
                yield from filter(None, _json_lines(file, text_key))
            elif document := file.read_bytes():
                yield document
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error


def _json_lines(file: Path, text_key: str) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: not JSON ({error})") from error
            text = row.get(text_key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise DataError(
                    f"{file}, line {number}: no text under {text_key!r}: set data.text_key"
                )
            yield text.encode("utf-8", "surrogatepass")


def is_held_out(document: bytes, share: float) -> bool:
    """Whether a document belongs to the held-out part: decided by its content alone.

    So the split does not depend on paths or order, and equal documents fall on the same side.
    """
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
