"""Where documents came from, kept beside their tokens: what a bad batch is looked up in.

files.json    names, each once
rows.npy      of each document: which name, and which row of it, from 1 on; 0: all of it
"""

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILES, ROWS = "files.json", "rows.npy"


class OriginWriter:
    """Collects the origins of documents, in their order."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._rows = array("q")

    def add(self, where: str) -> None:
        """The next document is from here: `file:row`, or a file."""
        file, _, row = where.rpartition(":")
        if not row.isdecimal():
            file, row = where, "0"
        self._rows.extend((self._files.setdefault(file, len(self._files)), int(row)))

    def write(self, folder: Path) -> None:
        """Keep them in `folder`."""
        (folder / FILES).write_text(json.dumps(list(self._files)))
        np.save(folder / ROWS, np.asarray(self._rows, dtype=np.int64).reshape(-1, 2))


@dataclass(frozen=True)
class Origins:
    """Those of the documents of one `TokenFile`."""

    files: list[str]
    rows_D2: NDArray[Any]

    def of(self, document: int) -> str:
        """`file:row`, or a file."""
        file, row = self.rows_D2[document].tolist()
        return f"{self.files[file]}:{row}" if row else self.files[file]


def read_origins(folder: Path | None) -> Origins | None:
    """What is kept in `folder`; None without one."""
    if folder is None:
        return None
    rows_D2 = np.load(folder / ROWS, mmap_mode="r")
    return Origins(json.loads((folder / FILES).read_text()), rows_D2)
