"""What every benchmark writes: one JSON file with the machine, the versions and the raw figures."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from collectives.nccl import running_version, version_text


def machine(device: str) -> dict[str, Any]:
    """The device by name and number, and the processor."""
    if device == "cuda":
        name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    else:
        name, count = "cpu", 1
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {"device": name, "count": count, "cpu": cpu, "multicast": False}


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    describe = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--tags"],  # noqa: S607
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    nccl = ""
    if torch.cuda.is_available():
        nccl = version_text(running_version()).removeprefix("NCCL ")
    return {
        "torch": torch.__version__,
        "nccl": nccl,
        "springtide": describe.stdout.strip() or metadata.version("springtide"),
    }


def command(name: str, arguments: list[str]) -> str:
    """What to type to measure again; where the result went is left out.

    `name` is that of the benchmark, with a variant behind a hyphen.
    """
    kept = list(arguments)
    if "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    start = "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun, here or by somebody's launcher
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        start = f"python -m torch.distributed.run --standalone --nproc-per-node={ranks}"
    return f"{start} -m benchmarks.{name.partition('-')[0]} {shlex.join(kept)}".rstrip()


def write(
    path: Path,
    name: str,
    device: str,
    config: dict[str, Any],
    rows: list[Any],
    summary: dict[str, Any],
) -> None:
    """Write the result file: at every moment it is absent, old or whole."""
    result = {
        "name": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(name, sys.argv[1:]),
        "machine": machine(device),
        "versions": versions(),
        "config": config,
        "rows": rows,
        "summary": summary,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)
