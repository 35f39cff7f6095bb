"""FuxiCTR's DIN, BST and DIEN beside ours, on the same rows: is the harness sound?

    pip install fuxictr==2.3.10; git clone https://github.com/reczoo/FuxiCTR
    python -m benchmarks.trip.fuxictr --zoo FuxiCTR/model_zoo --json FILE [key=value ...]

    T targets, N items of a history

Their models and their training loop, from their repository and package, read files that this program
writes: the same targets, histories and split as ours. Both sides see items only (no stars, no times),
with the same size of the item table, batches, epochs and rate, Adam without decay, and an evaluation
after each epoch, of which the best in AUC on the validation part counts. What is left to each is how it
starts and the order of samples; their loop lowers the rate where validation does not improve.

Ours is there as it is among the baselines, and as theirs is built: no product in the last layers, no
vector for kinds of interaction, of which there is one. `--paired`: their DIN begins with the numbers of
ours and sees its batches, so that only rounding differs. `--start` lets their item table start as
large as ours, `--wide` gives theirs the layers of their defaults, in rows of their own; `--resume` keeps
the rows of the JSON.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import write
from benchmarks.trip.fuxictr_side import (
    STARTED,
    WIDE,
    as_theirs,
    begin_alike,
    their_auc,
    their_model,
    theirs,
    written,
)
from benchmarks.trip.study import compose, task_of
from benchmarks.trip.training import Data, Plan, sample_order, train
from parallel.weights import materialize
from recipes.ctr.metrics import auc
from recipes.trip import TripTask
from trainer.config import Config

PLAIN = "model.behaviours=false"
OURS = {
    "DIN": {"": "din", ", as theirs is built": f"din {PLAIN} model.verdict=plain"},
    "BST": {"": f"bst {PLAIN} model.time=none"},
    "DIEN": {},
}
"""The models of ours beside each of theirs. BST's positions are places in theirs."""
ALIKE = f"ours, DIN{list(OURS['DIN'])[1]}"
SAME = ["optim.betas=[0.9,0.999]", "optim.weight_decay=0", "optim.schedule=constant",
        "optim.warmup=0", "optim.max_norm=10", "model.dropout=0"]  # fmt: skip
"""What their loop does."""
PAIRED = "FuxiCTR DIN, our start and order"
NEAR = 0.002
"""In AUC: so near our DIN is to be to theirs on average, and chance is to explain the difference."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""By the number of seeds: how many standard errors 95 % of Student's t distribution are within."""


def main() -> None:
    """Train both sides, print a line for each training, and write the JSON after every model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="key=value of +recipe=trip, such as the data")
    parser.add_argument("--zoo", type=Path, required=True, help="model_zoo of their repository")
    parser.add_argument("--model", action="append", choices=OURS, help="several (all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--wide", action="store_true", help="theirs with their default layers, too")
    parser.add_argument("--paired", action="store_true", help="their DIN in our loop, too")
    parser.add_argument("--start", action="store_true", help="theirs with our start, too")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if options.resume and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    overrides = [*options.overrides, *SAME]
    task = items_only(task_of(compose("din", overrides)))
    config = {name: getattr(options, name) for name in ("seeds", "epochs", "batch_size", "lr")}
    config |= {"targets": task.describe()["targets"],
               "hidden_size": task.model_config.hidden_size,
               "max_history": task.model_config.max_history}  # fmt: skip
    for name in options.model or list(OURS):
        with tempfile.TemporaryDirectory() as folder:
            files = written(task, Path(folder), post=name == "DIEN")
            for more in ("", STARTED * options.start, WIDE * options.wide):
                title = f"FuxiCTR {name}{more}"
                if title in {row["model"] for row in rows}:
                    continue
                aucs = [
                    theirs(name, more, files, task, options, seed) for seed in range(options.seeds)
                ]
                rows.append({"model": title, "beside": name, "auc": aucs})
                print(rows[-1], flush=True)
            if name == "DIN" and options.paired and PAIRED not in {row["model"] for row in rows}:
                aucs = in_our_loop(overrides, files, task, options)
                rows.append({"model": PAIRED, "beside": name, "auc": aucs})
                print(rows[-1], flush=True)
        for more, model in OURS[name].items():
            title = f"ours, {name}{more}"
            if title not in {row["model"] for row in rows}:
                aucs = ours(model, overrides, task, options)
                rows.append({"model": title, "beside": name, "auc": aucs})
                print(rows[-1], flush=True)
        write(options.json, "trip.fuxictr", "cpu", config, rows, summary(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Our mean less theirs, for each model of ours that has one of theirs beside it.

    `paired`: of those trainings that begin with the same numbers and see the same batches, each, with
    the 95 % interval of their mean; `near`: it contains 0, and the mean is within `NEAR`.
    """
    by_seed = {row["model"]: row["auc"] for row in rows}
    found: dict[str, Any] = {
        f"{name}{more}": statistics.mean(by_seed[ours]) - statistics.mean(by_seed[theirs])
        for name, models in OURS.items()
        for more in models
        if (ours := f"ours, {name}{more}") in by_seed and (theirs := f"FuxiCTR {name}") in by_seed
    }
    if ALIKE in by_seed and PAIRED in by_seed:
        pairs = zip(by_seed[ALIKE], by_seed[PAIRED], strict=True)
        found["paired"] = [own - other for own, other in pairs]
        if len(found["paired"]) in T_975:
            low, high = found["interval"] = interval(found["paired"])
            found["near"] = low <= 0 <= high and abs(statistics.mean(found["paired"])) <= NEAR
    return found


def interval(differences: list[float]) -> tuple[float, float]:
    """The 95 % interval of their mean, by Student's t distribution."""
    S, mean = len(differences), statistics.mean(differences)
    reach = T_975[S] * statistics.stdev(differences) / S**0.5
    return mean - reach, mean + reach


def items_only(task: TripTask) -> TripTask:
    """The same, with no kinds of interaction and no features of items."""
    parts = task.parts  # from the whole table
    task.table = replace(
        task.table,
        behaviours_E=np.zeros_like(task.table.behaviours_E),
        features_IF=task.table.features_IF[:, :0],
    )
    task.parts = parts
    return task


def ours(model: str, overrides: list[str], like: TripTask, options: Any) -> list[float]:
    """AUC of the test part by seed."""
    task, config = ours_of(model, overrides, like)
    device = torch.device("cpu")
    plan = Plan(options.epochs, options.epochs, options.batch_size)
    data = Data.of(task, device)
    # one by one, so that sums are rounded as theirs are: Adam makes a step of what is almost zero
    trained = [
        train(task, config, plan, [(options.lr, seed)], data, device)[0]
        for seed in range(options.seeds)
    ]
    return [auc(of.logits_T, task.parts.test.labels_T) for of in trained]


def ours_of(model: str, overrides: list[str], like: TripTask) -> tuple[TripTask, Config]:
    """A task on the same data."""
    config = compose(model, overrides)
    task = task_of(config)
    task.table, task.parts = like.table, like.parts
    return task, config


def in_our_loop(
    overrides: list[str], files: Path, like: TripTask, options: Any
) -> list[float]:  # fmt: skip
    """AUC of their DIN by seed: it starts as ours does, and takes its own steps with our batches."""
    task, _ = ours_of(OURS["DIN"][ALIKE.removeprefix("ours, DIN")], overrides, like)
    data = Data.of(task, torch.device("cpu"))
    steps, found = round(options.epochs * data.train.size / options.batch_size), []
    for seed in range(options.seeds):
        own = task.build_model()
        materialize(own, torch.device("cpu"), task.init_weights, seed)
        model = their_model("DIN", "", files, task, options, seed)
        begin_alike(model, own)
        model._max_gradient_norm = 10.0  # as their `fit` sets it
        order_TB = sample_order(data.train.size, steps, options.batch_size, seed)
        best, kept, done = -1.0, float("nan"), 0
        for number in range(1, options.epochs + 1):
            until = number * steps // options.epochs
            model.train()
            for rows_B in order_TB[done:until]:
                model.train_step(as_theirs(data.train[rows_B]))
            done = until
            if (value := their_auc(model, data.validation)) > best:
                best, kept = value, their_auc(model, data.test)
        found.append(kept)
        print(f"DIN, seed {seed}, in our loop: {kept:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()
