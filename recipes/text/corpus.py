"""Where documents come from: local files, a dataset of the hub, or Python's standard library."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from configs.values import one_of
from recipes.task import DataError
from recipes.text.config import SourceConfig
from recipes.text.rows import EXTRA, BadRows, Reader, Row, present, read_files

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}
"""Folders of the standard library that are not its sources, or that not every machine has."""
PACKED = {".gz", ".zst"}


@dataclass(frozen=True)
class Source:
    """One source of documents, found and ready to be read."""

    key: str
    """The configuration node that describes it: `data`, or `data.mixture.NAME`."""
    config: SourceConfig
    files: Sequence[Path]
    dataset: Any = None
    """A dataset of the library `datasets`, instead of files."""

    def identity(self) -> list[Any]:
        """What changes when the source's content does."""
        if self.dataset is None:
            return [_stats(self.files), self.config.format]
        files = [Path(part["filename"]) for part in self.dataset.cache_files]
        chosen = [self.config.dataset, self.config.subset, self.config.split, len(self.dataset)]
        return [_stats(files), *chosen]

    def rows(
        self, readers: Mapping[str, Reader], columns: Sequence[str], bad: BadRows
    ) -> Iterator[Row]:
        """Every row, in the order of the files."""
        if self.dataset is not None:
            return self._dataset_rows(columns)
        return read_files(self.files, lambda file: self._reader(file, readers), columns, bad)

    def _dataset_rows(self, columns: Sequence[str]) -> Iterator[Row]:
        name = f"{self.config.dataset}[{self.config.split}]"
        kept = present(columns, self.dataset.column_names, name)
        for number, value in enumerate(self.dataset.select_columns(kept), start=1):
            yield Row(f"{name}:{number}", value)

    def _reader(self, file: Path, readers: Mapping[str, Reader]) -> Reader:
        kind = self.config.format
        if kind == "auto":
            kind = file_format(file, readers)
        return readers[kind]

    def check_formats(self, readers: Mapping[str, Reader]) -> None:
        """Raise `ValueError` for a format that the task does not read, `DataError` for such a file."""
        one_of(f"{self.key}.format", self.config.format, ["auto", *readers])
        if self.config.format == "auto":
            for file in self.files:
                file_format(file, readers)

    def words(self, library: str) -> str:
        """The source in the header; `library` is what is made of the standard library."""
        if self.config.dataset is not None:
            return f"{self.config.dataset}[{self.config.split}]"
        return " ".join(self.config.files or [library])


def _stats(files: Sequence[Path]) -> list[Any]:
    """Paths, sizes and times. Raises `DataError` that names a file that cannot be reached."""
    try:
        return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


def file_format(file: Path, readers: Mapping[str, Reader]) -> str:
    """What a file's name says that it holds."""
    suffixes = [s for s in file.suffixes if s not in PACKED]
    last = suffixes[-1] if suffixes else ""
    known = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".py": "docstrings"}
    kind = known.get(last, "text")
    if kind == "docstrings" and kind not in readers:
        kind = "text"
    if kind not in readers:
        raise DataError(
            f"{file} has no rows: give .jsonl or .parquet files, or set data.format to one of "
            + ", ".join(sorted(readers))
        )
    return kind


def find(key: str, config: SourceConfig) -> Source:
    """Look for what `config` names. Raises `DataError` if it is not there."""
    if config.dataset is not None:
        return Source(key, config, [], _hub_dataset(key, config))
    return Source(key, config, corpus_files(config.files, key))


def corpus_files(patterns: Sequence[str] | None, key: str = "data") -> list[Path]:
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
            raise DataError(f"{key}.files: {pattern} {what}: set {key}.files to existing files")
        found.update(files)
    return sorted(found)


def _standard_library() -> list[Path]:
    root = sysconfig.get_paths()["stdlib"]
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - SKIPPED  # site-packages may hold a hundred times as many
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"no Python sources under {root}: set data.files to text files of your own")
    return sorted(files)


def _hub_dataset(key: str, config: SourceConfig) -> Any:
    """A split of a dataset of the hub, or of a local folder, through the library `datasets`."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"{key}.dataset needs the package datasets: {EXTRA}") from error
    assert config.dataset is not None
    datasets.disable_progress_bars()
    folder = Path(config.dataset).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(folder))
            return found[config.split] if isinstance(found, datasets.DatasetDict) else found
        name = str(folder) if folder.is_dir() else config.dataset
        if not folder.is_dir():
            _stay_offline_without_network()
        return datasets.load_dataset(name, config.subset, split=config.split)
    except (OSError, ValueError, KeyError, DatasetsError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{key}.dataset={config.dataset} cannot be loaded ({reason}): set {key}.dataset to a "
            f"folder or, where there is a network, to a hub name; {key}.split and {key}.subset to "
            "what it has"
        ) from error


def _stay_offline_without_network() -> None:
    """Without a network, the hub's libraries use what they have, and do not try again and again."""
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()  # noqa: S310
    except HTTPError:
        return  # an answer, if not a friendly one
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def is_held_out(document: bytes, share: float) -> bool:
    """Whether a document belongs to the held-out part: decided by its content alone.

    So the split does not depend on paths or order, and equal documents fall on the same side.
    """
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
