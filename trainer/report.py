"""`python -m trainer.report RUN... [--out FILE]`: the page about a run, or about several together.

Every run writes its own `report.html`; this writes it again (after a kill, say), or lays runs over each
other. Exit code 2 if a folder is not one of a run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.watch.page import write_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and say where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.report", description="One page about a run, or several together."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="the page; by default report.html in the run folder, or here if there are several",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    target = given.out or (given.runs[0] if len(given.runs) == 1 else Path()) / "report.html"
    try:
        write_page(given.runs, target)
    except ValueError as error:
        print(f"error: {error}: give the folder of a run, such as runs/NAME", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {target} ({error.strerror}): set --out", file=sys.stderr)
        return 2
    print(f"{target}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
