"""Rows of a corpus, whatever file they are in, and the count of those that cannot be used.

A row is a line of a JSON Lines file, a row of a Parquet file or of a hub dataset, or a whole text
file. It knows where it came from, so that everything said about it names file and line.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from recipes.task import DataError

NAMED = 5
"""How many of the skipped rows are named."""
EXTRA = "install it with: pip install 'springtide[data]'"


@dataclass(frozen=True)
class Row:
    """One row: its fields by name, or the bytes of a whole file."""

    where: str
    """`file:line`, counted from 1; for a whole file, the file."""
    value: dict[str, Any] | bytes


@dataclass
class BadRows:
    """Rows that were skipped. More than `limit` of them is an error, and so is the first if it is 0."""

    limit: int
    count: int = 0
    first: list[str] = field(default_factory=list)
    """Where the first ones are, and what is wrong with each."""

    def add(self, where: str, reason: str) -> None:
        """Note a row. Raises `DataError` that names it if it is one too many."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(f"{where}: {reason}")
        self.check()

    def check(self) -> None:
        """Raise `DataError` if there are too many."""
        if self.count <= self.limit:
            return
        if self.limit == 0:
            raise DataError(
                f"{self.first[0]}: mend the row, or set data.max_bad_rows to the number of such rows "
                "that may be skipped"
            )
        raise DataError(
            f"more than data.max_bad_rows={self.limit} bad rows; the first: {'; '.join(self.first)}"
        )


Reader = Callable[[Path, Sequence[str], BadRows], Iterator[Row]]
"""Reads a file's rows: of columns that cost something to read, those that are named."""


def read_text(file: Path, columns: Sequence[str], bad: BadRows) -> Iterator[Row]:
    """The whole file as one row; an empty file has none."""
    del columns, bad
    with _open(file) as stream:
        content = stream.read()
    if content:
        yield Row(str(file), content)


def read_json_lines(file: Path, columns: Sequence[str], bad: BadRows) -> Iterator[Row]:
    """One JSON object a line; blank lines are no rows."""
    del columns
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                bad.add(where, f"not UTF-8 ({error.reason} at byte {error.start})")
            except ValueError as error:
                bad.add(where, f"not JSON ({error})")
            except RecursionError:
                bad.add(where, "not JSON that can be read (nested too deeply)")
            else:
                if isinstance(value, dict):
                    yield Row(where, value)
                else:
                    bad.add(where, f"a JSON {type(value).__name__}, where an object is needed")


def read_parquet(file: Path, columns: Sequence[str], bad: BadRows) -> Iterator[Row]:
    """The rows of a Parquet file, of which only the needed columns are read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{file}: Parquet needs the package pyarrow: {EXTRA}") from error
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            kept = present(columns, names, str(file))
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=kept):
                for value in _values(batch):
                    number += 1
                    if isinstance(value, dict):
                        yield Row(f"{file}:{number}", value)
                    else:
                        bad.add(f"{file}:{number}", f"not UTF-8 ({value.reason})")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # the latter of a column's name
        raise DataError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


def _values(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch; one by one where one is not UTF-8, which Parquet does not check."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for at in range(len(batch)):
        try:
            yield from batch.slice(at, 1).to_pylist()
        except UnicodeDecodeError as error:
            yield error


def present(wanted: Sequence[str], there: Sequence[str], where: str) -> list[str]:
    """Those of `wanted` that are there. Raises `DataError` if none is."""
    kept = [name for name in wanted if name in there]
    if not kept:
        raise DataError(
            f"{where} has no column {' or '.join(wanted)}; there are {', '.join(there)}"
            + (": set data.text_key" if len(wanted) == 1 else ": see docs/data.md")
        )
    return kept


def read_files(
    files: Sequence[Path], kind: Callable[[Path], Reader], columns: Sequence[str], bad: BadRows
) -> Iterator[Row]:
    """The rows of all files. Raises `DataError` that names a file that cannot be read."""
    for file in files:
        try:
            yield from kind(file)(file, columns, bad)
        except (EOFError, zlib.error) as error:
            raise DataError(f"cannot read {file}: {error}") from error
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from error


def _open(file: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if its name says that they are packed."""
    if file.suffix == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    if file.suffix == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise DataError(f"{file}: Zstandard needs the package pyarrow: {EXTRA}") from error
        import io

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")
        return io.BufferedReader(stream)
    return file.open("rb")
