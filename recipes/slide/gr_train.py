"""Stage `gr_train`: a model of the next item's codes, the teacher."""

import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from omegaconf import MISSING
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from configs.values import at_least
from models.slide.build import build, init_weights
from models.slide.config import SlideConfig
from models.slide.cost import training_flops
from models.slide.decode import Lists, beam_search
from models.slide.folder import FILES, Read, write_folder
from models.slide.history import pad_left
from models.slide.model import training_inputs
from models.slide.trie import Trie, build_trie
from recipes.interactions.tables import Ints
from recipes.slide.artefacts import write_manifest
from recipes.slide.config import SequencesConfig
from recipes.slide.data import Data
from recipes.slide.metrics import MISSED, by_stratum
from recipes.slide.users import User, Users
from recipes.slide.windows import Window, Windows
from recipes.task import Batch, DataError, Samples

CUT = 10
"""Recall and NDCG of evaluations during training are those of so many items."""
FOLDERS = ("sids", "lists", "teacher")
"""Keys whose folders are among a manifest's inputs, by what is in them."""


@dataclass(kw_only=True)
class TrainingConfig:
    """What both training stages have in their `task` node."""

    sids: str = MISSING
    """The folder of `sid_build`."""
    label_smoothing: float = 0.1
    """Share of a label's weight that goes to all codes alike."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing={self.label_smoothing}: set task.label_smoothing to 0 or more, "
                "below 1"
            )


@dataclass(kw_only=True)
class GrTrainConfig(TrainingConfig):
    """The `task` node."""

    name: str = "gr_train"
    beams: int = 20
    """Of evaluation."""
    folds: int = 0
    """Cross-fit: users are dealt into so many folds; 0: the model trains on all."""
    fold: int = 0
    """Cross-fit: the fold that this model does not train on."""

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        at_least("task.beams", self.beams, CUT)
        check_folds(self.folds)
        if not 0 <= self.fold < max(self.folds, 1):
            raise ValueError(
                f"task.fold={self.fold}: set task.fold to 0 or more, below task.folds={self.folds}"
            )


def check_folds(folds: int) -> None:
    """Raise `ValueError` for a number of folds that cannot be."""
    if folds == 1 or folds < 0:
        raise ValueError(f"task.folds={folds}: set task.folds to 2 or more, or to 0")


def fold_of(user_names: Iterable[Any], folds: int) -> Ints:
    """Which fold each user is in: decided by the name, on every machine alike."""
    return np.array([zlib.crc32(str(name).encode()) % folds for name in user_names], dtype=np.int64)


class GrTrainTask:
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": GrTrainConfig,
        "model": SlideConfig,
        "data": SequencesConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(self, *, task: Any, model: SlideConfig, data: SequencesConfig, seed: int) -> None:
        self.config, self.model_config, self.seed = task, model, seed
        self.data = Data(data, task.sids)
        self._tries: dict[torch.device, Trie] = {}
        self._check_list_length()

    def _check_list_length(self) -> None:
        if self.model_config.list_length:
            raise ValueError(
                f"model.list_length={self.model_config.list_length}, but gr_train has no lists: set "
                "model.list_length=0"
            )

    def check(self) -> None:
        """Read sequences and semantic IDs, and try whether a trie of them fits."""
        self._trie(torch.device("cpu"))

    def build_model(self) -> nn.Module:
        """On the meta device."""
        with torch.device("meta"):
            return build(self.model_config, self.data.ids.sizes)

    def init_weights(self, module: nn.Module) -> None:
        """See `models.slide.build.init_weights`."""
        init_weights(module)

    def weights_folder(self) -> Path | None:
        """Always from the start."""
        return None

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> Mapping[str, Any]:
        """Names agree."""
        return {name: name for name in stored}

    def train_samples(self) -> Samples:
        """Windows of the training parts."""
        split, config = self.data.split, self.config
        users = np.arange(split.sequences.num_users, dtype=np.int64)
        if config.folds:
            users = users[fold_of(split.sequences.user_names, config.folds) != config.fold]
        windows = Windows(split, users, self.model_config.max_history, self.data.ids.fingerprint)
        if not len(windows):
            raise DataError("no user has two interactions to train on: give longer sequences")
        return windows

    @cached_property
    def evaluated(self) -> Users:
        """All users, with what training may see of them and the target of validation."""
        return Users(self.data.split, "validation", self.model_config.max_history)

    def eval_samples(self) -> Samples:
        """The validation target of every user."""
        return self.evaluated

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Windows as codes and weights, or users as histories and targets."""
        if isinstance(samples[0], User):
            return collate_users(samples)
        return self._collate_training(samples)

    def _collate_training(self, samples: Sequence[Window]) -> dict[str, Any]:
        items_BN, weights_BN = pad_right(
            [(sample.items_N, sample.learnt_N.astype(np.float32)) for sample in samples]
        )
        return self._sequences(items_BN, weights_BN, None)

    def _sequences(
        self, items_BN: Tensor, weights_BN: Tensor, lists_B: Tensor | None
    ) -> dict[str, Any]:
        """What `loss` reads: tokens, and the codes that they are to predict."""
        codes_IL = torch.from_numpy(self.data.ids.codes_IL)
        batch = sequences(codes_IL, self.data.ids.sizes, items_BN, weights_BN, lists_B)
        return {**batch, "count": float(weights_BN.sum()) * self.data.ids.levels}

    def count(self, batch: Batch) -> Any:
        """Codes that are learnt, by their weight."""
        return batch["count"]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the learnt codes, each over the codes of its level, summed."""
        logits = model(batch["tokens_BT"], batch["slots_BT"])
        total = torch.zeros((), device=batch["tokens_BT"].device)
        for level, logits_BNC in enumerate(logits):
            nats_BN = cross_entropy(
                logits_BNC.flatten(0, 1).float(),
                batch["codes_BNL"][..., level].flatten(),
                reduction="none",
                label_smoothing=self.config.label_smoothing,
            ).view_as(batch["weights_BN"])
            total = total + (nats_BN * batch["weights_BN"]).sum()
        return total

    def _trie(self, device: torch.device) -> Trie:
        if device not in self._tries:
            self._tries[device] = build_trie(self.data.ids, device)
        return self._tries[device]

    def _search(self, model: Any, trie: Trie, histories_BH: Tensor) -> Lists:
        nobody_BU = histories_BH[:, :0]
        return beam_search([model], trie, histories_BH, self.config.beams, nobody_BU)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """The place of each user's target (from 1 on), at the user's own place."""
        histories_BH, users_B = batch["histories_BH"], batch["users_B"]
        found_BK = self._search(model, self._trie(histories_BH.device), histories_BH).items_BK
        hit_BK = found_BK == batch["targets_B"][:, None]
        place_B = hit_BK.int().argmax(1).masked_fill(~hit_BK.any(1), MISSED) + 1
        places = torch.zeros(len(self.evaluated), dtype=torch.float64, device=users_B.device)
        return {"places": places.index_add(0, users_B, place_B.double())}

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Recall and NDCG of what was evaluated, over all users and by stratum."""
        place_X = np.asarray(sums["places"]).astype(np.int64) - 1
        seen = np.flatnonzero(place_X >= 0)
        strata = {name: rows[seen] for name, rows in self.data.split.strata("validation").items()}
        found = by_stratum(place_X[seen], strata, (CUT,))
        return {name: value for name, value in found.items() if not name.startswith("mrr")}

    def flops(self, batch: Batch) -> float:
        """See `models.slide.cost`."""
        sequences, tokens = batch["tokens_BT"].shape
        return float(sequences) * training_flops(self.model_config, self.data.ids.sizes, tokens)

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """None."""

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """Weights, IDs, names and a manifest, for stages that follow and for `models.slide.serve`."""
        del options
        names = [str(name) for name in self.data.items.names]
        about = self._about()
        write_folder(out, model, read, self.model_config, self.data.ids, names, about)
        own = {k: v for k, v in asdict(self.config).items() if k not in FOLDERS}
        settings = {**own, "seed": self.seed, "model": asdict(self.model_config)}
        write_manifest(out, about["stage"], about["inputs"], settings, FILES)
        return f"{len(names):,} items"

    def _about(self) -> dict[str, Any]:
        return {
            "stage": "gr_train",
            "inputs": self.data.inputs,
            "folds": self.config.folds,
            "fold": self.config.fold,
        }

    def describe(self) -> dict[str, str]:
        """Model, data, IDs."""
        model = self.model_config
        lines = {
            "model": f"slide, {model.num_layers} layers x {model.hidden_size}, codes by {model.codes}, "
            f"histories of {model.max_history}"
            + (f", lists of {model.list_length}" if model.list_length else ""),
            **self.data.describe(),
        }
        if getattr(self.config, "folds", 0):
            lines["folds"] = f"without fold {self.config.fold} of {self.config.folds}"
        return lines

    def show(self, sample: Any) -> Iterator[str]:
        """Items of a window with their codes; what is learnt has a star."""
        for item, learnt in zip(sample.items_N, sample.learnt_N, strict=True):
            codes = "-".join(map(str, self.data.ids.codes_IL[item]))
            yield f"{'*' if learnt else ' '} {self.data.items.names[item]}  {codes}"

    def survey(self) -> dict[str, str]:
        """What the header says, and how much is learnt."""
        return {**self.describe(), "samples": f"{len(self.train_samples()):,}"}


def sequences(
    codes_IL: Tensor,
    sizes: Sequence[int],
    items_BN: Tensor,
    weights_BN: Tensor,
    lists_B: Tensor | None,
) -> dict[str, Tensor]:
    """What `GrTrainTask.loss` reads: tokens, the codes that they are to predict, and their weights."""
    codes_BNL = codes_IL[items_BN]
    tokens_BT, slots_BT = training_inputs(codes_BNL, sizes, lists_B)
    return {
        "tokens_BT": tokens_BT,
        "slots_BT": slots_BT,
        "codes_BNL": codes_BNL,
        "weights_BN": weights_BN,
    }


def pad_right(rows: Sequence[tuple[Ints, Any]]) -> tuple[Tensor, Tensor]:
    """Items (B, N) with item 0 behind them, which counts nothing, and weights (B, N)."""
    N = max(len(items) for items, _ in rows)
    items_BN = np.zeros((len(rows), N), dtype=np.int64)
    weights_BN = np.zeros((len(rows), N), dtype=np.float32)
    for row, (items, weights) in enumerate(rows):
        items_BN[row, : len(items)] = items
        weights_BN[row, : len(items)] = weights
    return torch.from_numpy(items_BN), torch.from_numpy(weights_BN)


def collate_users(users: Sequence[User]) -> dict[str, Any]:
    """Histories padded on the left."""
    longest = users[0].max_history
    return {
        "histories_BH": pad_left([user.history for user in users], longest),
        "targets_B": torch.tensor([user.target for user in users]),
        "users_B": torch.tensor([user.number for user in users]),
        "count": len(users),
    }
