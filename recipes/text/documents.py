"""From rows to documents of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from recipes.text.rows import BadRows, Reader, Row, read_json_lines, read_parquet, read_text
from recipes.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other, and which of them are learnt."""

    ids: NDArray[Any]
    content: bytes
    """What decides whether it is held out."""
    num_bytes: int
    """Bytes of text that are learnt."""
    learnt: NDArray[np.bool_] | None = None
    """For each token, whether predicting it is a label; None: every token is."""
    where: str = ""
    """Of its row: `file:line`, or the file."""


class Encoder(Protocol):
    """How a task makes documents of rows."""

    tokenizer: Tokenizer
    fingerprint: str
    """Equal fingerprints mean equal documents from equal rows."""

    @property
    def columns(self) -> Sequence[str]:
        """The fields of a row that it looks at."""
        ...

    @property
    def readers(self) -> Mapping[str, Reader]:
        """The formats that it reads."""
        ...

    def encode(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Document]:
        """The documents of some rows; rows that cannot be used are noted in `bad`."""
        ...


class TextEncoder:
    """Every row is one document of plain text, all of it learnt, closed by the tokenizer's end."""

    readers: ClassVar[Mapping[str, Reader]] = {
        "text": read_text,
        "jsonl": read_json_lines,
        "parquet": read_parquet,
    }

    def __init__(self, tokenizer: Tokenizer, text_key: str) -> None:
        self.tokenizer, self.text_key = tokenizer, text_key
        self.columns = [text_key]
        self.fingerprint = f"text {text_key} {tokenizer.fingerprint} {tokenizer.end}"

    def encode(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Document]:
        """See `Encoder`."""
        found = [(row.where, text) for row in rows if (text := self._text(row, bad))]
        encoded = self.tokenizer.encode([text for _, text in found])
        for (where, text), ids in zip(found, encoded, strict=True):
            closed = np.append(np.asarray(ids, dtype=np.int64), self.tokenizer.end)
            yield Document(closed, text, len(text), where=where)

    def _text(self, row: Row, bad: BadRows) -> bytes | None:
        try:
            if isinstance(row.value, bytes):
                if not self.tokenizer.reads_bytes:
                    row.value.decode()
                return row.value
            text = row.value.get(self.text_key)
            if isinstance(text, str) and text:
                return text.encode()
        except UnicodeError as error:
            bad.add(row.where, f"not UTF-8 ({error.reason})")  # type: ignore[attr-defined]
            return None
        if text == "":
            bad.add(row.where, f"an empty text under {self.text_key!r}")
        elif self.text_key not in row.value:
            found = ", ".join(map(repr, row.value)) or "nothing"
            bad.add(row.where, f"no {self.text_key!r} (data.text_key), but {found}")
        else:
            bad.add(
                row.where, f"{type(text).__name__} under {self.text_key!r}, where text is needed"
            )
        return None
