"""What a device can do: the coefficients of the cost model, each with its source.

A file is JSON: the device, the date, and for each coefficient its value, its unit and where it is from:
`measured` (by `python -m benchmarks.repacking.calibrate` on this device), `derived` (from a measurement
or a publication that the note names) or `given` (an assumption).
"""

import json
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

SOURCES = ("measured", "derived", "given")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates are those of a training step: forward and backward together."""

    full_attention_flops: float
    """Operations per second of causal full attention on long samples."""
    full_attention_half_length: float
    """Tokens of a sample on which it has half that rate."""
    window_attention_flops: float
    topk_attention_flops: float
    topk_scores_flops: float
    """Of scoring and choosing blocks, forwards only."""
    dense_flops: float
    """Of projections, dense feed-forwards and the output layer."""
    moe_flops: float
    """Of experts, sorting tokens included."""
    layer_seconds: float
    """What a layer costs however few rows it has."""
    peak_flops: float
    """Of the device, for MFU."""
    all_to_all_rate: dict[int, float]
    """Bytes per second that each rank sends, by width, inside a node."""
    all_to_all_start: dict[int, float]
    """Seconds, by width, inside a node."""
    across_ratio: float
    """How many times lower the rate is over several nodes."""
    across_seconds: float
    """To start an all-to-all over several nodes."""

    def rate(self, width: int) -> float:
        """Bytes per second inside a node; of the nearest width where this one is not known."""
        return _nearest(self.all_to_all_rate, width)

    def start_seconds(self, width: int) -> float:
        """Seconds to start an all-to-all inside a node."""
        return _nearest(self.all_to_all_start, width)


def _nearest(table: dict[int, float], width: int) -> float:
    return table[
        min(table, key=lambda known: (abs(known.bit_length() - width.bit_length()), known))
    ]


def load(path: str | Path) -> Calibration:
    """Read a calibration file, or by its name one that comes with the package (`h200`, `cpu`).

    Raises `ValueError` for a file that lacks a coefficient, has an unknown one, or does not say where
    one is from.
    """
    text = read(path)
    try:
        entries: dict[str, Any] = json.loads(text)["coefficients"]
        found = {name: (entry["value"], entry["source"]) for name, entry in entries.items()}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no calibration file: {error!r}") from error
    known = {f.name for f in fields(Calibration)}
    if known ^ found.keys():
        raise ValueError(f"{path}: missing or unknown coefficients {sorted(known ^ found.keys())}")
    values: dict[str, Any] = {}
    for name, (value, source) in found.items():
        if source not in SOURCES:
            raise ValueError(f"{path}: the source of {name} is {source!r}, not one of {SOURCES}")
        is_table = isinstance(value, dict)
        values[name] = (
            {int(width): float(v) for width, v in value.items()} if is_table else float(value)
        )
        if any(not v >= 0 for v in (values[name].values() if is_table else [values[name]])):
            raise ValueError(f"{path}: {name}={value} is below 0")
    return Calibration(**values)


def read(path: str | Path) -> str:
    """The text of a calibration file, by path or by the name of one that comes with the package."""
    inside = files("parallel.repacking") / "calibrations" / f"{path}.json"
    if isinstance(path, str) and inside.is_file():
        return inside.read_text()
    if not Path(path).is_file():
        raise ValueError(
            f"there is no calibration {path}: give a file, or one of {', '.join(names())}"
        )
    return Path(path).read_text()


def names() -> list[str]:
    """Calibrations that come with the package."""
    folder = files("parallel.repacking") / "calibrations"
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )
