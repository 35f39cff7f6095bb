"""Click models against each other, with seeds, intervals, corrected tests and a verdict in words.

    python -m benchmarks.trip --model trip --model baselines data=taobao data.folder=FOLDER

Trains every model with every seed on one data configuration (any overrides of `+recipe=trip`), and says
of the candidate, in the metric that was chosen before, how it differs from each of the others: users and
seeds drawn anew, Holm's correction over all of them. `benchmarks.trip.grid` has the names of models and
of groups of them. What is finished is kept: `--resume` goes on where a study was stopped.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from benchmarks.trip.grid import COUNTS, models
from benchmarks.trip.study import Study
from benchmarks.trip.training import DTYPES, Plan
from benchmarks.trip.verdict import LEVEL, bins, conclusion, sentence, table
from recipes.ctr.significance import METRICS, Difference, Values, difference, holm
from recipes.task import DataError
from trainer.errors import ConfigError


def main() -> None:
    """Parse, train, compare, print and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="key=value, for all models")
    parser.add_argument("--model", action="append", required=True, help="a model, or a group")
    parser.add_argument("--candidate", help="the one that is compared with all others (the first)")
    parser.add_argument("--metric", choices=METRICS, default="auc", help="chosen before the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, action="append", help="several: chosen for each model")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/trip-study"))
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="that training computes in"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that train, on one device"
    )
    parser.add_argument("--packed", type=Path, help="the data, from benchmarks.trip.packed")
    parser.add_argument(
        "--no-graphs", action="store_true", help="start every kernel, on a GPU, too"
    )
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no model later; what is finished is compared")  # fmt: skip
    parser.add_argument("--train-only", action="store_true", help="compare later, by --resume")
    parser.add_argument("--resume", action="store_true", help="keep the finished cells of --out")
    options = parser.parse_intermixed_args()
    until = time.time() + options.stop_after
    everything = models(options.model)
    candidate = options.candidate or everything[0]
    if candidate not in everything or candidate in COUNTS:
        parser.error(f"--candidate {candidate} is none of the models that are trained")
    if any((options.out / "cells").glob("*")) and not options.resume:
        parser.error(
            f"{options.out} holds a study: --resume goes on with it, or choose another --out"
        )
    try:
        study = Study(
            models=everything,
            shared=options.overrides,
            folder=options.out,
            plan=Plan(
                options.epochs,
                options.evaluations,
                options.batch_size,
                options.metric,
                options.dtype,
            ),
            seeds=options.seeds,
            lrs=options.lr or [],
            device=torch.device(options.device),
            resamples=options.resamples,
            packed=options.packed,
            graphs=not options.no_graphs,
        )
        for name, line in study.task.describe().items():
            if name != "model":
                print(f"{name:12} {line}")
        for model in [] if options.train_only else study.learned:
            study.config(model)  # what is wrong is said before anything is trained
        study.run(options.workers, until)
    except (ConfigError, DataError, ValueError) as error:
        parser.error(str(error))
    if options.train_only:
        return
    study.collect()
    left = [model for model in everything if model not in study.found]
    if left:
        print(f"not finished: {', '.join(left)}: --resume goes on with them")
    if candidate in left:
        return
    report(study, candidate, options.out / "results.json", options.device)


def report(study: Study, candidate: str, file: Path, device: str) -> None:
    """Tables, sentences, and the same as JSON."""
    figures = {model: study.figures(model) for model in study.found}
    values = {model: {name: study.values(model, name) for name in METRICS} for model in study.found}
    spread = {
        model: float(of["auc"].real_S.std(ddof=1))
        for model, of in values.items()
        if of["auc"] is not None and len(of["auc"].real_S) > 1
    }
    compared = {metric: compare(values, candidate, metric) for metric in METRICS}
    metric, others = study.plan.metric, [m for m in study.found if m != candidate]
    users = f"{int(study.users().max()) + 1:,} users in the test part"
    print(
        f"\n{study.seeds} seeds, {users}\n"
        if study.seeds > 1
        else f"\nOne seed, {users}: the chance of training is not in what follows\n"
    )
    print("\n".join(table(figures, spread)) + "\n")
    for other, (found, p) in compared[metric].items():
        print(f"- {sentence(candidate, other, metric, found, p)}")
    summary: dict[str, Any] = {"candidate": candidate, "metric": metric}
    sign = -1 if metric == "logloss" else 1
    judged = [m for m in others if m in compared[metric]]
    if judged:
        strongest = max(judged, key=lambda m: sign * figures[m]["validation"])
        beaten = [m for m, (d, p) in compared[metric].items() if p < LEVEL and sign * d.mean > 0]
        found, p = compared[metric][strongest]
        words = conclusion(candidate, strongest, metric, found, p, len(beaten), len(judged))
        print(f"\n{words}\n")
        by_bin = {model: study.by_bin(model) for model in (candidate, strongest)}
        for way in by_bin[candidate]:
            print("\n".join(bins(way, {m: of[way] for m, of in by_bin.items()})) + "\n")
        summary |= {"strongest": strongest, "beaten": beaten, "verdict": words}
    rows = [
        {
            "model": model,
            "figures": figures[model],
            "by_seed": {n: v.real_S.tolist() for n, v in values[model].items() if v is not None},
            "by_bin": study.by_bin(model),
            "trainings": [cell.about for cell in study.found[model]],
            "against": {
                name: {**vars(of[model][0]), "p_holm": of[model][1]}
                for name, of in compared.items()
                if model in of
            },
        }
        for model in study.found
    ]
    config = {"overrides": list(study.shared), "plan": vars(study.plan), "seeds": study.seeds,
              "resamples": study.resamples, "data": study.task.describe()["data"],
              "targets": study.task.describe()["targets"]}  # fmt: skip
    write(file, "trip", device, config, rows, summary)
    print(f"everything is in {file}")


def compare(
    values: dict[str, dict[str, Values | None]], candidate: str, metric: str
) -> dict[str, tuple[Difference, float]]:
    """The candidate's difference from each other model, with its p after Holm's correction."""
    own = values[candidate][metric]
    if own is None:
        return {}
    found = {
        model: difference(own, of)
        for model, by_metric in values.items()
        if model != candidate and (of := by_metric[metric]) is not None
    }
    corrected = holm([d.p for d in found.values()])
    return {m: (d, p) for (m, d), p in zip(found.items(), corrected, strict=True)}


if __name__ == "__main__":
    main()
