"""What a study has beside its comparison: how long steps take, and whether 16 bits are enough."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.lelora.methods import form_of
from benchmarks.lelora.study import Study
from benchmarks.lelora.training import Plan, Run, Together


def clock(study: Study, task: str, methods: Sequence[str], steps: int = 50) -> None:
    """Milliseconds of a step of each method by itself, so many seeds side by side, for each run."""
    kept = study.of(task).setdefault("clock", {})
    subject = study.subject(task)
    began, plan = time.monotonic(), Plan(steps, study.plan.batch_size)
    for method in methods:
        if method in kept or method not in study.of(task)["runs"]:
            continue
        study.in_time()
        seeds = list(range(study.seeds))
        settings = [study.setting(task, method, s) for s in seeds]
        form = form_of(subject.ground, method, seeds, settings)
        runs = [Run(seed, study.rate(task, method)) for seed in seeds]
        together = subject.together(plan, [form], runs, study.dtype)
        kept[method] = 1e3 * together.train() / steps / len(runs)
    study.note(task, "clock", time.monotonic() - began, began)


def check(study: Study, task: str, method: str = "lora", seeds: int = 4) -> None:
    """The same runs with products in 32 bits, and some steps without a recorded graph.

    `graph` is how far these are apart, in parts of how far they have gone.
    """
    kept = study.of(task)
    if "check" in kept or method not in kept["runs"]:
        return
    began, subject = time.monotonic(), study.subject(task)
    before = [run for run in kept["runs"][method] if run["seed"] < seeds]
    runs = [Run(run["seed"], run["lr"]) for run in before]

    def made(plan: Plan, dtype: torch.dtype) -> Together:
        form = form_of(subject.ground, method, [run.seed for run in runs], [None] * len(runs))
        return subject.together(plan, [form], runs, dtype)

    wide = made(study.plan, torch.float32)
    seconds = wide.train()
    scores = subject.scored(wide, "test")
    again = 100 * np.array([scored.accuracy for scored in scores])
    first = 100 * np.array([run["accuracy"] for run in before])
    few = Plan(10, study.plan.batch_size)
    recorded, plain = made(few, study.dtype), made(few, study.dtype)
    begun = [p.detach().clone() for p in plain.parameters]
    recorded.train()
    for _ in range(few.steps):
        plain.step()
    apart = _distance(recorded.parameters, plain.parameters) / _distance(plain.parameters, begun)
    kept["check"] = {
        "task": task, "runs": len(runs), "accuracy": float(first.mean()),
        "accuracy_32": float(again.mean()), "largest": float(np.abs(again - first).max()),
        "loss": float(np.mean([run["loss"] for run in before])),
        "loss_32": float(np.mean([scored.loss for scored in scores])), "graph": apart,
    }  # fmt: skip
    study.note(task, "check", seconds, began)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    squares = [(x - y).detach().square().sum() for x, y in zip(one, other, strict=True)]
    return float(sum(squares)) ** 0.5
