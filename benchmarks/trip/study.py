"""A study: every model with every seed on the same data, and how they compare.

What is the same for all: the table, the split, drawn items, and with one seed the item table's start,
the order of samples and the users that the bootstrap draws.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.trip import cells
from benchmarks.trip.grid import COUNTS, overrides
from benchmarks.trip.training import Plan, train
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
    say: Callable[[str], None] = print
    found: dict[str, list[cells.Cell]] = field(default_factory=dict)
    """By model, then by seed; counts have one."""

    def __post_init__(self) -> None:
        learned = [model for model in self.models if model not in COUNTS]
        self.configs = {model: self._compose(model) for model in learned}
        self.task = _task(next(iter(self.configs.values())))

    def _compose(self, model: str) -> Config:
        found: list[Config] = []

        def job(plain: dict[str, Any], words: list[str], sweep: bool) -> int:
            del words, sweep
            found.append(build_config(plain))
            return 0

        run_jobs(["+recipe=trip", *self.shared, *overrides(model)], job)
        return found[0]

    def run(self) -> None:
        """Train what is not there yet."""
        for number, model in enumerate(self.models, 1):
            if model in COUNTS:
                self.found[model] = [cells.Cell(self._counted(model), {})]
                continue
            config = self.configs[model]
            task = _task(config)
            task.table, task.parts = self.task.table, self.task.parts
            lr = self._chosen_rate(model, task, config)
            name = f"{number}/{len(self.models)} {model}"
            self.found[model] = [
                self._cell(name, model, task, config, lr, s) for s in range(self.seeds)
            ]

    def _chosen_rate(self, model: str, task: TripTask, config: Config) -> float:
        if len(self.lrs) < 2:
            return self.lrs[0] if self.lrs else config.optim.lr
        tried = {
            lr: self._cell(f"tuning {model}", model, task, config, lr, TUNING_SEED).about["best"]
            for lr in self.lrs
        }
        return max(tried, key=lambda lr: tried[lr])

    def _cell(
        self, name: str, model: str, task: TripTask, config: Config, lr: float, seed: int
    ) -> cells.Cell:
        key = cells.key(task, config, self.plan, lr, seed)
        file = cells.path(self.folder / "cells", model, key)
        cell = cells.read(file, key)
        if cell is None:
            began = time.monotonic()
            trained = train(task, config, self.plan, lr, seed, self.device)
            cells.write(file, key, trained, lr, time.monotonic() - began)
            cell = cells.read(file, key)
            assert cell is not None
            self.say(
                f"{name}, seed {seed}, lr {lr:g}: validation {self.plan.metric} "
                f"{abs(cell.about['best']):.4f} at epoch {cell.about['epoch']:.2g}, "
                f"{cell.about['seconds']:.0f} s"
            )
        return cell

    def _counted(self, model: str) -> Floats:
        task = self.task
        if model == "cosine":
            return cosine_scores(task.evaluated, task.parts)
        items_T = task.evaluated.targets.items_T
        return figures.popularity(task.parts.train, items_T, len(task.table.item_names))

    @property
    def test(self) -> slice:
        """Where the test part is among scores."""
        return slice(len(self.task.parts.validation), None)

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
        logits = [cell.logits_T[self.test] for cell in self.found[model]]
        weighted = [prepare(of_seed, labels, users) for of_seed in logits]
        found = resampled(weighted, int(users.max()) + 1, self.resamples, seed=0)
        return found if np.isfinite(found.real_S).all() else None

    def figures(self, model: str) -> dict[str, float]:
        """Means over seeds, of the test part; and of the plan's metric on the validation part."""
        task, cut = self.task, len(self.task.parts.validation)
        parts = {"validation": slice(0, cut), "test": slice(cut, None)}
        events_T = task.evaluated.targets.events_T
        users_T, by_seed = task.table.users_E[events_T], []
        popularity = self._counted("popularity")
        for cell in self.found[model]:
            of = {
                name: figures.figures(
                    cell.logits_T[rows], getattr(task.parts, name), users_T[rows], popularity[rows]
                )
                for name, rows in parts.items()
            }
            row = {**of["test"], "validation": of["validation"].get(self.plan.metric, float("nan"))}
            by_seed.append({k: v for k, v in row.items() if k != "auc_of_popularity"})
        chances = ("logloss", "calibration", "calibration_error")
        names = [n for n in by_seed[0] if model not in COUNTS or n not in chances]
        return {name: float(np.mean([row[name] for row in by_seed])) for name in names}

    def by_bin(self, model: str) -> dict[str, list[list[Any]]]:
        """Rows of bin, targets and AUC (mean over seeds) of the test part, for each way to make bins."""
        clicks, labels = self.task.evaluated, self.task.parts.test.labels_T
        ways = {
            "time since the newest interaction": figures.age_bins(clicks.newest_ages()),
            "length of the history": figures.length_bins(clicks.lengths()),
        }
        found: dict[str, list[list[Any]]] = {}
        for way, (bins, names) in ways.items():
            seeds = [
                figures.auc_by(bins[self.test], names, cell.logits_T[self.test], labels)
                for cell in self.found[model]
            ]
            found[way] = [
                [name, count, None if value is None else float(np.mean([s[n][2] for s in seeds]))]
                for n, (name, count, value) in enumerate(seeds[0])
            ]
        return found


def _task(config: Config) -> TripTask:
    return TripTask(task=config.task, model=config.model, data=config.data, seed=0)
