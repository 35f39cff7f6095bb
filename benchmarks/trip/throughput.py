"""Time and memory of TRIP against a transformer over items of the same depth, in one run.

    python -m benchmarks.trip.throughput [--device cpu|cuda] [--length N ...] [--json FILE]

TRIP has one layer over items and three over summaries of groups; the transformer has four over items,
with the fastest attention there is for it: fused, causal, without a mask (all histories are full here).
Both compute in 16 bits, weights included; on a GPU both sides' whole steps are CUDA graphs, with
`--compile` of compiled code. A training step is loss, gradients and AdamW. Models take turns, and a
figure is the median over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.results import write
from models.trip import layers
from models.trip.attention import Score, Visibility
from models.trip.config import TripConfig
from models.trip.history import UNSEEN
from models.trip.model import Trip, init_weights
from models.trip.reconstruction import Urn
from parallel.weights import materialize
from recipes.trip import INPUTS, TripTask, TripTaskConfig

ITEMS = 30_000
GROUPS = 6
BATCH = {50: 2048, 200: 1024, 1000: 256}
"""Histories a step, by their length; others: as many items as at 200."""
NONE: dict[str, Any] = {"summaries": 0, "rank": "none", "time": "none", "reconstruction": 0.0}
TRIP: dict[str, Any] = {"token_layers": 1, "upper_layers": 3, "read": "apart",
                        "keys": ["items", "tokens", "summaries"]}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "transformer, 4 layers, fused causal": {"token_layers": 4, "mask": "causal", **NONE},
    "TRIP, 1 + 3 layers": {**TRIP, "reconstruction": 0.0},
    "TRIP, 1 + 3 layers, reconstruction": TRIP,
    "TRIP, 1 + 3 layers, a quarter reconstructed": {**TRIP, "reconstruction_rows": 0.25},
    "TRIP, 1 + 3 layers, one look at all": {**TRIP, "read": "together", "reconstruction": 0.0},
}
BASE = "transformer, 4 layers, fused causal"


def fused_causal(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility, score: Score | None = None
) -> Tensor:
    """Causal attention of full histories, which needs no mask."""
    assert score is None
    assert sees.order_BN.shape[1] == q_BHNE.shape[2]
    return nn.functional.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE, is_causal=True)


def main() -> None:
    """Measure and print; write the JSON after every length."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, action="append", help="of histories; several")
    parser.add_argument(
        "--model", action="append", choices=list(MODELS)[1:], help="beside the transformer; several"
    )
    parser.add_argument("--batch-size", type=int, help="instead of that of the length")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument(
        "--compile", action="store_true", help="both sides, before they are graphed"
    )
    parser.add_argument("--profile", action="store_true", help="kernels of a step in the JSON, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    for N in options.length or sorted(BATCH):
        B = options.batch_size or BATCH.get(N, 1024 * 200 // N)
        rows += measure(N, B, device, options)
        for row in (row for row in rows if row["length"] == N):
            print(
                f"{row['length']:5} x {row['batch']}  {row['model']:44} "
                + "  ".join(
                    f"{k} {row[k]:.3g}" for k in ("train_ms", "infer_ms", "train_GiB", "infer_GiB")
                ),
                flush=True,
            )
        if options.json:
            config = {"hidden_size": 64, "heads": 2, "items": ITEMS, "groups": GROUPS,
                      "compiled": options.compile, "graphed": device.type == "cuda"}  # fmt: skip
            write(options.json, "trip.throughput", options.device, config, rows, summary(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times the transformer's time and memory are those of the others, by length."""
    base = {row["length"]: row for row in rows if row["model"] == BASE}
    return {
        f"{row['model']}, {row['length']}": {
            key: base[row["length"]][key] / row[key] if row[key] else None
            for key in ("train_ms", "infer_ms", "train_GiB", "infer_GiB")
        }
        for row in rows
        if row["model"] != BASE
    }


def measure(
    N: int, B: int, device: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each model."""
    batch, found = made_up(N, B, device), {}
    for name in [BASE, *(options.model or list(MODELS)[1:])]:
        changes = MODELS[name]
        config = TripConfig(max_history=N, groups=GROUPS, **changes)
        with fastest(config):
            found[name] = Subject(config, batch, device, options.compile)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        # alternate who is first, so that a machine that warms up favours none
        for name in list(found)[:: 1 if number % 2 else -1]:
            for kind in ("train", "infer"):
                with fastest(found[name].config):
                    ms = timed(getattr(found[name], kind), options.steps, device)
                times.setdefault((name, kind), []).append(ms)
    profiles: dict[str, dict[str, Any]] = {name: {} for name in found}
    for name, subject in found.items() if options.profile else ():
        with fastest(subject.config):
            for kind, step in (("train", subject._train), ("infer", subject._infer)):
                profiles[name][kind] = kernels(step, device)
    return [
        {
            "length": N,
            "batch": B,
            "model": name,
            "train_ms": statistics.median(times[name, "train"]),
            "infer_ms": statistics.median(times[name, "infer"]),
            "train_GiB": subject.peaks.get("train", 0.0),
            "infer_GiB": subject.peaks.get("infer", 0.0),
            "rounds": {kind: times[name, kind] for kind in ("train", "infer")},
            "kernels": profiles[name],
        }
        for name, subject in found.items()
    ]


def kernels(step: Callable[[], None], device: torch.device, most: int = 25) -> list[list[Any]]:
    """Where a step's time goes, the largest first: kernel, milliseconds, calls.

    On a CPU operators instead, so that the same code is tried there.
    """
    with torch.profiler.profile() as profile:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    time_of = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = [
        [of.key[:120], getattr(of, time_of) / 1000, of.count]
        for of in profile.key_averages()
        if of.device_type.name == device.type.upper()
    ]
    return sorted(rows, key=lambda row: -float(row[1]))[:most]


@contextmanager
def fastest(config: TripConfig) -> Iterator[None]:
    """The fused causal kernel instead of a mask that says the same."""
    if config.mask == "causal":
        with patch.object(layers, "attend", fused_causal):
            yield
    else:
        yield


class Subject:
    """A model with its steps, on a GPU as CUDA graphs, and the memory that each takes at most."""

    def __init__(
        self, config: TripConfig, batch: dict[str, Any], device: torch.device, compiled: bool
    ) -> None:
        self.config, self.batch = config, batch
        self.task = TripTask(task=TripTaskConfig(), model=config, data=None, seed=0)  # type: ignore[arg-type]
        every = torch.arange(UNSEEN + 1, ITEMS, device=device)
        self.task.urn = Urn.of(torch.cat([batch["items_BN"].flatten(), every]))
        with torch.device("meta"):
            self.model = Trip(config, ITEMS, 0, GROUPS)
        materialize(self.model, device, init_weights, seed=0)
        self.model.to(torch.bfloat16)
        self.call: Any = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda"
        )
        self.peaks: dict[str, float] = {}
        self.train, self.infer = self._train, self._infer
        if device.type == "cuda":
            self.train = self._graphed("train", self._train)
            self.infer = self._graphed("infer", self._infer)
            # graphs need no code any more; of one function only so many versions are compiled
            torch.compiler.reset()

    def _train(self) -> None:
        self.model.train()
        loss = self.task.loss(self.call, self.batch) / self.batch["count"]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def _infer(self) -> None:
        self.model.eval()
        self.call(*(self.batch[name] for name in INPUTS))

    def _graphed(self, name: str, step: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            self.peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def timed(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Milliseconds of one step."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def made_up(N: int, B: int, device: torch.device) -> dict[str, Any]:
    """Full histories of random items, in groups of equally many."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    buckets_BN = draw(0, 112, B, N).sort(dim=1, descending=True).values
    groups_N = GROUPS - 1 - torch.arange(N) * GROUPS // N
    whole = {
        "items_BN": draw(UNSEEN + 1, ITEMS, B, N),
        "behaviours_BN": torch.zeros(B, N, dtype=torch.long),
        "ages_BN": 2 ** (buckets_BN // 4),
        "buckets_BN": buckets_BN,
        "groups_BN": groups_N.repeat(B, 1),
        "targets_B": draw(UNSEEN + 1, ITEMS, B),
        "labels_B": draw(0, 2, B).float(),
    }
    return {**{name: x.to(device) for name, x in whole.items()}, "count": B}


if __name__ == "__main__":
    main()
