"""A checkpoint's model read by one process, a few tensors at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from trainer.checkpoint.folder import instead_of
from trainer.checkpoint.reader import Reader, read_metadata
from trainer.errors import CheckpointError


class StoredModel:
    """Whole tensors of the model in `checkpoint`, by the names of the model's state dict."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._reader = Reader(checkpoint)
        self.metadata = read_metadata(checkpoint)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors called `names`, on the CPU. Raises `CheckpointError`."""
        tensors = {name: self._empty(name) for name in names}
        try:
            load_tensors({"model": tensors}, storage_reader=self._reader, no_dist=True)
        except (OSError, ValueError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(
                f"{self.checkpoint} cannot be read: {error}: {instead_of(self.checkpoint)}"
            ) from error
        return tensors

    def _empty(self, name: str) -> Tensor:
        entry = self.metadata.state_dict_metadata[f"model.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        return torch.empty(entry.size, dtype=entry.properties.dtype)
