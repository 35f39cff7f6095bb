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
import importlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.results import write
from benchmarks.trip.study import compose, task_of
from benchmarks.trip.training import EVAL_BATCH, Batches, Data, Plan, sample_order, train
from models.trip.encodings import EMBEDDING_STD
from models.trip.history import UNSEEN
from parallel.weights import materialize
from recipes.ctr.metrics import auc
from recipes.ctr.targets import Targets
from recipes.task import Batch
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
STARTED, WIDE = ", its item table started as ours", ", its default layers"
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


@torch.no_grad()
def begin_alike(theirs: Any, own: Any) -> None:
    """Copy the numbers of our DIN into theirs; the last layers read the target first there."""
    head, D = own.head, own.items_VD.shape[1]
    attention, last = theirs.attention_layers[0].attention_layer.mlp, theirs.dnn.mlp
    theirs.embedding_layer.embedding_layers["item"].weight.copy_(own.items_VD)
    pairs = ((attention[0], head.first), (attention[2], head.second), (attention[4], head.weight),
             (last[0], head.verdict.up), (last[2], head.verdict.down))  # fmt: skip
    for to, source in pairs:
        to.weight.copy_(source.weight)
        to.bias.copy_(source.bias)
    last[0].weight.copy_(head.verdict.up.weight.roll(D, dims=1))


def as_theirs(batch: Batch) -> dict[str, Any]:
    """Columns under the names of their files."""
    return {"item": batch["targets_B"], "history": batch["items_BN"], "label": batch["labels_B"]}


def their_auc(model: Any, data: Batches) -> float:
    """Of one part, by their model."""
    rows = torch.arange(data.size)
    scores = model.predict([as_theirs(data[part]) for part in rows.split(EVAL_BATCH)])
    return auc(scores, data.columns["labels_B"].long().numpy())


def written(task: TripTask, folder: Path, post: bool) -> Path:
    """A folder with their three tables and the map of features. `post`: histories are padded behind."""
    parts = {"train": task.parts.train, "valid": task.parts.validation, "test": task.parts.test}
    for name, part in parts.items():
        np.savez(folder / f"{name}.npz", **columns(task, part, post))  # type: ignore[arg-type]
    size, length = task.parts.num_items, task.model_config.max_history
    item = {"source": "", "type": "categorical", "padding_idx": 0, "vocab_size": size}
    history = {**item, "type": "sequence", "share_embedding": "item", "max_len": length,
               "feature_encoder": None}  # fmt: skip
    about = {
        "dataset_id": "rows",
        "num_fields": 2,
        "total_features": size,
        "input_length": length + 1,
        "labels": ["label"],
        "features": [{"item": item}, {"history": history}],
    }
    (folder / "feature_map.json").write_text(json.dumps(about))
    return folder


def columns(task: TripTask, part: Targets, post: bool) -> dict[str, NDArray[Any]]:
    """Item (T), history (T, N) and label (T) of a part; 0 is padding on both sides."""
    clicks = task.clicks(part)
    history_TN, *_ = clicks.padded(np.arange(len(clicks)))
    if post:
        there = history_TN > 0
        history_TN = np.take_along_axis(history_TN, np.argsort(~there, axis=1, kind="stable"), 1)
    return {
        "item": clicks.vocabulary_I[part.items_T],
        "history": history_TN,
        "label": part.labels_T,
    }


def their_model(
    name: str, more: str, files: Path, task: TripTask, options: Any, seed: int
) -> Any:  # fmt: skip
    """One of theirs, started; its files are in `files`."""
    zoo = str(options.zoo / name / "src")
    if zoo not in sys.path:
        sys.path.insert(0, zoo)
    model_class = getattr(importlib.import_module(name), name)
    features = importlib.import_module("fuxictr.features")
    importlib.import_module("fuxictr.pytorch.torch_utils").seed_everything(seed)
    feature_map = features.FeatureMap("rows", str(files))
    D = task.model_config.hidden_size
    feature_map.load(str(files / "feature_map.json"), {"embedding_dim": D})
    field = name.lower()
    settings: dict[str, Any] = {
        "embedding_dim": D, "learning_rate": options.lr, "optimizer": "adam",
        "loss": "binary_crossentropy", "metrics": ["AUC"], "verbose": 0, "gpu": -1,
        "model_root": str(files), "early_stop_patience": options.epochs + 1,
        f"{field}_target_field": ["item"], f"{field}_sequence_field": ["history"],
    }  # fmt: skip
    if name == "DIEN":
        settings["dien_neg_seq_field"] = []
    if more != WIDE:
        settings["dnn_hidden_units"] = [2 * D]
        settings |= {
            "DIN": {"attention_hidden_units": [80, 40], "attention_hidden_activations": "Sigmoid"},
            "BST": {"seq_pooling_type": "concat", "dnn_hidden_units": [4 * D, 2 * D]},
            "DIEN": {},
        }[name]
    (files / "rows").mkdir(exist_ok=True)
    model = model_class(feature_map, **settings)
    if more == STARTED:
        table = model.embedding_layer.embedding_layers["item"].weight
        torch.nn.init.normal_(table.data[UNSEEN + 1 :], std=EMBEDDING_STD)
    return model


def theirs(
    name: str, more: str, files: Path, task: TripTask, options: Any, seed: int
) -> float:  # fmt: skip
    """AUC of the test part, by their model and loop."""
    began = time.monotonic()
    model = their_model(name, more, files, task, options, seed)
    loaders = importlib.import_module("fuxictr.pytorch.dataloaders")
    paths = {f"{part}_data": str(files / f"{part}.npz") for part in ("train", "valid", "test")}
    trains, validates, tests = loaders.RankDataLoader(
        model.feature_map, batch_size=options.batch_size, num_workers=0, **paths
    )
    model.fit(trains, validation_data=validates, epochs=options.epochs)
    found = auc(model.predict(tests), task.parts.test.labels_T)
    print(f"{name}, seed {seed}: {found:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
