"""Texts with labels: JSON Lines, CSV or TSV files, or what Python's own library says about itself."""

import csv
import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.values import at_least
from recipes.chat.questions import read_docstrings
from recipes.task import DataError
from recipes.text.corpus import corpus_files
from recipes.text.rows import BadRows, Row, read_json_lines

FORMATS = (".jsonl", ".csv", ".tsv")
CLASSES = 8
"""The library's packages with the most texts, as classes."""


@dataclass(kw_only=True)
class LabelledConfig:
    """The `data` node of task `lelora_classify`."""

    files: list[str] | None = None
    """Globs of .jsonl, .csv or .tsv files; null: docstrings of Python's library, by package."""
    test_files: list[str] = field(default_factory=list)
    """Evaluated instead of what holdout sets apart."""
    text: str = "text"
    """The field that holds the text."""
    label: str = "label"
    """The field that holds the label, a word or a number."""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer; null: bytes."""
    max_length: int = 128
    """Tokens of a text that are read."""
    holdout: float = 0.1
    """Share of the texts that evaluation uses and training never sees."""
    max_bad_rows: int = 0
    """Rows that may be skipped because they cannot be used; one more is an error."""

    def __post_init__(self) -> None:
        if self.files is not None and not self.files:
            raise ValueError("data.files is empty: set data.files to globs of files")
        at_least("data.max_length", self.max_length, 4)
        at_least("data.max_bad_rows", self.max_bad_rows, 0)
        if not 0 <= self.holdout < 1:
            raise ValueError(f"data.holdout={self.holdout}: set data.holdout to 0 or more, below 1")


@dataclass(frozen=True)
class Labelled:
    """Texts, the numbers of their labels, and what these mean."""

    texts: list[str]
    labels: list[int]
    names: list[str]

    def fingerprint(self) -> str:
        """Equal where texts and labels are."""
        digest = hashlib.blake2b(digest_size=16)
        for text, label in zip(self.texts, self.labels, strict=True):
            digest.update(f"{label}\0{text}\0".encode(errors="surrogatepass"))
        return digest.hexdigest()


def read_labelled(config: LabelledConfig) -> tuple[Labelled, Labelled]:
    """What is trained on, and what is evaluated on; labels are numbered by their names.

    Raises `DataError` for files that are missing, rows that cannot be used, a single label, and a
    label of the test files that training does not have.
    """
    rows = list(_rows(config, config.files))
    names = sorted({label for _, label in rows}, key=_in_order)
    if len(names) < 2:
        raise DataError(
            f"{len(rows)} texts have {len(names)} label: set data.files to texts of at least two, and "
            f"data.label={config.label} to the field that holds it"
        )
    number = {name: at for at, name in enumerate(names)}
    if config.test_files:
        tested = list(_rows(config, config.test_files))
        unknown = sorted({label for _, label in tested} - set(names))
        if unknown:
            raise DataError(
                f"data.test_files have the label {unknown[0]!r}, which no text of data.files has"
            )
    else:
        tested = [row for row in rows if _held_out(row[0], config.holdout)]
        rows = [row for row in rows if not _held_out(row[0], config.holdout)]
    parts = [
        Labelled([text for text, _ in part], [number[label] for _, label in part], names)
        for part in (rows, tested)
    ]
    if not parts[0].texts:
        raise DataError("no text to train on: set data.holdout to less")
    return parts[0], parts[1]


def _in_order(name: str) -> tuple[int, float, str]:
    """Numbers by their size, then words."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _held_out(text: str, share: float) -> bool:
    """Whether a text is evaluated on: its content decides, so equal texts are on one side."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big") < share * 2**48


def _rows(config: LabelledConfig, patterns: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    if patterns is None:
        yield from _library()
        return
    bad = BadRows(config.max_bad_rows)
    for file in _files(patterns):
        for row in _read(file, bad):
            values: Any = row.value
            text, label = values.get(config.text), values.get(config.label)
            if not isinstance(text, str) or not text.strip():
                bad.add(row.where, f"no text in its field {config.text!r} (data.text)")
            elif label is None or isinstance(label, list | dict) or str(label).strip() == "":
                bad.add(row.where, f"no label in its field {config.label!r} (data.label)")
            else:
                yield text, str(label).strip()


def _files(patterns: Sequence[str]) -> list[Path]:
    found = corpus_files(patterns)
    for file in found:
        if file.suffix not in FORMATS:
            raise DataError(f"{file} is none of {', '.join(FORMATS)}: set data.files")
    return found


def _read(file: Path, bad: BadRows) -> Iterator[Row]:
    if file.suffix == ".jsonl":
        yield from read_json_lines(file, (), bad)
        return
    tab = file.suffix == ".tsv"
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            table = csv.DictReader(
                stream, delimiter="\t" if tab else ",",
                quoting=csv.QUOTE_NONE if tab else csv.QUOTE_MINIMAL,
            )  # fmt: skip
            for values in table:
                yield Row(f"{file}:{table.line_num}", dict(values))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _library() -> Iterator[tuple[str, str]]:
    """Docstrings of the library; the label is the package, for the packages with the most."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, str]] = []
    for file in corpus_files(None):
        package = file.relative_to(root).parts[0].removesuffix(".py")
        for row in read_docstrings(file, (), BadRows(10**9)):
            messages: Any = row.value
            said = messages["messages"]
            found += [(m["content"], package) for m in said if m["role"] == "assistant"]
    common = [name for name, _ in Counter(label for _, label in found).most_common(CLASSES)]
    seen: set[str] = set()
    for text, label in found:
        if label in common and text not in seen:
            seen.add(text)
            yield text, label
