"""Stage `list_eval`: recommenders side by side, on the held-out item of every user.

Each row's lists are kept in a file (`rows/NAME.npz`), so a comparison that was stopped goes on with the
rows that are missing, and figures can be computed anew, user by user. Every row gives two lists: `raw`
may have what the user has met, `new` may not. Removing is part of the search: no beam is lost to it.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from collectives.host import all_sum, broadcast, gather_objects
from configs.values import at_least, one_of
from models.slide.folder import Exported
from models.slide.history import NOTHING
from recipes.interactions.tables import Ints
from recipes.slide.artefacts import write_atomically, write_manifest
from recipes.slide.config import SequencesConfig
from recipes.slide.data import Data
from recipes.slide.latency import measure
from recipes.slide.rows import Row, parse_row, recommender, unconstrained
from recipes.slide.split import HELD_OUT
from recipes.slide.table import EvalPanels, compare
from recipes.slide.teachers import check_same_data, check_same_ids, load_model
from recipes.task import DataError

STAGE = "list_eval"
RESULT = "eval.json"
LISTS = ("raw", "new", "free")


@dataclass(kw_only=True)
class ListEvalConfig:
    """The `task` node."""

    name: str = STAGE
    models: dict[str, Any] = field(default_factory=dict)
    """Exported folders by a name of yours; for several folders, a list: the mean of their
    log-probabilities."""
    rows: list[str] = field(default_factory=lambda: ["popularity", "markov", "cooccurrence"])
    """What is compared: these three, and of the models NAME:greedy, NAME:repeat, NAME:beam50 and
    NAME:beam50+counts."""
    reference: str | None = None
    """The row that the others are compared with, user by user; null: the last one."""
    part: str = "test"
    """Whose targets: test or validation."""
    length: int = 10
    """Items of a list."""
    counts: float = 1.0
    """Weight of log(1 + count) in rows with +counts."""
    batch_size: int = 256
    """Users that are asked about together."""
    latency: list[int] = field(default_factory=list)
    """Measure each model's row with batches of these sizes, on rank 0 while the others wait."""

    def __post_init__(self) -> None:
        one_of("task.part", self.part, HELD_OUT)
        at_least("task.length", self.length, 1)
        at_least("task.batch_size", self.batch_size, 1)
        for size in self.latency:
            at_least("task.latency", size, 1)


class ListEvalTask:
    """See `recipes.work.Work` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {"task": ListEvalConfig, "data": SequencesConfig}
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: ListEvalConfig, model: Any, data: SequencesConfig, seed: int
    ) -> None:
        del model, seed
        self.config, self.data = task, Data(data)
        self.rows = [parse_row(text, task.models) for text in task.rows]
        if not self.rows:
            raise ValueError("task.rows is empty: set task.rows")
        self.reference = task.reference or task.rows[-1]
        one_of("task.reference", self.reference, task.rows)
        self._panels = EvalPanels(self.reference)

    def check(self) -> None:
        """Load the models, and compare them with the data; each has IDs of its own."""
        self._models(torch.device("cpu"))

    def _models(self, device: torch.device) -> dict[str, list[Exported]]:
        found: dict[str, list[Exported]] = {}
        for name, folders in self.config.models.items():
            key = f"task.models.{name}"
            for folder in [folders] if isinstance(folders, str) else folders:
                model = load_model(folder, key, device)
                check_same_data(model, folder, key, self.data)
                found.setdefault(name, []).append(model)
                check_same_ids(model, folder, key, found[name][0].ids)
        return found

    def describe(self) -> dict[str, str]:
        """Data and rows."""
        return {
            **self.data.describe(),
            "rows": ", ".join(self.config.rows),
            "lists": f"of {self.config.length}, for {self.config.part}; compared with {self.reference}",
        }

    def work(
        self, folder: Path, device: torch.device, stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Lists of the rows that are missing, then all figures."""
        models = self._models(device)
        lists: dict[str, dict[str, Ints]] = {}
        for row in self.rows:
            if all_sum([float(stopping())])[0]:
                return None
            made_from = self._made_from(row, models)
            kept = broadcast(_read(folder, row, made_from))
            if isinstance(kept, DataError):
                raise kept
            if kept is None:
                kept = self._lists(row, models)
                if dist.get_rank() == 0:
                    _write(folder, row, made_from, kept)
            lists[row.text] = kept
        result = compare(lists, self.reference, self.data.split, self.config.part)
        if self.config.latency:
            if dist.get_rank() == 0:
                self._time(result, models)
            broadcast(None)
        if dist.get_rank() == 0:
            inputs = {**self.data.inputs, **{n: _fingerprint(m) for n, m in models.items()}}
            write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())
            settings = {k: v for k, v in asdict(self.config).items() if k != "models"}
            files = [str(_file(folder, row).relative_to(folder)) for row in self.rows]
            write_manifest(folder, STAGE, inputs, settings, [RESULT, *files])
        self._panels.result = result
        return {
            f"{name}@{cut}_of_{row.text}": result["rows"][row.text]["raw"][f"{name}@{cut}"]
            for row in self.rows
            for cut in [min(10, self.config.length)]
            for name in ("recall", "ndcg")
            if f"{name}@{cut}" in result["rows"][row.text]["raw"]
        }

    def _made_from(self, row: Row, models: Mapping[str, Sequence[Exported]]) -> str:
        config = self.config
        settings = [row.text, config.part, config.length, config.counts if row.counts else 0]
        model = _fingerprint(models[row.model]) if row.model else ""
        return json.dumps([self.data.inputs, model, settings])

    def _lists(self, row: Row, models: Mapping[str, Sequence[Exported]]) -> dict[str, Ints]:
        """Raw and new lists of all users, and what a greedy pass writes without the trie."""
        config, split = self.config, self.data.split
        rank, ranks = dist.get_rank(), dist.get_world_size()
        recommend = recommender(row, models, split, config.length, config.counts)
        targets_X = split.targets(config.part)
        mine = np.arange(len(targets_X))[rank::ranks]
        parts: dict[str, list[Ints]] = {name: [] for name in LISTS}
        for begin in range(0, len(mine), config.batch_size):
            users = mine[begin : begin + config.batch_size].tolist()
            histories = [split.history(user, int(targets_X[user])) for user in users]
            nothing = [history[:0] for history in histories]
            parts["raw"].append(recommend(histories, nothing))
            parts["new"].append(recommend(histories, histories))
            if row.how == "greedy" and row.model is not None:
                parts["free"].append(unconstrained(models[row.model], histories, config.length))
        found = {}
        for name, part in parts.items():
            if row.how != "greedy" and name == "free":
                continue
            own = np.concatenate(part) if part else np.zeros((0, config.length), dtype=np.int64)
            whole = np.full((len(targets_X), config.length), NOTHING, dtype=np.int64)
            for number, other in enumerate(gather_objects(own)):
                whole[number::ranks] = other
            found[name] = whole
        return found

    def _time(self, result: dict[str, Any], models: Mapping[str, Sequence[Exported]]) -> None:
        """Milliseconds of each model's row, beside its figures."""
        split, targets_X = self.data.split, self.data.split.targets(self.config.part)
        for row in self.rows:
            if row.model is not None and not row.counts:  # counting is on the host
                asked = models[row.model]
                longest = max(exported.model.config.max_history for exported in asked)
                histories = [
                    split.history(user, int(targets_X[user]))[-longest:]
                    for user in range(min(len(targets_X), max(self.config.latency)))
                ]
                result["rows"][row.text]["latency"] = [
                    measure(row, asked, histories, size, self.config.length)
                    for size in self.config.latency
                ]

    def panels(self) -> list[dict[str, Any]]:
        """See `recipes.slide.table`."""
        return self._panels.panels()


def _fingerprint(asked: Sequence[Exported]) -> str:
    return " ".join(exported.fingerprint for exported in asked)


def _file(folder: Path, row: Row) -> Path:
    return folder / "rows" / f"{row.text.replace(':', '-')}.npz"


def _write(folder: Path, row: Row, made_from: str, lists: Mapping[str, Ints]) -> None:
    buffer = io.BytesIO()
    columns: dict[str, Any] = dict(lists)
    np.savez(buffer, made_from=np.array(made_from), **columns)
    _file(folder, row).parent.mkdir(exist_ok=True)
    write_atomically(_file(folder, row), buffer.getvalue())


def _read(folder: Path, row: Row, made_from: str) -> dict[str, Ints] | DataError | None:
    """Lists of a row that was done before; an error if it was made from something else."""
    file = _file(folder, row)
    if not file.is_file():
        return None
    try:
        with np.load(file) as stored:
            same = str(stored["made_from"]) == made_from
            lists = {name: stored[name] for name in LISTS if name in stored}
    except (OSError, ValueError, KeyError) as error:
        return DataError(f"{file} is damaged ({str(error).splitlines()[0]}): delete it")
    if not same:
        return DataError(
            f"{file} was made from another model, other data or other settings: set run.dir to another "
            "folder, or delete it"
        )
    return lists
