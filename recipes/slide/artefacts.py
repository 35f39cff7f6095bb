"""What a stage leaves for the next: a folder whose `manifest.json` says what it was made from.

The manifest is written last, so a folder with one is whole. It has the stage's name, its `inputs` and
`settings` (if one differs, the result would), and the SHA-256 of every file.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.task import DataError

NAME = "manifest.json"


def write_atomically(path: Path, content: bytes) -> None:
    """On the disk when this returns, and at every moment absent, old or whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_manifest(
    folder: Path,
    stage: str,
    inputs: Mapping[str, str],
    settings: Mapping[str, Any],
    files: Sequence[str],
) -> None:
    """Say that `folder` is whole."""
    plain = {
        "stage": stage,
        "inputs": dict(inputs),
        "settings": dict(settings),
        "files": {name: checksum(folder / name) for name in sorted(files)},
    }
    write_atomically(folder / NAME, json.dumps(plain, indent=1).encode())


def checksum(path: Path) -> str:
    """SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, key: str, *stages: str) -> dict[str, Any]:
    """The manifest of a folder of one of `stages`, whose files are there as they were written.

    Raises `DataError`, which names `key`, the configuration key that named the folder.
    """
    found = _load(folder, f"{key}={folder}", *stages)
    if found is None:
        wanted = " or ".join(stages)
        raise DataError(f"{key}={folder} is no finished {wanted}: run it, or set {key}")
    for name, expected in found["files"].items():
        try:
            same = checksum(folder / name) == expected
        except OSError:
            same = False
        if not same:
            raise DataError(
                f"{key}={folder}: {name} is not what was written: make the folder again with "
                f"{found['stage']}"
            )
    return found


def _load(folder: Path, what: str, *stages: str) -> dict[str, Any] | None:
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
        ours = isinstance(found["inputs"], dict) and isinstance(found["files"], dict)
        name = found["stage"]
    except (OSError, ValueError, KeyError, TypeError):
        ours, name = False, None
    if not ours or name not in stages:
        made = f"was made by {name}" if ours else "has a manifest that is not ours"
        raise DataError(f"{what} {made}, not by {' or '.join(stages)}: choose another folder")
    assert isinstance(found, dict)
    return found


def is_done(
    folder: Path, stage: str, inputs: Mapping[str, str], settings: Mapping[str, Any]
) -> bool:
    """Whether `folder` has this stage's result. Raises `DataError` if it was made from other things."""
    found = _load(folder, f"run.dir={folder}", stage)
    if found is None:
        return False
    wanted = json.loads(json.dumps({"inputs": inputs, "settings": settings}))
    for part in ("inputs", "settings"):
        for name in sorted({*wanted[part], *found[part]}):
            was, now = (plain[part].get(name) for plain in (found, wanted))
            if was != now:
                raise DataError(
                    f"run.dir={folder} has the result of {stage} with {name}={was}, and here it is "
                    f"{now}: set run.dir to another folder"
                )
    return True


def fingerprint(folder: Path) -> str:
    """Of a finished folder: equal for equal inputs, settings and files."""
    return checksum(folder / NAME)[:16]
