"""How many operators a step and a decision are made of.

Small models leave a GPU waiting for the next operator, so their number decides what a step costs, and it
is the same on every machine. It is counted in a profile (`trainer.profile`) of a short run on a CPU.
"""

import gzip
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

OURS = ("aten::", "fsdp::", "c10d::")
VIEWS = frozenset((
    "alias", "as_strided", "contiguous", "detach", "dropout", "empty", "empty_like",
    "empty_strided", "expand", "expand_as", "flatten", "item", "lift_fresh", "narrow", "new_empty",
    "numpy_T", "permute", "reshape", "resolve_conj", "resolve_neg", "result_type", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unsqueeze",
    "view", "view_as", "_local_scalar_dense", "_reshape_alias", "_unsafe_view"
))  # fmt: skip
"""What computes nothing (dropout: of share 0)."""
TOGETHER = ("aten::_foreach", "aten::_fused", "aten::split_with_sizes_copy", "aten::_chunk_cat")
"""One operator on a GPU; on a CPU, there are others inside."""


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a profile of one rank."""
    with gzip.open(file) as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


def moments(events: Sequence[dict[str, Any]]) -> list[float]:
    """When each operator that computes something, and has none such inside, began."""
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        name = event["name"]
        views = name.partition("::")[2] in VIEWS
        if event.get("cat") == "cpu_op" and name.startswith(OURS) and not views:
            threads.setdefault(event["tid"], []).append(event)
    found = []
    for of in threads.values():
        of.sort(key=lambda event: (event["ts"], -event["dur"]))
        around: list[tuple[float, bool]] = []
        for event, following in zip(of, [*of[1:], None], strict=True):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while around and around[-1][0] <= begin:
                around.pop()
            inside = bool(around) and around[-1][1]
            together = event["name"].startswith(TOGETHER)
            leaf = together or following is None or following["ts"] >= end
            if leaf and not inside:
                found.append(begin)
            around.append((end, inside or together))
    return found


def count(events: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Operators of a step (median), and the most that there are between two steps."""
    began = moments(events)
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("step ")
    )
    inside = [sum(begin <= at < end for at in began) for begin, end in steps]
    between = [sum(end <= at < begin for at in began) for (_, end), (begin, _) in pairwise(steps)]
    return statistics.median(inside), max(between, default=0)
