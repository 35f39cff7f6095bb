"""What ran on a GPU during one step: kernels, with the multiprocessors they took, and copies."""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KEPT = 60
"""Kernels reported, those that took longest."""


def trace(step: Callable[[], Any], timeline: str | None = None) -> dict[str, Any]:
    """Milliseconds by kernel, summed and weighted by the share of the multiprocessors that its grid can
    take; bytes and milliseconds by kind of copy. `timeline`: a file to write everything to."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(timeline or f"{folder}/trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    processors = torch.cuda.get_device_properties().multi_processor_count
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    copies: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event.get("cat") == "kernel":
            grid = math.prod(event["args"].get("grid", [processors]))
            each = kernels[event["name"][:90]]
            each[0] += event["dur"] / 1000
            each[1] += event["dur"] / 1000 * min(grid, processors) / processors
        elif event.get("cat") == "gpu_memcpy":
            each = copies[event["name"]]
            each[0] += event["args"].get("bytes", 0)
            each[1] += event["dur"] / 1000
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:KEPT]
    return {"kernels": dict(longest), "copies": dict(copies)}
