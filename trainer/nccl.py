"""A newer NCCL beside the one that torch pins: `python -m trainer.nccl install`.

torch requires one NCCL wheel exactly, so no requirement can ask for another. This puts one into a folder
of this Python environment; ranks that our launcher starts load it before torch, and whoever is first
serves the whole process. Under another launcher, one of these does the same:

    export LD_PRELOAD=$(python -m trainer.nccl path)
    import trainer.nccl; trainer.nccl.load()        # before torch is imported

`SPRINGTIDE_NCCL` names another library, or, empty, none.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "2.32.3"
"""Tested."""
FOLDER = Path(sys.prefix) / "share" / "springtide" / "nccl"
CHOICE = "SPRINGTIDE_NCCL"


def library() -> Path | None:
    """The library to load, if one is installed or named. Raises `FileNotFoundError` for a wrong name."""
    named = os.environ.get(CHOICE)
    if named is None:
        file = FOLDER / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
        return file if file.is_file() else None
    if not named:
        return None
    if not Path(named).is_file():
        raise FileNotFoundError(f"{CHOICE}={named}: no such file; unset it, or name a libnccl.so.2")
    return Path(named)


def load() -> bool:
    """Load it into this process, if there is one and torch has not loaded its own; whether it did."""
    file = library()
    if file is None or "torch" in sys.modules:
        return False
    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return True


def install(version: str) -> int:
    """Put the wheel of this torch's CUDA into the folder; returns pip's exit code."""
    import torch

    if torch.version.cuda is None:
        print(f"torch {torch.__version__} has no CUDA: NCCL would serve nobody", file=sys.stderr)
        return 2
    wheel = f"nvidia-nccl-cu{torch.version.cuda.partition('.')[0]}=={version}"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target"]
    code = subprocess.call([*command, str(FOLDER), wheel])  # noqa: S603
    if code == 0:
        print(f"{wheel} is in {FOLDER}; ranks load it from now on")
    return code


def main(arguments: list[str]) -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.nccl",
        description="A newer NCCL beside the one that torch pins.",
    )
    parser.add_argument("what", choices=["install", "path", "remove"])
    parser.add_argument("--version", default=VERSION, help=f"to install (default {VERSION})")
    options = parser.parse_args(arguments)
    if options.what == "install":
        return install(options.version)
    if options.what == "remove":
        shutil.rmtree(FOLDER, ignore_errors=True)
        return 0
    file = library()
    if file is None:
        print("none is installed: python -m trainer.nccl install", file=sys.stderr)
        return 1
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
