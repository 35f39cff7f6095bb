"""What a run noted of its tensors (`trainer.watch.inside`), as panels: blocks by step."""

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from trainer.watch.page.figures import is_number
from trainer.watch.page.runs import Row, Run


def panels(run: Run) -> list[dict[str, Any]]:
    """Heat maps of gradients and activations; none where nothing was noted."""
    rows = run.of("statistics")
    found = [
        _heat("Gradient norm of blocks", [_norms(row, "gradients") for row in rows], rows),
        _heat("Weight norm of blocks", [_norms(row, "weights") for row in rows], rows),
        _heat("Activations of blocks, root mean square", [_of(row, "rms") for row in rows], rows),
        _heat("Activations of blocks, largest", [_of(row, "max") for row in rows], rows),
    ]
    return [panel for panel in found if panel["rows"]]


def _heat(title: str, values: Sequence[Mapping[str, float]], rows: Sequence[Row]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for one in values for name in one))
    return {
        "title": title,
        "kind": "heatmap",
        "about": "As powers of ten: -2 is 0.01. metrics.jsonl has each parameter.",
        "rows": names,
        "columns": [f"step {row['step']}" for row in rows],
        "values": [[_power(one.get(name)) for one in values] for name in names],
    }


def _power(value: float | None) -> float | None:
    return log10(value) if value else None


def _of(row: Row, figure: str) -> dict[str, float]:
    """One figure of every block's activations."""
    found = _named(row, "activations")
    return {name: one[figure] for name, one in found.items() if _positive(one.get(figure))}


def _norms(row: Row, part: str) -> dict[str, float]:
    """The norm of all parameters of each block; of those that are in none, of each."""
    blocks = sorted(_named(row, "activations"), key=len, reverse=True)
    squares: dict[str, float] = {}
    for name, one in _named(row, part).items():
        if _positive(one.get("norm")):
            inside = next((block for block in blocks if name.startswith(f"{block}.")), name)
            squares[inside] = squares.get(inside, 0.0) + one["norm"] ** 2
    return {name: square**0.5 for name, square in squares.items()}


def _named(row: Row, part: str) -> dict[str, Mapping[str, Any]]:
    found = row.get(part)
    if not isinstance(found, Mapping):
        return {}
    return {str(name): one for name, one in found.items() if isinstance(one, Mapping)}


def _positive(value: Any) -> bool:
    return is_number(value) and 0 < value < 1e150
