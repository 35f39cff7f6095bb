"""FuxiCTR's side of the comparison: files for its loop, its models as we set them, and what they reach.

T targets, N items of a history
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.trip.training import EVAL_BATCH, Batches
from models.trip.encodings import EMBEDDING_STD
from models.trip.history import UNSEEN
from recipes.ctr.metrics import auc
from recipes.ctr.targets import Targets
from recipes.task import Batch
from recipes.trip import TripTask

STARTED, WIDE = ", its item table started as ours", ", its default layers"
"""What a row of theirs may have that is not as usual."""


@torch.no_grad()
def begin_alike(theirs: Any, own: Any) -> None:
    """Copy the numbers of our DIN into theirs; the last layers read the target first there."""
    head, rows_VD = own.head, own.items.rows_VD
    D = rows_VD.shape[1]
    attention, last = theirs.attention_layers[0].attention_layer.mlp, theirs.dnn.mlp
    theirs.embedding_layer.embedding_layers["item"].weight.copy_(rows_VD)
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
