"""`manifest.json`: what a checkpoint consists of, so that damage is found before it is trained on.

torch's distributed checkpoint does not notice a flipped bit: it loads wrong weights. The checksums
are plain SHA-256, which `sha256sum` and others can check, too.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.durable import write_durably

NAME = "manifest.json"
FORMAT = 2
"""Of the whole checkpoint. 2 added the manifest."""
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")

Files = Mapping[str, Mapping[str, Any]]
"""By name: `size` in bytes, `sha256` in hexadecimal."""


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum of one file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def write_manifest(folder: Path, files: Files) -> None:
    """Write the manifest of `folder`; afterwards the checkpoint is complete."""
    plain = {"format": FORMAT, "files": dict(sorted(files.items()))}
    write_durably(folder / NAME, json.dumps(plain, indent=1))


def read_manifest(folder: Path) -> Files:
    """The files of a complete checkpoint. Raises `ValueError` for what is not a manifest of ours."""
    plain = json.loads((folder / NAME).read_text())
    if not isinstance(plain, dict) or not isinstance(plain.get("format"), int):
        raise ValueError("manifest.json is not ours")
    if plain["format"] > FORMAT:
        raise ValueError("it was written by a newer version of springtide: install that version")
    files = plain.get("files")
    if not isinstance(files, dict) or "trainer.json" not in files:
        raise ValueError("manifest.json is not ours")
    if not all(_is_entry(name, entry) for name, entry in files.items()):
        raise ValueError("manifest.json names what cannot be a file of ours")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    inside = Path(name).name == name and name not in (".", "..")
    whole = isinstance(entry, dict) and isinstance(entry.get("size"), int)
    return inside and whole and isinstance(entry.get("sha256"), str)


def missing_or_cut(folder: Path, files: Files) -> str | None:
    """The first file that is not there or has another size; quick, nothing is read."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{_called(name)} is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{_called(name)} has {size:,} bytes instead of {entry['size']:,}"
    return None


def damaged(folder: Path, files: Files, names: Iterable[str]) -> str | None:
    """The first of `names` whose content is not what was written; reads them all."""
    for name in names:
        try:
            found = describe_file(folder / name)
        except OSError as error:
            return f"{_called(name)} cannot be read ({error.strerror})"
        if found["sha256"] != files[name]["sha256"]:
            return f"{_called(name)} is damaged: its SHA-256 is not the one that was written"
    return None


def _called(name: str) -> str:
    """A file's name, and whose it is."""
    shard = _SHARD.fullmatch(name)
    return f"{name} (written by rank {shard[1]})" if shard else name
