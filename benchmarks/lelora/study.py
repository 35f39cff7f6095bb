"""A study: every method on every task, learning rates tuned on validation, then paired seeds.

What is finished is in one file, `cells.json`, which is written after every batch of runs: a study that
is stopped goes on from it. With one seed, all methods have the same order of texts, the same first
classifier and, where they draw them alike, the same first directions.
"""

import base64
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lelora.data import Data, base_of, task_of
from benchmarks.lelora.ground import Ground, prepare, spectra_of
from benchmarks.lelora.methods import CHOSEN, form_of, parameters
from benchmarks.lelora.policy import School, by_chance, teach
from benchmarks.lelora.training import Plan, Run, Together
from recipes.lelora.brain import Setting

TUNING_SEEDS = (1000, 1001)
"""Choose learning rates, and are none of the seeds that count."""
TEACHING_SEED = 2000
JUDGING = 0.15
"""Share of the training texts that judge populations."""
MIDDLE = {
    "rslora": 1.5e-3, "pissa": 1e-3, "mica": 6e-3, "adalora": 6e-3, "loraxs": 6e-3, "full": 2e-4,
    "head": 1.2e-2,
}  # fmt: skip
"""Of the learning rates that are tried; 3e-3 for the others."""
TAUGHT = ("learned", "learned-half")


def rates(method: str, number: int = 5) -> list[float]:
    """By factors of 2 around the middle."""
    middle = MIDDLE.get(method, 3e-3)
    return [middle * 2.0 ** (n - number // 2) for n in range(number)]


@dataclass(frozen=True)
class Asked:
    """One run that is wanted."""

    method: str
    lr: float
    seed: int


class Study:
    """Measures what is not measured yet."""

    def __init__(
        self, stored: Mapping[str, Tensor], folder: Path, plan: Plan, school: School, *, rank: int,
        seeds: int, device: torch.device, dtype: torch.dtype, at_once: int = 160, heads: int = 12,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.stored, self.folder, self.plan, self.school = stored, folder, plan, school
        self.rank, self.seeds, self.device, self.dtype = rank, seeds, device, dtype
        self.at_once, self.say = at_once, say
        self.base = base_of(stored, device, heads)
        self.spectra = spectra_of(self.base)
        self.grounds: dict[str, tuple[Data, Ground]] = {}
        self.cells: dict[str, Any] = {}
        self.file = folder / "cells.json"
        about = {"plan": asdict(plan), "school": asdict(school), "rank": rank, "seeds": seeds}
        if self.file.exists():
            self.cells = json.loads(self.file.read_text())
            if self.cells["about"] != about:
                raise ValueError(
                    f"{self.file} is of a study with {self.cells['about']}, and this one has {about}: "
                    "choose another --out"
                )
        self.cells["about"] = about

    def of(self, task: str) -> dict[str, Any]:
        """What is there of a task."""
        empty: dict[str, Any] = {
            "tuning": {},
            "tuned": [],
            "runs": {},
            "settings": {},
            "seconds": {},
        }
        found: dict[str, Any] = self.cells.setdefault("tasks", {}).setdefault(task, empty)
        return found

    def ground(self, task: str) -> tuple[Data, Ground]:
        """Its texts and what methods begin from."""
        if task not in self.grounds:
            data = task_of(self.stored, task, self.device)
            self.grounds[task] = (
                data,
                prepare(self.base, self.spectra, data, self.rank, self.plan.steps),
            )
        return self.grounds[task]

    def start(self, task: str) -> dict[str, list[float]]:
        """Loss and accuracy of the first classifier on the untouched encoder, by part."""
        kept: dict[str, list[float]] = self.of(task).setdefault("start", {})
        if not kept:
            data, ground = self.ground(task)
            form = form_of(ground, "head", [0], [None])
            untrained = Together(
                self.base, data, self.plan, [form], [Run(0, 0.0)], self.dtype, ground.probe
            )
            for name, part in (("validation", data.validation), ("test", data.test)):
                scores = untrained.score(part)
                kept[name] = [float(scores.loss_P[0]), float(scores.correct_PX.double().mean())]
        return kept

    def collapsed(self, task: str, part: str, loss: float, accuracy: float) -> bool:
        """Whether a run ended worse than it began."""
        loss0, accuracy0 = self.start(task)[part]
        return not loss <= loss0 and accuracy < accuracy0

    def save(self) -> None:
        """Whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.cells))
        temporary.replace(self.file)

    def setting(self, task: str, method: str, seed: int) -> Setting | None:
        """What a run's matrices train, where that is decided."""
        if method not in CHOSEN:
            return None
        if method == "random":
            return by_chance(self.ground(task)[1], seed)
        kept = self.of(task)["settings"][method]
        return Setting(tuple(kept["widths"]), (-1,) * len(kept["widths"]), tuple(kept["scales"]))

    def _trained(self, task: str, asked: Sequence[Asked]) -> tuple[Together, float]:
        data, ground = self.ground(task)
        by_method: dict[str, list[Asked]] = {}
        for one in asked:
            by_method.setdefault(one.method, []).append(one)
        assert [one for of in by_method.values() for one in of] == list(asked), "method by method"
        forms = [
            form_of(ground, method, [one.seed for one in of],
                    [self.setting(task, method, one.seed) for one in of])
            for method, of in by_method.items()
        ]  # fmt: skip
        runs = [Run(one.seed, one.lr) for one in asked]
        together = Together(self.base, data, self.plan, forms, runs, self.dtype, ground.probe)
        return together, together.train()

    def tune(self, task: str, methods: Sequence[str]) -> None:
        """Try learning rates; where the best is at the end of what was tried, the next ones, too."""
        tuning, tuned = self.of(task)["tuning"], self.of(task)["tuned"]
        methods = [method for method in methods if method not in tuned]
        for method in methods:
            tuning.setdefault(method, {})
        wanted = {method: rates(method) for method in methods}
        for _ in range(3):
            asked = [
                Asked(method, lr, seed)
                for method in methods
                for lr in wanted[method]
                if f"{lr:.4g}" not in tuning[method]
                for seed in TUNING_SEEDS
            ]
            for part in self._parts(asked):
                self._tune(task, part)
            for method in methods:
                tried, best = sorted(map(float, tuning[method])), self.rate(task, method)
                wanted[method] = [best / 2] if best == tried[0] else []
                wanted[method] += [best * 2] if best == tried[-1] else []
        tuned += methods

    def _tune(self, task: str, asked: Sequence[Asked]) -> None:
        began = time.monotonic()
        together, seconds = self._trained(task, asked)
        scores = together.score(self.ground(task)[0].validation)
        for n, one in enumerate(asked):
            of = self.of(task)["tuning"][one.method].setdefault(f"{one.lr:.4g}", {})
            of[str(one.seed)] = [
                float(scores.loss_P[n]),
                float(scores.correct_PX[n].double().mean()),
            ]
        self._note(task, f"tuning of {len(asked)} runs", seconds, began)

    def rate(self, task: str, method: str) -> float:
        """The learning rate with the most right on validation, then with the least loss.

        None counts that is more than half of one at which a run has collapsed: other seeds would, too.
        """

        def good(lr: str) -> tuple[float, float]:
            values = np.nan_to_num(np.array(list(tuning[lr].values())).mean(0), nan=1e9)
            return float(values[1]), -float(values[0])

        tuning = self.of(task)["tuning"][method]
        broken = [
            float(lr)
            for lr, of in tuning.items()
            if any(self.collapsed(task, "validation", *run) for run in of.values())
        ]
        safe = [lr for lr in tuning if float(lr) <= 0.501 * min(broken, default=float("inf"))]
        return float(max(safe or tuning, key=good))

    def teach(self, task: str) -> None:
        """Have a policy learn from populations, at the rate that is best without one.

        Their runs are judged by training texts that they have not seen: those of validation choose the
        learning rates, and nothing else.
        """
        kept, lr = self.of(task), self.rate(task, "frozen")
        if "learned" in kept["settings"]:
            return
        data, ground = self.ground(task)
        learnt, judging = data.train.split(1 - JUDGING)
        data = replace(data, train=learnt)
        began, plan = time.monotonic(), Plan(self.school.steps, self.plan.batch_size)

        def judge(number: int, settings: Sequence[Setting]) -> list[float]:
            seed = TEACHING_SEED + number
            form = form_of(ground, "learned", [seed] * len(settings), list(settings))
            runs = [Run(seed, lr)] * len(settings)
            together = Together(self.base, data, plan, [form], runs, self.dtype, ground.probe)
            together.train()
            return [float(x) for x in together.score(judging).loss_P]

        taught = teach(ground, self.school, judge)
        for method, setting in (("learned", taught.whole), ("learned-half", taught.half)):
            kept["settings"][method] = {"widths": setting.widths, "scales": setting.scales}
        kept["rounds"] = [vars(each) for each in taught.rounds]
        self._note(task, "teaching", time.monotonic() - began, began)

    def compare(self, task: str, methods: Sequence[str]) -> None:
        """All seeds of each method at its best rate, on the test part."""
        runs = self.of(task)["runs"]
        asked = [
            Asked(method, self.rate(task, method), seed)
            for method in methods
            if method not in runs
            for seed in range(self.seeds)
        ]
        for part in self._parts(asked):
            began = time.monotonic()
            together, seconds = self._trained(task, part)
            scores = together.score(self.ground(task)[0].test)
            for n, one in enumerate(part):
                bits = np.packbits(scores.correct_PX[n].numpy())
                setting = self.setting(task, one.method, one.seed)
                loss = float(scores.loss_P[n])
                accuracy = float(scores.correct_PX[n].double().mean())
                runs.setdefault(one.method, []).append({
                    "seed": one.seed, "lr": one.lr, "loss": loss, "accuracy": accuracy,
                    "collapsed": self.collapsed(task, "test", loss, accuracy),
                    "skipped": int(together.optimizer.skipped_P[n]),
                    "texts": scores.correct_PX.shape[1],
                    "correct": base64.b64encode(bits.tobytes()).decode(),
                    "parameters": parameters(self.ground(task)[1], one.method, setting),
                })  # fmt: skip
            self._note(task, f"{len(part)} runs", seconds, began)

    def clock(self, task: str, methods: Sequence[str], steps: int = 50) -> None:
        """Milliseconds of a step of each method by itself, so many seeds side by side, for each run."""
        kept = self.of(task).setdefault("clock", {})
        data, ground = self.ground(task)
        began = time.monotonic()
        for method in methods:
            if method in kept or method not in self.of(task)["runs"]:
                continue
            seeds = list(range(self.seeds))
            form = form_of(ground, method, seeds, [self.setting(task, method, s) for s in seeds])
            runs = [Run(seed, self.rate(task, method)) for seed in seeds]
            together = Together(
                self.base,
                data,
                Plan(steps, self.plan.batch_size),
                [form],
                runs,
                self.dtype,
                ground.probe,
            )
            kept[method] = 1e3 * together.train() / steps / len(runs)
        self._note(task, "clock", time.monotonic() - began, began)

    def check(self, task: str, method: str = "lora", seeds: int = 4) -> None:
        """The same runs with products in 32 bits, and some steps without a recorded graph."""
        kept = self.of(task)
        if "check" in kept or method not in kept["runs"]:
            return
        began, (data, ground) = time.monotonic(), self.ground(task)
        before = [run for run in kept["runs"][method] if run["seed"] < seeds]
        runs = [Run(run["seed"], run["lr"]) for run in before]

        def made(plan: Plan, dtype: torch.dtype) -> Together:
            form = form_of(ground, method, [run.seed for run in runs], [None] * len(runs))
            return Together(self.base, data, plan, [form], runs, dtype, ground.probe)

        wide = made(self.plan, torch.float32)
        seconds = wide.train()
        again = 100 * wide.score(data.test).correct_PX.double().mean(1).numpy()
        first = 100 * np.array([run["accuracy"] for run in before])
        few = Plan(10, self.plan.batch_size)
        recorded, plain = made(few, self.dtype), made(few, self.dtype)
        recorded.train()
        for _ in range(few.steps):
            plain.step()
        apart = (recorded.head_PCD - plain.head_PCD).abs().max() / plain.head_PCD.abs().max()
        kept["check"] = {
            "task": task, "runs": len(runs), "accuracy": float(first.mean()),
            "accuracy_32": float(again.mean()), "largest": float(np.abs(again - first).max()),
            "graph": float(apart.detach()),
        }  # fmt: skip
        self._note(task, "check", seconds, began)

    def _parts(self, asked: list[Asked]) -> list[list[Asked]]:
        """As many at once as fit, all seeds of a method together; runs that train everything apart."""
        found: list[list[Asked]] = []
        for whole in (False, True):
            part: list[Asked] = []
            by_method: dict[str, list[Asked]] = {}
            for one in asked:
                if (one.method == "full") == whole:
                    by_method.setdefault(one.method, []).append(one)
            for of in by_method.values():
                if part and len(part) + len(of) > self.at_once:
                    found.append(part)
                    part = []
                part = part + of
            found += [part] if part else []
        return found

    def _note(self, task: str, what: str, seconds: float, began: float) -> None:
        """Say how long it took, and keep everything."""
        whole = time.monotonic() - began
        timings = self.of(task)["seconds"]
        timings[f"{len(timings)} {what}"] = [seconds, whole]
        self.save()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.say(f"{task:12} {what}: {seconds:.1f} s of training, {whole:.1f} s in all")
