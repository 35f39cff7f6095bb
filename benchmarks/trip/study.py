"""A study: every model with every seed on the same data, and how they compare.

What is the same for all: the table, the split, drawn items, and with one seed the item table's start,
the order of samples and the users that the bootstrap draws.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import machine
from benchmarks.trip import cells
from benchmarks.trip.grid import COUNTS, overrides
from benchmarks.trip.packed import unpack
from benchmarks.trip.training import Data, Plan, good, train
from recipes.ctr import figures
from recipes.ctr.counts import cosine_scores
from recipes.ctr.metrics import Floats, Ints
from recipes.ctr.significance import METRICS, Values, resampled
from recipes.trip import TripTask
from trainer.compose import run_jobs
from trainer.config import Config, build_config

TUNING_SEED = 1000
"""Chooses learning rates, and is none of the seeds that count."""


@dataclass
class Study:
    """The options of `benchmarks.trip.__main__`, and what was found."""

    models: Sequence[str]
    shared: Sequence[str]
    """Overrides for all models, such as the data."""
    folder: Path
    plan: Plan
    seeds: int
    lrs: Sequence[float]
    """Several: each model takes the best on validation, by a seed of its own. None: `optim.lr`."""
    device: torch.device
    resamples: int
    packed: Path | None = None
    """Has the data (`benchmarks.trip.packed`)."""
    graphs: bool = True
    """Replay recorded steps, on a GPU."""
    say: Callable[[str], None] = print
    found: dict[str, list[cells.Cell]] = field(default_factory=dict)
    """By model, then by seed; counts have one. Only models that are finished."""

    def __post_init__(self) -> None:
        self.configs: dict[str, Config] = {}
        self.task = task_of(self.config(self.learned[0]))
        if self.packed is not None:
            unpack(self.packed, self.task)
        self._data: dict[str, Data] = {}

    @property
    def learned(self) -> list[str]:
        """The models that are trained."""
        return [model for model in self.models if model not in COUNTS]

    def config(self, model: str) -> Config:
        """A model's configuration, composed when it is first asked for."""
        if model not in self.configs:
            self.configs[model] = compose(model, self.shared)
        return self.configs[model]

    def run(self, workers: int = 1, until: float = float("inf")) -> None:
        """Train what is not there yet, by several processes; start no model later than at `until`.

        `until` is a time of `time.time`.
        """
        if workers > 1:
            settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "found"}
            jobs = [(model, settings, until) for model in self.learned]
            with get_context("spawn").Pool(workers) as pool:
                failed = list(filter(None, pool.imap_unordered(_train_one, jobs)))
            if failed:
                raise RuntimeError("\n".join(failed))
        else:
            for model in self.learned:
                if time.time() < until:
                    self.train(model)

    def collect(self) -> None:
        """Find the models that are finished, and count."""
        for model in self.models:
            if model in COUNTS:
                self.found[model] = [self._counts(model)]
            elif (finished := self._finished(model)) is not None:
                self.found[model] = finished

    def train(self, model: str) -> None:
        """Choose a model's learning rate, and train all its seeds."""
        task = self._task_of(model)
        if len(self.lrs) > 1:
            self._train(model, task, [(lr, TUNING_SEED) for lr in self.lrs])
        lr = self._rate(model, task)
        assert lr is not None
        self._train(model, task, [(lr, seed) for seed in range(self.seeds)])

    def _train(self, model: str, task: TripTask, members: Sequence[tuple[float, int]]) -> None:
        """All at once, as they share what chance decides; or none, if they are all there."""
        if all(self._cell(model, task, *member) is not None for member in members):
            return
        config, began = self.config(model), time.monotonic()
        trained = train(
            task, config, self.plan, members, self._data_of(task), self.device, self.graphs
        )
        seconds, device = time.monotonic() - began, machine(self.device.type)["device"]
        for of, (lr, seed) in zip(trained, members, strict=True):
            key = cells.key(task, config, self.plan, lr, seed)
            if seed == TUNING_SEED:  # is validated only
                of = replace(of, logits_T=of.logits_T[:0])
            about = {"lr": lr, "seconds": seconds / len(members), "device": device}
            cells.write(cells.path(self.folder / "cells", model, key), key, of, about)
            name = f"tuning {model}" if seed == TUNING_SEED else model
            self.say(
                f"{name}, seed {seed}, lr {lr:g}: validation {self.plan.metric} {abs(of.best):.4f} "
                f"at epoch {of.epoch:.2g}, {seconds:.0f} s for {len(members)}"
            )

    def _rate(self, model: str, task: TripTask) -> float | None:
        """The learning rate that validation chose; None while they are not all tried."""
        if len(self.lrs) < 2:
            return self.lrs[0] if self.lrs else self.config(model).optim.lr
        tried = {lr: self._cell(model, task, lr, TUNING_SEED) for lr in self.lrs}
        best = {lr: cell.about["best"] for lr, cell in tried.items() if cell is not None}
        return max(best, key=lambda lr: best[lr]) if len(best) == len(tried) else None

    def _cell(self, model: str, task: TripTask, lr: float, seed: int) -> cells.Cell | None:
        key = cells.key(task, self.config(model), self.plan, lr, seed)
        return cells.read(cells.path(self.folder / "cells", model, key), key)

    def _finished(self, model: str) -> list[cells.Cell] | None:
        """All seeds of a model, if they are there."""
        task = self._task_of(model)
        lr = self._rate(model, task)
        if lr is None:
            return None
        found = [self._cell(model, task, lr, seed) for seed in range(self.seeds)]
        there = [cell for cell in found if cell is not None]
        return there if len(there) == len(found) else None

    def _task_of(self, model: str) -> TripTask:
        task = task_of(self.config(model))
        task.table, task.parts = self.task.table, self.task.parts
        if task.model_config.item_start == "counts":
            task.item_vectors = self.task.item_vectors
        return task

    def _data_of(self, task: TripTask) -> Data:
        """The samples on the device, made anew only for another view of histories."""
        config = task.model_config
        view = str([config.max_history, task.grouping, task.time_edges.tolist()])
        if view not in self._data:
            self._data = {view: Data.of(task, self.device)}
        return self._data[view]

    def _counts(self, model: str) -> cells.Cell:
        scores, cut = self._counted(model), len(self.task.parts.validation)
        best = good(self.plan.metric, scores[:cut], self.task.parts.validation, self.task)
        return cells.Cell(scores[cut:], {"best": best})

    def _counted(self, model: str) -> Floats:
        task = self.task
        if model == "cosine":
            return cosine_scores(task.evaluated, task.parts)
        items_T = task.evaluated.targets.items_T
        return figures.popularity(task.parts.train, items_T, len(task.table.item_names))

    def users(self) -> Ints:
        """Of the test targets: 0, 1, 2 ... without gaps."""
        events_T = self.task.parts.test.events_T
        numbers: Ints = np.unique(self.task.table.users_E[events_T], return_inverse=True)[1]
        return numbers

    def values(self, model: str, metric: str) -> Values | None:
        """The metric of each seed on the test part, and on drawn users.

        None where there is none: counts have no log loss, and users with one target each no GAUC.
        """
        if model in COUNTS and metric == "logloss":
            return None
        users, labels, prepare = self.users(), self.task.parts.test.labels_T, METRICS[metric]
        weighted = [prepare(cell.logits_T, labels, users) for cell in self.found[model]]
        found = resampled(weighted, int(users.max()) + 1, self.resamples, seed=0)
        return found if np.isfinite(found.real_S).all() else None

    def figures(self, model: str) -> dict[str, float]:
        """Means over seeds, of the test part; and of the plan's metric on the validation part."""
        part = self.task.parts.test
        users_T = self.task.table.users_E[part.events_T]
        by_seed = []
        for cell in self.found[model]:
            row = figures.figures(cell.logits_T, part, users_T, np.zeros(len(part)))
            del row["auc_of_popularity"]  # of zeros here
            by_seed.append({**row, "validation": abs(cell.about["best"])})
        chances = ("logloss", "calibration", "calibration_error")
        names = [n for n in by_seed[0] if model not in COUNTS or n not in chances]
        return {name: float(np.mean([row[name] for row in by_seed])) for name in names}

    def by_bin(self, model: str) -> dict[str, list[list[Any]]]:
        """Rows of bin, targets and AUC (mean over seeds) of the test part, for each way to make bins."""
        clicks, labels = self.task.clicks(self.task.parts.test), self.task.parts.test.labels_T
        ways = {
            "time since the newest interaction": figures.age_bins(clicks.newest_ages()),
            "length of the history": figures.length_bins(clicks.lengths()),
        }
        found: dict[str, list[list[Any]]] = {}
        for way, (bins, names) in ways.items():
            seeds = [
                figures.auc_by(bins, names, cell.logits_T, labels) for cell in self.found[model]
            ]
            found[way] = [
                [name, count, None if value is None else float(np.mean([s[n][2] for s in seeds]))]
                for n, (name, count, value) in enumerate(seeds[0])
            ]
        return found


def compose(model: str, shared: Sequence[str]) -> Config:
    """The configuration of a model (`benchmarks.trip.grid`)."""
    found: list[Config] = []

    def job(plain: dict[str, Any], words: list[str], sweep: bool) -> int:
        del words, sweep
        found.append(build_config(plain))
        return 0

    run_jobs(["+recipe=trip", *shared, *overrides(model)], job)
    return found[0]


_study: Study | None = None
"""That of a worker, made for its first model."""


def _train_one(job: tuple[str, dict[str, Any], float]) -> str | None:
    """Train one model, in a worker; what went wrong, which does not keep it from the next one."""
    model, settings, until = job
    try:
        if time.time() < until:
            _own_study(model, settings).train(model)
    except Exception:
        return f"{model}: {traceback.format_exc()}"
    return None


def _own_study(model: str, settings: dict[str, Any]) -> Study:
    """This worker's, with `model` among its models."""
    global _study
    if _study is None:
        torch.set_num_threads(1)
        _study = Study(**{**settings, "models": [model]})
    return _study


def task_of(config: Config) -> TripTask:
    """The task of a configuration."""
    return TripTask(task=config.task, model=config.model, data=config.data, seed=0)
