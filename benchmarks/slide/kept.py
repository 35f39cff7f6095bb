"""A study that was cut goes on: its result file so far, and beside it the weights of its teachers.

What comes after the searches is done again: it takes less time than its weights take to travel.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.slide.fleet import Trained
from benchmarks.slide.study import Study

KEPT = ("teachers", "searches")
"""Stages that are not done again."""


def folder_of(file: Path) -> Path:
    """Where the weights of the study of this result file are, while it is not whole."""
    return file.with_suffix(".weights")


def keep(study: Study, file: Path) -> None:
    """Write the weights that are not there yet, in the type that models compute in."""
    folder = folder_of(file)
    folder.mkdir(parents=True, exist_ok=True)
    for name, trained in study.trained.items():
        if not is_teacher(name, study):
            continue
        path = folder / f"{name}.safetensors"
        if not path.exists():
            save_file(dict(trained.model.state_dict()), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


def is_teacher(name: str, study: Study) -> bool:
    """Also those of folds."""
    return name in study.plan.teachers or name.startswith("fold")


def forget(file: Path) -> set[str]:
    """Remove the weights, for the study is whole or begins anew: no stage is done."""
    shutil.rmtree(folder_of(file), ignore_errors=True)
    return set()


def restore(study: Study, file: Path, config: Mapping[str, Any]) -> set[str]:
    """What the file has of a study with this configuration; the stages that are done."""
    found = json.loads(file.read_text())
    if found["config"] != json.loads(json.dumps(config)):
        print(f"{file} has another configuration: begun anew", flush=True)
        return forget(file)
    summary, folder = found["summary"], folder_of(file)
    teachers = {
        name: training for name, training in summary["trainings"].items() if is_teacher(name, study)
    }
    if not all((folder / f"{name}.safetensors").exists() for name in teachers):
        print(f"{folder} lacks weights: begun anew", flush=True)
        return forget(file)
    study.judging.about.update(summary["about"])
    known = {*teachers, "e"}
    study.judging.rows.extend(r for r in found["rows"] if r["row"].partition(":")[0] in known)
    study.seconds.update({k: v for k, v in summary["seconds"].items() if k in KEPT})
    for name, training in teachers.items():
        task = study.tasks.of(name)
        weights = load_file(folder / f"{name}.safetensors", device=str(study.device))
        model: Any = task.build_model().to_empty(device=study.device)
        model.load_state_dict(weights)
        model.to(study.dtype).eval()
        masters = {key: value.float() for key, value in weights.items()}
        study.add(name, task, Trained(model, masters, training["log"], training["best"]))
        study.trainings[name] = training
    if chosen := study.judging.about.get("ensemble"):
        study.judging.models["e"] = [study.judging.models[name][0] for name in chosen["models"]]
    return set(study.seconds)
