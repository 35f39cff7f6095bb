"""Measures the coefficients of repacking's cost model on the device at hand, and writes a calibration
file.

    python -m benchmarks.repacking.calibrate [--device cpu|cuda] [--quick] [--out FILE] [--base NAME]
                                                [--model hybrid2b]
    torchrun --nproc-per-node=8 -m benchmarks.repacking.calibrate --device cuda    # all-to-alls, too

Measured are a model's own modules (`benchmarks.repacking.layers`), of the sizes that the constants or
a model of `configs` have: rates depend on sizes, so a calibration is good for models of about its own.

What cannot be measured here keeps the value and the source of the base file: links between nodes where
there is one node, the peak, all-to-alls where there is one rank. Wider all-to-alls than can be measured
are taken to be as fast as the widest that was. Every time is the median of several, of
forward and backward together, in bf16 on GPUs and fp32 on the CPU.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from benchmarks.repacking.layers import row_by_row, shape_of, sparse_attention, train
from benchmarks.repacking.workloads import CONSTANTS, read_constants
from benchmarks.results import machine, versions
from models.hybrid.attention import Rule, attend
from models.hybrid.config import HybridConfig
from models.hybrid.documents import Documents
from models.hybrid.shape import FULL, Shape
from parallel.repacking.calibration import load, read
from parallel.repacking.ranks import PlannedRanks
from parallel.repacking.shape import ModelShape
from recipes.repacking import model_shape

# Legend: L tokens, H query heads, K key/value heads, D head dim.

ATTENTION_LENGTHS = {"cuda": (256, 1024, 4096, 16384, 65536), "cpu": (64, 256, 1024, 2048)}
"""Of samples; the longest is also how many tokens are attended to in one call."""
SPARSE_LENGTH = {"cuda": 32768, "cpu": 2048}
ROWS = {"cuda": 16384, "cpu": 256}
HEADS = {"cuda": 8, "cpu": 2}
"""Heads of the attention that is timed: what a rank of a group of eight has of 64, and fewer on a
CPU."""
SMALLER = {"cuda": 1, "cpu": 8}
"""How much smaller the measured model is than the described one."""
A2A_BYTES = {
    "cuda": tuple(1 << p for p in range(18, 29, 2)), "cpu": tuple(1 << p for p in range(16, 25, 2)),
}  # fmt: skip
REPEATS = 7


class Bench:
    """Times on one device, and every measurement that was made."""

    def __init__(self, device: torch.device, quick: bool):
        self.device, self.kind = device, device.type
        self.repeats = 3 if quick else REPEATS
        self.dtype = torch.bfloat16 if self.kind == "cuda" else torch.float32
        self.rows: list[dict[str, Any]] = []

    def seconds(self, what: str, action: Callable[[], Any], **about: Any) -> float:
        """The median time of `action`, after two runs that are not counted."""
        times = []
        for number in range(self.repeats + 2):
            self._wait()
            begin = time.perf_counter()
            action()
            self._wait()
            if number > 1:
                times.append(time.perf_counter() - begin)
        found = statistics.median(times)
        self.rows.append({"what": what, **about, "seconds": found, "times": times})
        return found

    def _wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def randn(self, *shape: int) -> Tensor:
        """A random leaf that wants a gradient."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True)


def full_attention(bench: Bench, shape: Shape, H: int) -> dict[str, float]:
    """The rate on long samples, and the length of half that rate: a line through seconds an
    operation.

    Samples are packed, as in training: one call attends to as many short ones as there are tokens in
    the longest.
    """
    tokens, rule = max(ATTENTION_LENGTHS[bench.kind]), Rule(FULL, shape.head_dim**-0.5)
    per_flop, inverse = [], []
    K, D = max(H * shape.num_kv_heads // shape.num_heads, 1), shape.head_dim
    q, k, v = bench.randn(tokens, H, D), bench.randn(tokens, K, D), bench.randn(tokens, K, D)
    for L in ATTENTION_LENGTHS[bench.kind]:
        lengths = [L] * (tokens // L)
        action = train(partial(attend, q, k, v, Documents.of(lengths, bench.device), rule), q, k, v)
        seconds = bench.seconds("full attention", action, length=L, heads=H, samples=len(lengths))
        per_flop.append(seconds / (3 * 4 * H * D * len(lengths) * L * (L + 1) / 2))
        inverse.append(1 / L)
    # seconds a flop = a + b / L, each length weighted by how well it is known relative to its size.
    weight = 1 / np.array(per_flop)
    matrix = np.stack([np.ones(len(inverse)), inverse], 1) * weight[:, None]
    (a, b), *_ = np.linalg.lstsq(matrix, np.ones(len(inverse)), rcond=None)
    best = min(per_flop)
    a = a if a > 0.2 * best else best
    return {"full_attention_flops": 1 / a, "full_attention_half_length": max(b / a, 0.0)}


def all_to_alls(bench: Bench) -> dict[str, dict[int, float]]:
    """Start and rate of all-to-alls of equal blocks, by width: a line through time by bytes sent."""
    found: dict[str, dict[int, float]] = {"all_to_all_rate": {}, "all_to_all_start": {}}
    if not dist.is_initialized():
        return found
    width, inside = 2, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    while width <= min(inside, dist.get_world_size()):
        group = dist.new_group(list(range(width)))
        if dist.get_rank() < width:
            times, sent = [], []
            for nbytes in A2A_BYTES[bench.kind]:
                source = torch.zeros(nbytes // 4 // width * width, device=bench.device)
                target = torch.empty_like(source)
                seconds = bench.seconds(
                    "all-to-all",
                    partial(dist.all_to_all_single, target, source, group=group),
                    width=width, nbytes=source.nbytes,
                )  # fmt: skip
                times.append(seconds)
                sent.append(source.nbytes * (width - 1) / width)
            weight = 1 / np.array(times)
            matrix = np.stack([np.ones(len(sent)), sent], 1) * weight[:, None]
            (start, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(sent)), rcond=None)
            found["all_to_all_rate"][width] = 1 / max(slope, times[-1] / sent[-1] / 4)
            found["all_to_all_start"][width] = max(start, 0.0)
        dist.barrier()
        width *= 2
    return found


UNITS = {
    "full_attention_half_length": "tokens", "layer_seconds": "s", "all_to_all_rate": "byte/s",
    "all_to_all_start": "s", "across_ratio": "", "across_seconds": "s",
}  # fmt: skip
"""Of coefficients that are not operations per second."""


def main() -> None:
    """Measure what can be measured, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="three repetitions instead of seven")
    parser.add_argument("--out", type=Path, help="where to write; printed if not given")
    parser.add_argument("--base", default="h200", help="where unmeasured coefficients are from")
    parser.add_argument("--constants", type=Path, default=CONSTANTS, help="for the model's shape")
    parser.add_argument(
        "--model", help="instead: the shape of configs/model/MODEL.yaml, as hybrid2b"
    )
    options = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    bench = Bench(device, options.quick)
    measured: dict[str, Any] = {}
    if local == 0:  # the others wait, so that they do not disturb
        shape, described = shapes(options)
        heads = min(HEADS[bench.kind], shape.num_heads)
        measured |= full_attention(bench, shape, heads)
        measured |= sparse_attention(bench, shape, heads, SPARSE_LENGTH[bench.kind])
        measured |= row_by_row(bench, shape, described, ROWS[bench.kind])
    if dist.is_initialized():
        dist.barrier()
    tables = all_to_alls(bench)
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = json.dumps(document(measured, tables, options, bench), indent=1) + "\n"
        if options.out:
            options.out.write_text(text)
            load(options.out)  # refuses what cannot be read back
        else:
            print(text)
    if dist.is_initialized():
        dist.destroy_process_group()


def shapes(options: argparse.Namespace) -> tuple[Shape, ModelShape]:
    """The model that is measured, and what the cost model is told about it."""
    if options.model:
        file = Path(__file__).parents[2] / "configs" / "model" / f"{options.model}.yaml"
        config = HybridConfig(**yaml.safe_load(file.read_text()))
        shape = config.shape({}, config.vocab_size or 257)
        return shape, model_shape(shape, PlannedRanks(size=1))
    described = ModelShape(**read_constants(options.constants)["shape"])
    shape = shape_of(described, SMALLER[options.device])
    return shape, model_shape(shape, PlannedRanks(size=1))


def document(
    measured: dict[str, Any], tables: dict[str, dict[int, float]], options: Any, bench: Bench
) -> dict[str, Any]:
    """The calibration file: measured coefficients, the base's others, and all measurements."""
    entries: dict[str, Any] = json.loads(read(options.base))["coefficients"]
    for name, value in measured.items():
        entries[name] = {
            "value": float(f"{value:.4g}"), "unit": UNITS.get(name, "FLOP/s"), "source": "measured",
        }  # fmt: skip
    for name, table in tables.items():
        if table:
            known = {str(width): float(f"{value:.4g}") for width, value in table.items()}
            entries[name] = {"value": known, "unit": UNITS[name], "source": "measured"}
    if options.device == "cpu":
        best = max(measured["dense_flops"], measured["full_attention_flops"])
        entries["peak_flops"] = {
            "value": float(f"{best:.4g}"), "unit": "FLOP/s", "source": "derived",
            "note": "the highest rate measured: a CPU's peak is not known here",
        }  # fmt: skip
    where = machine(options.device)
    return {
        "device": where["device"] if options.device == "cuda" else where["cpu"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.repacking.calibrate"
        + (f" --model {options.model}" if options.model else ""),
        "base": options.base,
        "machine": where,
        "versions": versions(),
        "coefficients": entries,
        "measurements": bench.rows,
    }


if __name__ == "__main__":
    main()
