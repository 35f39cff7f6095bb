"""`python -m trainer.verify RUN`: are the checkpoints of a run what was written?

Reads every file of every checkpoint (or of the one given) and compares size and SHA-256 with the
manifest; the metadata must be readable, too. Exits with 0 if all are sound, else with 4.
"""

import argparse
import sys
from pathlib import Path

from trainer.checkpoint import manifest
from trainer.checkpoint.folder import Checkpoints, read_progress
from trainer.checkpoint.reader import read_metadata
from trainer.errors import CHECKPOINT, DONE, CheckpointError


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m trainer.verify", description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder, or the folder of one checkpoint")
    sys.exit(verify(parser.parse_args().run))


def verify(run: Path) -> int:
    """Check, print a line for each checkpoint, and return the exit code."""
    checkpoints = Checkpoints(run / "checkpoints")
    paths = checkpoints.complete() or [run]
    unfinished = sorted(p.name for p in checkpoints.path.glob(".saving-*"))
    problems = {path: problem(path) for path in paths}
    newest, best = checkpoints.newest(), _best(checkpoints)
    for path, found in problems.items():
        marks = "  (latest)" * (path == newest) + "  (best)" * (path == best)
        print(f"{path.name}  {found or f'sound, {_content(path)}'}{marks}")
    for name in unfinished:
        print(f"{name}  was not finished; it is never read, and the next save removes it")
    return CHECKPOINT if any(problems.values()) else DONE


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        read_progress(checkpoint)
        read_metadata(checkpoint)
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"{checkpoint}: {error}"
    files = manifest.read_manifest(checkpoint)
    return manifest.damaged(checkpoint, files, files)


def _best(checkpoints: Checkpoints) -> Path | None:
    try:
        return checkpoints.best()
    except CheckpointError:  # of the newest, which has a line of its own
        return None


def _content(checkpoint: Path) -> str:
    files = manifest.read_manifest(checkpoint)
    size = sum(entry["size"] for entry in files.values())
    return f"{len(files)} files, {size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    main()
