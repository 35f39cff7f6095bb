"""`python -m trainer.inspect_data [OPTIONS] [+recipe=NAME] [key=value ...]`: what the model will see.

It takes the same configuration as the trainer and starts no ranks. What it prints of a sample and of
the whole is up to the task (`recipes.abilities.Inspectable`); of a task that says nothing it shows the
batch of one sample.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from recipes.abilities import Inspectable, Locates
from recipes.task import DataError, Samples, Task
from trainer.compose import run_jobs
from trainer.config import build_config
from trainer.data import fingerprint, shuffled
from trainer.errors import CONFIG, DATA, DONE, ConfigError, RunError
from trainer.run import check_task, make_task


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` ask for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.inspect_data",
        description="Prints what the model sees of the data. All other words are the trainer's: "
        "+recipe=NAME, group=choice, key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("--first", type=int, metavar="N", help="the first N training samples (1)")
    parser.add_argument(
        "--sample", type=int, action="append", metavar="INDEX", help="this sample; may be repeated"
    )
    parser.add_argument("--held-out", action="store_true", help="of what evaluation uses")
    parser.add_argument(
        "--lines", type=int, default=40, metavar="N", help="lines of each sample (40); 0: all"
    )
    options, words = parser.parse_known_args(arguments)
    try:
        return run_jobs(words, lambda plain, *_: _inspect(plain, options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG


def _inspect(plain: dict[str, Any], options: argparse.Namespace) -> int:
    try:
        config = build_config(plain)
        task = make_task(config)
        check_task(task)
        samples = task.eval_samples() if options.held_out else task.train_samples()
        if samples is None:
            raise DataError("nothing is held out: set data.holdout above 0")
        for name, text in summary(task, samples).items():
            print(f"{name:17} " + text.replace("\n", "\n" + 18 * " "))
        print()
        for index, words in chosen(samples, options, config.trainer.seed):
            print(f"sample {index}{words}: ", end="")
            lines = show(task, samples, index)
            for number, line in enumerate(lines):
                if options.lines and number == options.lines:
                    print("  ... (--lines 0 prints all)")
                    break
                print(line)
            if isinstance(task, Locates) and not options.held_out:
                for origin in task.where(index):
                    print(f"  from {origin}")
            print()
    except (RunError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code if isinstance(error, RunError) else DATA
    return DONE


def summary(task: Task, samples: Samples) -> dict[str, str]:
    """Lines on all samples."""
    lines = {**task.describe(), "samples": f"{len(samples):,}", "fingerprint": fingerprint(samples)}
    return lines | (dict(task.survey()) if isinstance(task, Inspectable) else {})


def chosen(samples: Samples, options: argparse.Namespace, seed: int) -> Iterator[tuple[int, str]]:
    """The samples to show and, for training samples, when a run comes to them.

    Raises `ConfigError` for one that does not exist.
    """
    if options.sample is not None:
        for index in options.sample:
            if not 0 <= index < len(samples):
                raise ConfigError(f"--sample {index}: there are samples 0 to {len(samples) - 1}")
            yield index, ""
        return
    for number in range(min(1 if options.first is None else options.first, len(samples))):
        if options.held_out:
            yield number, ""
        else:
            yield shuffled(number, len(samples), f"{seed}/0"), f", number {number} of the run"


def show(task: Task, samples: Samples, index: int) -> Iterator[str]:
    """Lines on one sample."""
    if isinstance(task, Inspectable):
        yield from task.show(samples[index])
        return
    batch = task.collate([samples[index]])
    yield f"{task.count(batch):,} labels"
    for name, value in batch.items():
        if isinstance(value, Tensor):
            value = f"{value.dtype} {tuple(value.shape)} {value.flatten()[:8].tolist()}"
        yield f"  {name}: {value}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
