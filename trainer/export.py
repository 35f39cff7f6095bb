"""`python -m trainer.export RUN OUT`: the weights of a run as a folder that other programs load.

What is written is the task's business: for language models, safetensors, configuration and
tokenizer as transformers' `from_pretrained` wants them. The checkpoint is verified first; OUT
appears when everything is in it.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.abilities import Exports
from recipes.task import DataError
from trainer.checkpoint.folder import Checkpoints
from trainer.checkpoint.loader import check_same_model
from trainer.checkpoint.state import kept_of
from trainer.checkpoint.stored import StoredModel
from trainer.config import Config, build_config
from trainer.errors import DATA, DONE, CheckpointError, ConfigError, RunError
from trainer.plugins import tasks
from trainer.run import make_task
from trainer.verify import problem

BEST = "best"


def main() -> None:
    """Entry point."""
    sys.exit(export(sys.argv[1:]))


def export(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument(
        "--step", type=_step,
        help="which checkpoint: a step, or best (checkpoint.highest or checkpoint.lowest of the run); "
        "default: the newest",
    )  # fmt: skip
    try:
        early, _ = parser.parse_known_args(arguments)
        config = _read_config(early.run)
        kind: Any = tasks()[config.task.name]
        if not hasattr(kind, "export"):
            raise ConfigError(f"task {config.task.name} has nothing to export")
        if hasattr(kind, "add_export_arguments"):
            kind.add_export_arguments(parser)
        options = parser.parse_args(arguments)
        task: Any = make_task(config)
        _export(config, task, options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return DATA
    return DONE


def _read_config(run: Path) -> Config:
    """The configuration that a run kept."""
    try:
        plain = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{run} is not a run folder: config.yaml cannot be read") from error
    assert isinstance(plain, dict)
    return build_config({str(key): value for key, value in plain.items()})


def _step(text: str) -> int | str:
    if text != BEST and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor {BEST}")
    return text if text == BEST else int(text)


def _chosen(checkpoints: Checkpoints, options: argparse.Namespace) -> Path:
    """The checkpoint that the command line asks for. Raises `CheckpointError`."""
    if isinstance(options.step, int):
        return checkpoints.of_step(options.step)
    newest = checkpoints.newest()
    if newest is None:
        raise CheckpointError(f"{options.run} has no complete checkpoint yet")
    if options.step is None:
        return newest
    best = checkpoints.best()
    if best is None:
        raise CheckpointError(
            f"{options.run} has no best checkpoint, as far as {newest.name} knows: give --step a "
            "number, or train with checkpoint.highest or checkpoint.lowest"
        )
    return best


def _export(config: Config, task: Exports, options: argparse.Namespace) -> None:
    checkpoints = Checkpoints(options.run / "checkpoints")
    checkpoint = _chosen(checkpoints, options)
    if found := problem(checkpoint):
        raise CheckpointError(found)
    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: choose another")
    stored = StoredModel(checkpoint)
    model = task.build_model()
    check_same_model(checkpoint, stored.metadata, kept_of(model))
    temporary = out.with_name(f".exporting-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        try:
            report = task.export(model, stored.read, temporary, options)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}: choose another") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{checkpoint.name} of {options.run} is in {out}: {report}")


if __name__ == "__main__":
    main()
