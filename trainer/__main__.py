"""`python -m trainer [+recipe=NAME] [key=value ...]`, also installed as `springtide`."""

import os
import sys
from contextlib import suppress

from trainer import nccl, stop
from trainer.startup import importing


def main() -> None:
    """Compose the configuration, start the ranks, exit with the documented code."""
    stop.install()  # before anything that takes time: a signal counts from the first moment
    nccl.load()  # this process may be a rank, and torch must not load its own first
    with importing():
        from trainer.cli import run

    code = run(sys.argv[1:])
    with suppress(OSError):  # whoever read the output may have gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads of libraries must not keep a finished run alive


if __name__ == "__main__":
    main()
