"""Arrays that are made once and read ever after, so that every model, seed and rank has the same."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recipes.task import DataError

Array = NDArray[Any]


def frozen(folder: str, name: str, key: str, make: Callable[[], Array]) -> Array:
    """What `make` gives, written under the hash of `key`, which says everything that it depends on.

    Raises `DataError` if the file cannot be written or read, or was changed.
    """
    number = hashlib.sha256(key.encode()).hexdigest()[:16]
    file = Path(folder).expanduser() / f"{name}-{number}.safetensors"
    if not file.exists():
        _write(file, make(), key)
    return _read(file, key)


def _digest(array: Array) -> str:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(f"{array.shape} {little.dtype}".encode() + little.tobytes()).hexdigest()


def _write(file: Path, array: Array, key: str) -> None:
    """Whole or not at all: several ranks may do it at once, and write the same."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"items": array}, temporary, {"key": key, "sha256": _digest(array)})
        temporary.replace(file)
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror}: set data.cache_dir") from error


def _read(file: Path, key: str) -> Array:
    try:
        with safe_open(file, "numpy") as stored:
            about, array = stored.metadata(), stored.get_tensor("items")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot read {file} ({error}): delete it, or set data.cache_dir"
        ) from error
    if about["key"] != key or about["sha256"] != _digest(array):
        raise DataError(f"{file} is not what was written: delete it, or set data.cache_dir")
    return np.asarray(array)
