"""A study: every method on every task, learning rates tuned on validation, then paired seeds.

What is finished is in one file, `cells.json`, which is written after every batch of runs: a study that
is stopped goes on from it. With one seed, all methods have the same order of texts, the same first
classifier and, where they draw them alike, the same first directions.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lelora.methods import CHOSEN, form_of, parameters
from benchmarks.lelora.policy import School, by_chance, teach
from benchmarks.lelora.subject import Subject, Tuning
from benchmarks.lelora.training import Plan, Run, Together
from benchmarks.lelora.tuning import best_rate
from recipes.lelora.brain import Setting

TEACHING_SEED = 2000
TAUGHT = ("learned", "learned-half")
APART = ("full", "online")
"""Methods whose runs are not trained beside others: everything trains, or a policy decides."""


@dataclass(frozen=True)
class Asked:
    """One run that is wanted."""

    method: str
    lr: float
    seed: int


class Study:
    """Measures what is not measured yet."""

    def __init__(
        self, subject: Callable[[str], Subject], folder: Path, plan: Plan, school: School,
        tuning: Tuning, *, rank: int, seeds: int, dtype: torch.dtype, at_once: int = 100,
        until: float = float("inf"), say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """`subject` gives that of a task, always the same one; `at_once` runs fit beside each other.

        After the time `until` (of `time.monotonic`) no batch of runs begins: `TimeoutError` is raised.
        """
        self.subject, self.folder, self.plan, self.school = subject, folder, plan, school
        self.tuning, self.rank, self.seeds, self.dtype = tuning, rank, seeds, dtype
        self.at_once, self.until, self.say = at_once, until, say
        self.cells: dict[str, Any] = {}
        self.file = folder / "cells.json"
        about = {
            "plan": asdict(plan), "school": asdict(school), "rank": rank, "seeds": seeds,
            "tuning_seeds": list(tuning.seeds),
        }  # fmt: skip
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

    def start(self, task: str) -> dict[str, list[float]]:
        """Loss and accuracy before any training, by part."""
        kept: dict[str, list[float]] = self.of(task).setdefault("start", {})
        if not kept:
            subject = self.subject(task)
            form = form_of(subject.ground, "head", [0], [None])
            untrained = subject.together(self.plan, [form], [Run(0, 0.0)], self.dtype)
            for part in ("validation", "test"):
                (scored,) = subject.scored(untrained, part)
                kept[part] = [scored.loss, scored.accuracy]
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
            return by_chance(self.subject(task).ground, seed)
        kept = self.of(task)["settings"][method]
        return Setting(tuple(kept["widths"]), (-1,) * len(kept["widths"]), tuple(kept["scales"]))

    def _trained(self, task: str, asked: Sequence[Asked]) -> tuple[Together, float]:
        self.in_time()
        subject = self.subject(task)
        by_method: dict[str, list[Asked]] = {}
        for one in asked:
            by_method.setdefault(one.method, []).append(one)
        assert [one for of in by_method.values() for one in of] == list(asked), "method by method"
        forms = [
            form_of(subject.ground, method, [one.seed for one in of],
                    [self.setting(task, method, one.seed) for one in of])
            for method, of in by_method.items()
        ]  # fmt: skip
        runs = [Run(one.seed, one.lr) for one in asked]
        together = subject.together(self.plan, forms, runs, self.dtype)
        return together, together.train()

    def tune(self, task: str, methods: Sequence[str]) -> None:
        """Try learning rates; where the best is at the end of what was tried, the next ones, too."""
        tuning, tuned = self.of(task)["tuning"], self.of(task)["tuned"]
        methods = [method for method in methods if method not in tuned]
        for method in methods:
            tuning.setdefault(method, {})
        wanted = {method: self.tuning.rates(method) for method in methods}
        for _ in range(3):
            asked = [
                Asked(method, lr, seed)
                for method in methods
                for lr in wanted[method]
                if f"{lr:.4g}" not in tuning[method]
                for seed in self.tuning.seeds
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
        scores = self.subject(task).scored(together, "validation")
        for one, scored in zip(asked, scores, strict=True):
            of = self.of(task)["tuning"][one.method].setdefault(f"{one.lr:.4g}", {})
            of[str(one.seed)] = {
                "loss": scored.loss, "accuracy": scored.accuracy, **scored.kept
            }  # fmt: skip
        self.note(task, f"tuning of {len(asked)} runs", seconds, began)

    def rate(self, task: str, method: str) -> float:
        """The learning rate that validation says: see `benchmarks.lelora.tuning`.

        None counts that is more than half of one at which a run has collapsed: other seeds would, too.
        """
        tried = {float(lr): list(of.values()) for lr, of in self.of(task)["tuning"][method].items()}
        broken = [
            lr
            for lr, runs in tried.items()
            if any(self.collapsed(task, "validation", r["loss"], r["accuracy"]) for r in runs)
        ]
        safe = {
            lr: of for lr, of in tried.items() if lr <= 0.501 * min(broken, default=float("inf"))
        }
        return best_rate(safe or tried, by_loss=self.tuning.by_loss)

    def teach(self, task: str) -> None:
        """Have a policy learn from populations, at the rate that is best without one.

        Their runs are judged by training texts that they have not seen, and what came of them by others:
        those of validation choose the learning rates, and nothing else.
        """
        kept, lr = self.of(task), self.rate(task, "frozen")
        if "learned" in kept["settings"]:
            return
        self.in_time()
        subject = self.subject(task)
        ground = subject.ground
        began, plan = time.monotonic(), Plan(self.school.steps, self.plan.batch_size)

        def judge(numbers: Sequence[int], settings: Sequence[Setting], check: bool) -> torch.Tensor:
            found = []
            for first in range(0, len(settings), self.at_once):
                some = settings[first : first + self.at_once]
                seeds = [TEACHING_SEED + n for n in numbers[first : first + self.at_once]]
                form = form_of(ground, "learned", seeds, list(some))
                runs = [Run(seed, lr) for seed in seeds]
                together = subject.together(plan, [form], runs, self.dtype, judged=True)
                together.train()
                found.append(subject.judged(together, check))
                del together
                free()
            return torch.cat(found)

        taught = teach(ground, self.school, judge)
        for method, setting in (("learned", taught.whole), ("learned-half", taught.half)):
            kept["settings"][method] = {"widths": setting.widths, "scales": setting.scales}
        kept["rounds"] = [vars(each) for each in taught.course.rounds]
        contest = taught.course.contest
        kept["contest"] = {**vars(contest), "better": contest.better}
        self.note(task, "teaching", time.monotonic() - began, began)

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
            subject = self.subject(task)
            for n, (one, scored) in enumerate(
                zip(part, subject.scored(together, "test"), strict=True)
            ):
                setting = self.setting(task, one.method, one.seed)
                runs.setdefault(one.method, []).append({
                    "seed": one.seed, "lr": one.lr, "loss": scored.loss, "accuracy": scored.accuracy,
                    "collapsed": self.collapsed(task, "test", scored.loss, scored.accuracy),
                    "skipped": int(together.optimizer.skipped_P[n]), **scored.kept,
                    **together.notes[n],
                    "parameters": parameters(subject.ground, one.method, setting),
                })  # fmt: skip
            self.note(task, f"{len(part)} runs", seconds, began)

    def _parts(self, asked: list[Asked]) -> list[list[Asked]]:
        """As many at once as fit, all seeds of a method together; those of `APART` by themselves."""
        found: list[list[Asked]] = []
        for apart in (None, *APART):
            part: list[Asked] = []
            by_method: dict[str, list[Asked]] = {}
            for one in asked:
                if (one.method if one.method in APART else None) == apart:
                    by_method.setdefault(one.method, []).append(one)
            for of in by_method.values():
                if part and len(part) + len(of) > self.at_once:
                    found.append(part)
                    part = []
                part = part + of
            found += [part] if part else []
        return found

    def in_time(self) -> None:
        """Raise `TimeoutError` where nothing more may begin."""
        if time.monotonic() > self.until:
            raise TimeoutError

    def note(self, task: str, what: str, seconds: float, began: float) -> None:
        """Say how long it took, and keep everything."""
        whole = time.monotonic() - began
        timings = self.of(task)["seconds"]
        timings[f"{len(timings)} {what}"] = [seconds, whole]
        self.save()
        free()
        self.say(f"{task:12} {what}: {seconds:.1f} s of training, {whole:.1f} s in all")


def free() -> None:
    """Have a device forget the last runs and their graph before the next ones begin."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
