"""Exported models as later stages use them: loaded, checked against the data, and asked for lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.slide.folder import Exported, load_folder
from models.slide.ids import SemanticIds
from recipes.interactions.tables import Ints
from recipes.slide.artefacts import read_manifest
from recipes.slide.data import Data
from recipes.slide.gr_train import fold_of
from recipes.task import DataError

STAGES = ("gr_train", "list_distill", "list_rl")
"""Those that leave models."""


def load_model(folder: str, key: str, device: torch.device) -> Exported:
    """An exported folder, as it was written. Raises `DataError`, which names `key`."""
    try:
        found = load_folder(Path(folder), device)
    except ValueError as error:
        raise DataError(
            f"{key}: {error}: set {key} to a folder of python -m trainer.export"
        ) from error
    read_manifest(Path(folder), key, *STAGES)
    return found


def check_same_ids(found: Exported, folder: str, key: str, ids: SemanticIds) -> None:
    """Raise `DataError` if a model was trained with other semantic IDs than those given."""
    if found.ids.fingerprint != ids.fingerprint:
        raise DataError(
            f"{key}={folder} was trained with other semantic IDs ({found.ids.fingerprint}, and "
            f"task.sids has {ids.fingerprint}): set {key} to a model of these, or task.sids to its own"
        )


def check_same_data(found: Exported, folder: str, key: str, data: Data) -> None:
    """Raise `DataError` if a model was trained on other sequences: on what is to be tested, perhaps."""
    trained_on = found.about.get("inputs", {}).get("data")
    if trained_on != data.sequences.fingerprint:
        raise DataError(
            f"{key}={folder} was trained on other data ({trained_on}, and data.* is "
            f"{data.sequences.fingerprint}): set {key} to a model of this data"
        )


@dataclass(frozen=True)
class Teachers:
    """Models that are asked together; with cross-fit, each only about users it did not train on."""

    models: Sequence[Exported]
    folds: int
    """0: everybody is asked about all users."""

    @classmethod
    def load(cls, folders: Sequence[str], key: str, data: Data, device: torch.device) -> "Teachers":
        """Load and check. Raises `DataError`."""
        models = [load_model(folder, key, device) for folder in folders]
        for model, folder in zip(models, folders, strict=True):
            check_same_ids(model, folder, key, data.ids)
            check_same_data(model, folder, key, data)
        folds = {int(model.about.get("folds", 0)) for model in models}
        if len(folds) > 1:
            raise DataError(
                f"{key} mixes models of {sorted(folds)} folds: set {key} to models with the same "
                "task.folds"
            )
        (count,) = folds
        missing = set(range(count)) - {int(model.about["fold"]) for model in models}
        if missing:
            raise DataError(
                f"{key} lacks the models that left out the folds {sorted(missing)} of {count}: train "
                f"them with task.fold, and add them to {key}"
            )
        return cls(models, count)

    @property
    def max_history(self) -> int:
        """The longest that any of them reads."""
        return max(model.model.config.max_history for model in self.models)

    @property
    def fingerprint(self) -> str:
        """Of all of them."""
        return " ".join(model.fingerprint for model in self.models)

    def groups(self, user_names: Sequence[object]) -> Ints:
        """For each user, the number of the group of models that may be asked."""
        if not self.folds:
            return np.zeros(len(user_names), dtype=np.int64)
        return fold_of(user_names, self.folds)

    def of_group(self, group: int) -> list[Exported]:
        """The models of a group."""
        if not self.folds:
            return list(self.models)
        return [model for model in self.models if int(model.about["fold"]) == group]
