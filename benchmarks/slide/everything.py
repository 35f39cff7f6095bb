"""All jobs of SLIDE's comparisons, several at a time, the most telling first, within a time limit.

    python -m benchmarks.slide.everything --sets FOLDER --seconds 430 --out runs/slide

FOLDER has packed sets (`benchmarks.slide prepare`). Jobs are processes of their own on the same device,
but for latency, which is measured alone. What is whole is passed over, so another call goes on.
"""

import argparse
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

PAUSE = 0.5
PART = 15 * 2**20
"""Bytes of a part of the archive."""


@dataclass(frozen=True)
class Job:
    """Options of `benchmarks.slide`."""

    what: str
    name: str
    seed: int = 0
    plan: str = "full"

    def command(self, options: argparse.Namespace) -> list[str]:
        """What to run."""
        words = [self.what, "--set", str(options.sets / f"{self.name}.npz"), "--resume",
                 "--seed", str(self.seed), "--plan", options.plan or self.plan,
                 "--device", options.device, "--out", str(options.out)]  # fmt: skip
        if self.plan in ASIDE:
            words[-1] += f"/{self.plan}"
        return [sys.executable, "-m", "benchmarks.slide", *words, *options.eager]


JOBS: list[list[Job]] = [
    [Job("trials", "beauty", plan="full")],
    [Job("students", "beauty", plan="first")],
    [Job("study", "beauty", 0, "first")],
    [Job("study", "toys", 0, "first")],
    [Job("study", "yelp", 0, "many")],
    [Job("study", "movielens", 0, "long")],
    [Job("study", "beauty", 1, "lean")],
    [Job("study", "toys", 1, "lean")],
    [Job("study", "beauty", 2, "lean")],
    [Job("study", "toys", 2, "lean")],
    [Job("latency", "beauty")],
    [Job("study", "beauty_permuted", 0, "lean")],
    [Job("study", "beauty", 0, "cross")],
    [Job("study", "beauty", 0, "levers")],
]
"""Those of a group run at once. A GPU gives processes turns, so two studies together take as long as one
after the other."""
ASIDE = ("levers", "cross")
"""Plans whose results are beside those of the comparison, not among them."""


@dataclass
class Running:
    """Processes, and their logs."""

    options: argparse.Namespace
    until: float
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def group(self, jobs: list[Job]) -> None:
        """Start these, and wait for all of them or the limit."""
        began = time.monotonic()
        for job in jobs:
            log = (self.options.out / "log.txt").open("ab")
            self.children.append(
                subprocess.Popen(job.command(self.options), stdout=log, stderr=subprocess.STDOUT)
            )
        packed = 0.0
        while any(child.poll() is None for child in self.children):
            if time.monotonic() > self.until:
                for child in self.children:
                    if child.poll() is None:
                        child.kill()
                        child.wait()
            if time.monotonic() - packed > 30:
                self.pack()
                packed = time.monotonic()
            time.sleep(PAUSE)
        codes = [child.returncode for child in self.children]
        self.children.clear()
        self.pack()
        names = ", ".join(f"{job.what} {job.name} {job.seed} {job.plan}" for job in jobs)
        print(f"{names}: exit {codes}, {time.monotonic() - began:.0f} s", flush=True)

    def pack(self) -> None:
        """All results so far, in parts that `cat` joins."""
        if self.options.archive is None:
            return
        beside = self.options.archive.with_suffix(".tmp")
        with tarfile.open(beside, "w:gz", compresslevel=4) as archive:
            for file in sorted(self.options.out.rglob("*")):
                with suppress(FileNotFoundError):  # a study that ends removes its weights meanwhile
                    if file.is_file():
                        archive.add(file, "results" / file.relative_to(self.options.out))
        for old in self.options.archive.parent.glob(f"{self.options.archive.name}.*"):
            old.unlink()
        with beside.open("rb") as file:
            for number, part in enumerate(iter(lambda: file.read(PART), b"")):
                self.options.archive.with_name(f"{self.options.archive.name}.{number}").write_bytes(
                    part
                )
        beside.unlink()


def main() -> None:
    """Parse, and run the groups in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sets", type=Path, required=True, help="a folder of packed sets")
    parser.add_argument("--seconds", type=float, default=430.0, help="for all jobs together")
    parser.add_argument("--out", type=Path, default=Path("runs/slide-study"))
    parser.add_argument(
        "--archive",
        type=Path,
        help="a .tar.gz of everything, kept up to date, in parts .0, .1, ...",
    )
    parser.add_argument("--plan", help="for all studies, such as tiny")
    parser.add_argument("--groups", type=int, nargs="*", help="numbers of groups of jobs; all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_const", const=["--eager"], default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    running = Running(options, time.monotonic() + options.seconds)
    for number, jobs in enumerate(JOBS):
        wanted = options.groups is None or number in options.groups
        present = [job for job in jobs if (options.sets / f"{job.name}.npz").exists()]
        if wanted and present and time.monotonic() < running.until:
            running.group(present)


if __name__ == "__main__":
    main()
