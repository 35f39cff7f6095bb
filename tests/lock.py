"""Writes `requirements.lock`: the versions of `constraints.txt` with the SHA-256 of their files.

    python -m tests.lock

Asks pip, for Linux on x86-64 and each Python that we support, which file it would install. torch is left
out: which of its builds a machine needs is for the machine to say.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK, CONSTRAINTS = ROOT / "requirements.lock", ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
HEAD = """\
# The versions of constraints.txt with the SHA-256 of their files, for Linux on x86-64; but for torch.
# Written by `python -m tests.lock`, used by `make install-checked`.
"""
FREE = ("torch",)
SOURCES = ("antlr4-python3-runtime",)
"""What there are no wheels of."""


def pins(text):
    """`{name: version}` of lines `name==version`, whatever follows."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M))


def hashes_of(requirements, *options):
    """`{name: hash}` of what pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in requirements.items()))
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                "--no-deps", "--report", report, "--requirement", wanted, *options,
            ],
            check=True,
        )  # fmt: skip
        found = json.loads(report.read_text())["install"]
    return {
        canonical(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for each in found
    }


def canonical(name):
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main():
    """Entry point."""
    wanted = {n: v for n, v in pins(CONSTRAINTS.read_text()).items() if n not in FREE}
    wheels = {name: version for name, version in wanted.items() if name not in SOURCES}
    found = defaultdict(set)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    for python in PYTHONS:
        elsewhere = ["--target", "elsewhere", "--only-binary=:all:", "--python-version", python]
        for name, digest in hashes_of(wheels, *elsewhere, *platforms).items():
            found[name].add(digest)
    sources = {name: wanted[name] for name in SOURCES}
    for name, digest in hashes_of(sources).items():
        found[name].add(digest)
    lines = [
        f"{name}=={version} "
        + " ".join(f"--hash=sha256:{digest}" for digest in sorted(found[canonical(name)]))
        for name, version in wanted.items()
    ]
    LOCK.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
