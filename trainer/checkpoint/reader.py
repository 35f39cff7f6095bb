"""Reading torch's distributed checkpoints without executing what they contain.

torch reads the file `.metadata` with plain pickle, which runs whatever the file says
(pytorch/pytorch#189308), and single values with `weights_only=False`. Here the metadata may name
the few classes that it is made of, and a checkpoint holds tensors only.
"""

import os
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    *(
        (_CHECKPOINT, name)
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    # A path: an older Python names the module pathlib, a newer one the file inside it.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip
"""Everything that metadata is made of; none of it does anything when it is built."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or _is_dtype(module, name):
            return super().find_class(module, name)  # the names are ours by now
        raise ValueError(f"it wants to run {module}.{name}")


def _is_dtype(module: str, name: str) -> bool:
    import torch

    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def read_metadata(folder: Path) -> Metadata:
    """What tensors a checkpoint has and where. Raises `ValueError` for anything else in the file."""
    try:
        with (folder / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise ValueError(f".metadata cannot be read ({error})") from error
    except (TypeError, KeyError) as error:
        raise ValueError(f".metadata is not what torch writes ({error})") from error
    if not isinstance(found, Metadata):
        raise ValueError(".metadata is not what torch writes")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f".metadata: {name} is not a tensor")
    for place in (found.storage_data or {}).values():
        if os.path.basename(place.relative_path) != place.relative_path:
            raise ValueError(f".metadata points outside the checkpoint: {place.relative_path}")
    return found


class Reader(FileSystemReader):
    """torch's reader with our way to read the metadata."""

    def read_metadata(self, *_args: Any, **_keywords: Any) -> Metadata:
        """See `read_metadata` above."""
        found = read_metadata(Path(self.path))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
