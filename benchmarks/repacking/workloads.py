"""Lengths of the samples of each step, by distribution, and the frozen constants around them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.repacking.calibration import load
from parallel.repacking.config import RepackingConfig
from parallel.repacking.cost import CostModel, Memory
from parallel.repacking.layout import Ints
from parallel.repacking.planner import Planner
from parallel.repacking.shape import ModelShape

CONSTANTS = Path(__file__).parent / "constants.json"

WIKIPEDIA = (
    (59, 256, 41.65), (256, 512, 21.04), (512, 1024, 16.12), (1024, 2048, 10.84), (2048, 4096, 5.96),
    (4096, 8192, 2.80), (8192, 16384, 1.122), (16384, 32768, 0.347), (32768, 65536, 0.103),
    (65536, 131072, 0.0228), (131072, 1823777, 0.0049),
)  # fmt: skip
"""Lengths from, up to, and percent of the samples: one million lengths of Wikipedia that FlexSP
publishes (Wang et al. 2024, arXiv 2412.01523). Inside a bin lengths are log-uniform, in the last one a
Pareto tail with the list's index of 1.87; the first bin begins where its mean is the list's."""
TAIL_INDEX = 1.87

Draw = Callable[[np.random.Generator, int], Ints]


def wikipedia(rng: np.random.Generator, n: int) -> Ints:
    """Lengths like those of Wikipedia's articles in tokens."""
    low, high, percent = (np.array(column, np.float64) for column in zip(*WIKIPEDIA, strict=True))
    bins = rng.choice(len(low), n, p=percent / percent.sum())
    u = rng.random(n)
    length = low[bins] * (high[bins] / low[bins]) ** u
    tail = bins == len(low) - 1
    length[tail] = _pareto(u[tail], low[-1], high[-1], TAIL_INDEX)
    return _whole(length)


def lognormal(median: float, sigma: float, longest: int) -> Draw:
    """Log-normal lengths, cut off at `longest`."""
    return lambda rng, n: _whole(np.minimum(median * np.exp(sigma * rng.normal(size=n)), longest))


def pareto(shortest: float, index: float, longest: int) -> Draw:
    """A heavy tail between two lengths."""
    return lambda rng, n: _whole(_pareto(rng.random(n), shortest, longest, index))


def uniform(shortest: int, longest: int) -> Draw:
    """All lengths between two, equally often."""
    return lambda rng, n: rng.integers(shortest, longest + 1, n)


def _pareto(u: NDArray[np.float64], low: float, high: float, index: float) -> NDArray[np.float64]:
    return low * (1 - u * (1 - (low / high) ** index)) ** (-1 / index)


def _whole(length: NDArray[np.float64]) -> Ints:
    return np.maximum(length, 1).astype(np.int64)


def read_constants(path: Path = CONSTANTS) -> dict[str, Any]:
    """The frozen constants."""
    constants: dict[str, Any] = json.loads(path.read_text())
    return constants


def draw_of(name: str, constants: dict[str, Any]) -> Draw:
    """The distribution of a workload of the constants."""
    settings = {k: v for k, v in constants["workloads"][name].items() if k != "samples"}
    makers: dict[str, Callable[..., Draw]] = {
        "wikipedia": lambda: wikipedia, "lognormal": lognormal, "pareto": pareto, "uniform": uniform,
    }  # fmt: skip
    return makers[name](**settings)


def steps_of(name: str, constants: dict[str, Any], steps: int) -> Iterator[Ints]:
    """The lengths of each step of a workload; step k is the same however many are drawn."""
    draw, samples = draw_of(name, constants), constants["workloads"][name]["samples"]
    for step in range(steps):
        yield draw(np.random.default_rng([constants["seed"], step]), samples)


def steps_of_file(path: Path, samples: int, steps: int, seed: int) -> Iterator[Ints]:
    """Steps drawn from a user's lengths: a file with one whole number on each line."""
    try:
        lengths = np.array([int(line) for line in path.read_text().split()], np.int64)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"{path}: {error}; a file of lengths has one whole number on each line"
        ) from None
    if not len(lengths) or lengths.min() < 1:
        raise SystemExit(f"{path} has no lengths, or some below 1")
    for step in range(steps):
        yield np.random.default_rng([seed, step]).choice(lengths, samples)


def cost_model(constants: dict[str, Any], **changes: Any) -> CostModel:
    """The cost model of the constants.

    `changes`: overlap, across_ratio, calibration, or of the shape.
    """
    calibration = load(changes.pop("calibration", constants["calibration"]))
    if "across_ratio" in changes:
        calibration = replace(calibration, across_ratio=float(changes.pop("across_ratio")))
    overlap = float(changes.pop("overlap", constants["overlap"]))
    shape = ModelShape(**{**constants["shape"], **changes})
    memory = Memory(**constants["memory"])
    return CostModel(
        shape, calibration, node_size=constants["node_size"], overlap=overlap,
        fixed=constants["fixed_seconds"], memory=memory,
    )  # fmt: skip


def planner_of(constants: dict[str, Any], cost: CostModel, **config: Any) -> Planner:
    """A planner for the cluster of the constants."""
    settings = {"rows_per_rank": constants["rows_per_rank"], **config}
    return Planner(cost, constants["ranks"], constants["max_parent"], RepackingConfig(**settings))


def rounded(value: Any) -> Any:
    """Rows of a result file with seven digits of each number."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
