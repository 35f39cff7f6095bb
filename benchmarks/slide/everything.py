"""All jobs of SLIDE's comparisons, one at a time on each GPU, the most telling first, within a time.

    python -m benchmarks.slide.everything --sets FOLDER --seconds 430 --out runs/slide

FOLDER has packed sets (`benchmarks.slide prepare`). Jobs are processes of their own; a GPU gives
processes turns, so two studies at once on one would take as long as one after the other. A job that
needs what another one chooses waits for it; meanwhile its GPU takes the next job that does not. What is
whole is passed over, so another call goes on.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

PAUSE = 0.5
PACK = 30.0
"""Seconds between two archives."""
PART = 15 * 2**20
"""Bytes of a part of the archive."""
LIMIT = 50 * 2**20
"""Bytes of an archive: weights of studies that were cut are left out if they do not fit."""


@dataclass(frozen=True)
class Job:
    """Options of `benchmarks.slide`."""

    what: str
    name: str
    seed: int = 0
    plan: str = "full"
    needs: str = ""
    """What of the jobs before must be over."""

    @property
    def words(self) -> str:
        """In short."""
        return f"{self.what} {self.name} {self.seed} {self.plan}"

    def command(self, options: argparse.Namespace) -> list[str]:
        """What to run."""
        words = [self.what, "--set", str(options.sets / f"{self.name}.npz"), "--resume",
                 "--seed", str(self.seed), "--plan", options.plan or self.plan,
                 "--device", options.device, "--out", str(options.out)]  # fmt: skip
        if self.plan in ASIDE:
            words[-1] += f"/{self.plan}"
        return [sys.executable, "-m", "benchmarks.slide", *words, *options.eager]


CHOICE = "reinforcements"
JOBS = [
    Job("trials", "beauty", plan="full"),
    Job("students", "beauty", plan="first", needs="trials"),
    Job(CHOICE, "beauty", 0, "first", needs="students"),
    Job("study", "yelp", 0, "many", needs=CHOICE),
    Job("study", "movielens", 0, "long", needs=CHOICE),
    Job("study", "toys", 0, "first", needs=CHOICE),
    Job("study", "toys", 1, "lean", needs=CHOICE),
    Job("study", "beauty", 1, "lean", needs=CHOICE),
    Job("study", "toys", 2, "lean", needs=CHOICE),
    Job("study", "beauty", 2, "lean", needs=CHOICE),
    Job("latency", "beauty"),
    Job("study", "beauty", 0, "cross", needs="students"),
    Job("study", "beauty", 0, "levers", needs="students"),
    Job("study", "beauty_permuted", 0, "lean", needs=CHOICE),
]
ASIDE = ("levers", "cross")
"""Plans whose results are beside those of the comparison, not among them."""


@dataclass
class Running:
    """Jobs that wait, and the process of each device."""

    options: argparse.Namespace
    until: float
    waiting: list[Job]
    busy: dict[str, tuple[Job, "subprocess.Popen[bytes]", float]] = field(default_factory=dict)

    def all(self) -> None:
        """Until every job is over, or the time."""
        packed = time.monotonic()
        while self.waiting or self.busy:
            for device in self.options.gpus:
                if device in self.busy:
                    self.look_after(device)
                if device not in self.busy and (job := next(self.ready(), None)):
                    self.start(job, device)
            if time.monotonic() > self.until:
                self.stop()
            if time.monotonic() - packed > PACK:
                self.pack()
                packed = time.monotonic()
            time.sleep(PAUSE)
        self.pack()

    def ready(self) -> Iterator[Job]:
        """Those that need nothing of what waits or runs."""
        open_ = {job.what for job in self.waiting} | {job.what for job, *_ in self.busy.values()}
        yield from (job for job in self.waiting if job.needs not in open_)

    def start(self, job: Job, device: str) -> None:
        """On this device, which the process knows as its only one."""
        self.waiting.remove(job)
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": device} if device else None
        with (self.options.out / f"log{device}.txt").open("ab") as log:
            child = subprocess.Popen(
                job.command(self.options), stdout=log, stderr=subprocess.STDOUT, env=env
            )
        self.busy[device] = (job, child, time.monotonic())

    def look_after(self, device: str) -> None:
        """Say so if its job is over."""
        job, child, began = self.busy[device]
        if child.poll() is not None:
            del self.busy[device]
            took = time.monotonic() - began
            print(f"{job.words}: exit {child.returncode}, {took:.0f} s", flush=True)
            self.pack()

    def stop(self) -> None:
        """No job goes on, and none begins."""
        self.waiting.clear()
        for _, child, _ in self.busy.values():
            child.kill()
            child.wait()

    def pack(self) -> None:
        """All results so far, in parts that `cat` joins."""
        if self.options.archive is None:
            return
        beside = self.options.archive.with_suffix(".tmp")
        with tarfile.open(beside, "w:gz", compresslevel=4) as archive:
            for file in kept(self.options.out):
                with suppress(FileNotFoundError):  # a study that ends removes its weights meanwhile
                    archive.add(file, "results" / file.relative_to(self.options.out))
        for old in self.options.archive.parent.glob(f"{self.options.archive.name}.*"):
            old.unlink()
        with beside.open("rb") as file:
            for number, part in enumerate(iter(lambda: file.read(PART), b"")):
                self.options.archive.with_name(f"{self.options.archive.name}.{number}").write_bytes(
                    part
                )
        beside.unlink()


def kept(folder: Path, limit: int = LIMIT) -> list[Path]:
    """All files but weights; then the weights of whole studies, while they fit."""
    sizes: dict[Path, int] = {}
    for file in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            if file.is_file():
                sizes[file] = file.stat().st_size
    weights = [file for file in sizes if file.parent.suffix == ".weights"]
    found = [file for file in sizes if file not in weights]
    left = limit - sum(sizes[file] for file in found)
    for parent in sorted({file.parent for file in weights}):
        own = [file for file in weights if file.parent == parent]
        size = sum(sizes[file] for file in own)
        if size <= left:
            found += own
            left -= size
    return found


def main() -> None:
    """Parse, and run the jobs."""
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
    parser.add_argument("--jobs", type=int, nargs="*", help="numbers of jobs, in this order; all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_const", const=["--eager"], default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.gpus = [""]
    if options.device == "cuda" and torch.cuda.device_count() > 1:
        options.gpus = [str(n) for n in range(torch.cuda.device_count())]
    chosen = JOBS if options.jobs is None else [JOBS[number] for number in options.jobs]
    present = [job for job in chosen if (options.sets / f"{job.name}.npz").exists()]
    Running(options, time.monotonic() + options.seconds, present).all()


if __name__ == "__main__":
    main()
