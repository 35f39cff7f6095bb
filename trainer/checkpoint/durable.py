"""Files that are on the disk when a function returns."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a file and have it on the disk before returning."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str) -> None:
    """The same for a file that may exist: at every moment it is the old or the new one."""
    beside = path.with_name(f".{path.name}")
    write_durably(beside, text)
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
