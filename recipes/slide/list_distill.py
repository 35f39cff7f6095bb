"""Stage `list_distill`: the student, who writes in one greedy pass the list that beam search found.

The first items of an exported list, in their order, follow the history as one sequence, and each code is
predicted from all before it. With `source=real` no teacher is asked: the targets are the items that the
user went on to meet, which is the directly trained list model that the student is compared with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from configs.values import at_least, one_of
from models.slide.config import SlideConfig
from models.slide.decode import Lists, greedy_list
from models.slide.folder import Exported
from models.slide.history import NOTHING
from models.slide.trie import Trie
from recipes.interactions.tables import Ints
from recipes.slide.artefacts import fingerprint, read_manifest
from recipes.slide.beam_export import STAGE as EXPORT
from recipes.slide.config import SequencesConfig
from recipes.slide.gr_train import CUT, GrTrainTask, TrainingConfig, pad_right
from recipes.slide.shards import Rows, read_shards
from recipes.slide.split import Split
from recipes.slide.teachers import check_same_ids, load_model
from recipes.task import DataError, Samples

SOURCES = ("lists", "real")
TARGETS = ("none", "prepend", "insert")
ORDERS = ("score", "reverse", "random")
WEIGHTS = ("uniform", "score", "log")


@dataclass(kw_only=True)
class ListDistillConfig(TrainingConfig):
    """The `task` node."""

    name: str = "list_distill"
    lists: str | None = None
    """The folder of `beam_export`."""
    source: str = "lists"
    """lists: the teacher's; real: the items that follow in the training part, without a teacher."""
    teacher: str | None = None
    """An exported folder whose weights the student begins with; null: random ones."""
    target: str = "none"
    """The item that really followed: none (wherever the list has it), prepend (first) or insert (last,
    if the list lacks it)."""
    only_found: bool = False
    """Leave out histories whose list lacks the item that really followed."""
    order: str = "score"
    """Of a list's items: score (as beam search found them), reverse or random."""
    weights: str = "uniform"
    """Of the places of a list in the loss: uniform, score (softmax of scores) or log (1/log2(k+1))."""
    temperature: float = 1.0
    """Of the softmax (weights score)."""

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        one_of("task.source", self.source, SOURCES)
        one_of("task.target", self.target, TARGETS)
        one_of("task.order", self.order, ORDERS)
        one_of("task.weights", self.weights, WEIGHTS)
        if not self.temperature > 0:
            raise ValueError(f"task.temperature={self.temperature}: set task.temperature above 0")


class ListSample(NamedTuple):
    """A history and the list that is to follow it."""

    history: Ints
    list_K: Ints
    """Without NOTHING; may be shorter than a full list."""
    weights_K: NDArray[np.float32]
    target: int
    """What really followed; NOTHING if nobody may know it."""
    scores_K: NDArray[np.float32]
    """Of the list's items, by its teacher; zeros without one."""


@dataclass(frozen=True)
class Distilled:
    """Rows of `beam_export` as samples."""

    rows: Rows
    chosen: Ints
    """Which rows."""
    length: int
    max_history: int
    config: ListDistillConfig
    made_from: str

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> ListSample:
        row, config = int(self.chosen[index]), self.config
        items, scores = self.rows.items_RK[row], self.rows.scores_RK[row]
        there = items != NOTHING
        items, scores = items[there], scores[there]
        target = int(self.rows.targets_R[row])
        if target != NOTHING and (
            config.target == "prepend"
            or (config.target == "insert" and target not in items[: self.length])
        ):
            place = 0 if config.target == "prepend" else min(len(items), self.length - 1)
            kept = items != target
            items, scores = items[kept], scores[kept]
            best = scores.max(initial=0.0) if place == 0 else scores[:place].min(initial=0.0)
            items, scores = np.insert(items, place, target), np.insert(scores, place, best)
        items, scores = items[: self.length], scores[: self.length]
        order = np.arange(len(items))
        if config.order == "reverse":
            order = order[::-1]
        elif config.order == "random":  # drawn for the row, the same in every epoch
            order = np.random.default_rng([row, 0]).permutation(len(items))
        weights = place_weights(scores, config)
        history = self.rows.histories[row][-self.max_history :]
        return ListSample(history, items[order], weights, target, scores[order])

    def fingerprint(self) -> str:
        """Of the lists, and of what is made of them."""
        c = self.config
        how = (
            c.target,
            c.only_found,
            c.order,
            c.weights,
            c.temperature,
            self.length,
            self.max_history,
        )
        return f"{self.made_from} {len(self)} {' '.join(map(str, how))}"


def place_weights(scores_K: NDArray[np.float32], config: ListDistillConfig) -> NDArray[np.float32]:
    """Weights of a list's places, whose mean is 1."""
    K = len(scores_K)
    if config.weights == "uniform":
        return np.ones(K, dtype=np.float32)
    if config.weights == "log":
        raw = 1 / np.log2(np.arange(K) + 2.0)
    else:
        raw = np.exp((scores_K - scores_K.max()).astype(np.float64) / config.temperature)
    return (raw * K / raw.sum()).astype(np.float32)


@dataclass(frozen=True)
class Followed:
    """Training prefixes, each with the items that followed it: up to `length`, none twice."""

    split: Split
    length: int
    max_history: int
    ids: str

    @cached_property
    def rows(self) -> tuple[Ints, Ints]:
        """Users and targets of all prefixes."""
        return self.split.prefixes()

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> ListSample:
        user, event = int(self.rows[0][index]), int(self.rows[1][index])
        ahead = self.split.sequences.items_E[event : self.split.train_ends[user]]
        _, first = np.unique(ahead, return_index=True)
        followed = ahead[np.sort(first)][: self.length]
        history = self.split.history(user, event)[-self.max_history :]
        weights = np.ones(len(followed), dtype=np.float32)
        return ListSample(history, followed, weights, int(followed[0]), np.zeros_like(weights))

    def fingerprint(self) -> str:
        """Of the sequences."""
        return f"followed {self.split.sequences.fingerprint} {self.ids} {self.length} {self.max_history}"


class ListDistillTask(GrTrainTask):
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": ListDistillConfig,
        "model": SlideConfig,
        "data": SequencesConfig,
    }

    def _check_list_length(self) -> None:
        at_least("model.list_length", self.model_config.list_length, 1)
        if self.config.source == "lists" and self.config.lists is None:
            raise ValueError(
                "task.lists is null: set task.lists to the folder of beam_export, or task.source=real"
            )

    def check(self) -> None:
        """Compare IDs, lists and teacher."""
        super().check()
        self.train_samples()
        if self._teacher is not None:
            check_same_ids(self._teacher, str(self.config.teacher), "task.teacher", self.data.ids)
            theirs, ours = self._teacher.model.config, self.model_config
            same = ["hidden_size", "num_layers", "num_heads", "codes", "tied"]
            if theirs.list_length:  # a student already, whose places have vectors
                same.append("list_length")
            for name in same:
                if getattr(theirs, name) != getattr(ours, name):
                    raise DataError(
                        f"task.teacher={self.config.teacher} has model.{name}={getattr(theirs, name)}, "
                        f"and here it is {getattr(ours, name)}: set model.{name} to the teacher's, or "
                        "task.teacher=null"
                    )

    @cached_property
    def _teacher(self) -> Exported | None:
        if self.config.teacher is None:
            return None
        return load_model(self.config.teacher, "task.teacher", torch.device("cpu"))

    def weights_folder(self) -> Path | None:
        """The teacher's."""
        return Path(self.config.teacher) if self.config.teacher is not None else None

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> Mapping[str, Any]:
        """By name; slots, which a teacher lacks, are zero, so the student begins as the teacher."""
        found: dict[str, Any] = {name: name for name in stored}
        if "slots_KD" not in found:
            shape = (self.model_config.list_length, self.model_config.hidden_size)
            found["slots_KD"] = lambda read: torch.zeros(shape)
        return found

    def _items_read(self, beams: int) -> int:
        """Of a list of so many."""
        del beams
        return self.model_config.list_length

    @cached_property
    def _samples(self) -> Distilled | Followed:
        length, H = self.model_config.list_length, self.model_config.max_history
        if self.config.source == "real":
            return Followed(self.data.split, length, H, self.data.ids.fingerprint)
        folder = Path(self.config.lists)
        manifest = read_manifest(folder, "task.lists", EXPORT)
        for name, value in self.data.inputs.items():
            if manifest["inputs"].get(name) != value:
                what = {"data": "other data", "sids": "other semantic IDs"}[name]
                raise DataError(
                    f"task.lists={folder} was made with {what} ({manifest['inputs'].get(name)}, and "
                    f"here it is {value}): set task.lists to lists of the same, or task.sids"
                )
        if manifest["settings"]["beams"] < length:
            raise DataError(
                f"task.lists={folder} has lists of {manifest['settings']['beams']} items, and "
                f"model.list_length={length}: set model.list_length to less, or export more beams"
            )
        length = self._items_read(manifest["settings"]["beams"])
        rows = read_shards(folder, manifest["settings"]["shards"], length)
        chosen = np.arange(len(rows.users_R))
        if self.config.only_found:
            chosen = chosen[rows.target_ranks >= 0]
        return Distilled(rows, chosen, length, H, self.config, fingerprint(folder))

    def train_samples(self) -> Samples:
        """Histories and their lists."""
        return self._samples

    def _collate_training(self, samples: Sequence[Any]) -> dict[str, Any]:
        items_BN, weights_BN = pad_right(
            [
                (np.concatenate([s.history, s.list_K]),
                 np.concatenate([np.zeros(len(s.history), np.float32), s.weights_K]))
                for s in samples
            ]
        )  # fmt: skip
        lists_B = torch.tensor([len(sample.history) for sample in samples])
        return self._sequences(items_BN, weights_BN, lists_B)

    def _search(self, model: Any, trie: Trie, histories_BH: Tensor) -> Lists:
        length = max(self.model_config.list_length, CUT)
        return greedy_list([model], trie, histories_BH, length, histories_BH[:, :0])

    def _about(self) -> dict[str, Any]:
        made_from = {"lists": self._samples.fingerprint()}
        if self._teacher is not None:
            made_from["teacher"] = self._teacher.fingerprint
        return {
            "stage": "list_distill",
            "inputs": {**self.data.inputs, **made_from},
            "folds": 0,
            "fold": 0,
        }

    def show(self, sample: Any) -> Any:
        """The history, then the list with its weights."""
        names = self.data.items.names
        for item in sample.history:
            yield f"  {names[item]}"
        for place, (item, weight) in enumerate(
            zip(sample.list_K, sample.weights_K, strict=True), start=1
        ):
            codes = "-".join(map(str, self.data.ids.codes_IL[item]))
            yield f"{place:2} {names[item]}  {codes}  weight {weight:.2f}"
