"""What repacking's exchange takes on the devices at hand, beside the usual Ulysses and the cost model.

    python -m benchmarks.repacking.exchange [--device cpu|cuda] [--quick] [--json FILE]

Three questions, on as many ranks as there are GPUs (or two on the CPU), each a row of the result:

    exchange   queries, keys, values to the ranks of their heads and outputs back, forward and backward:
               ours; three all-to-alls there and one back, of the same packed rows; the same of samples
               padded to the longest, as implementations do that keep a batch dimension
    packing    our packing kernels by themselves, as a share of a full layer with its experts
    model      all layers with single-rank children: time against the cost model's, and MFU. Passes
               only: no optimizer, no sharded weights

Half of the samples are short. Times are medians over all repetitions, of the slowest rank.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.repacking.layers import made
from benchmarks.repacking.usual import usual
from benchmarks.results import write
from models.causal_lm import next_token_loss
from models.hybrid.cost import training_flops
from models.hybrid.model import Hybrid, Layer, rotations
from models.hybrid.shape import FULL, Shape
from parallel.recompute import recompute
from parallel.repacking.calibration import Calibration, load
from parallel.repacking.config import RepackingConfig
from parallel.repacking.cost import CostModel
from parallel.repacking.exchange import Shards, head_map, to_heads, to_rows
from parallel.repacking.packing import pack, unpack
from parallel.repacking.plan import Child, Parent, Plan
from parallel.repacking.planner import Planner
from parallel.repacking.process_groups import make_groups
from parallel.repacking.ranks import PlannedRanks
from recipes.repacking import model_shape, planned_rows

# Legend: t rows of this rank, H query heads, K key/value heads, D head dim, P ranks.

SHAPES = {
    "cuda": Shape(vocab_size=65536),
    "cpu": Shape(hidden_size=64, intermediate_size=96, num_heads=8, num_kv_heads=2, head_dim=8,
                 block=16, num_experts=8, active_experts=2, expert_size=32),
}  # fmt: skip
"""On GPUs that of `model=hybrid2b`."""
ROWS = {"cuda": 32768, "cpu": 256}
"""Of a rank."""
SHORT = {"cuda": 1024, "cpu": 8}
REPEATS = 9


def lengths_of(rows: int, short: int, longs: int) -> list[int]:
    """Samples of one rank: `longs` long ones, as many short ones, `rows` tokens in all."""
    left = rows - longs * short
    parts = [left // longs + (i < left % longs) for i in range(longs)]
    return [n for pair in zip(parts, [short] * longs, strict=True) for n in pair]


class Bench:
    """Times of this rank and the slowest one."""

    def __init__(self, kind: str, quick: bool) -> None:
        self.kind, self.repeats = kind, 3 if quick else REPEATS
        self.device = torch.device(kind, dist.get_rank()) if kind == "cuda" else torch.device("cpu")
        self.dtype = torch.bfloat16 if kind == "cuda" else torch.float32

    def seconds(self, action: Callable[[], Any]) -> float:
        """Median of the slowest rank's times, after two runs that are not counted."""
        times = []
        for number in range(self.repeats + 2):
            self._wait()
            dist.barrier()
            begin = time.perf_counter()
            action()
            self._wait()
            took = torch.tensor(time.perf_counter() - begin, device=self.device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number > 1:
                times.append(took.item())
        return statistics.median(times)

    def _wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def randn(self, *shape: int) -> Tensor:
        """A random leaf that wants a gradient."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True)


def single_rank_children(lengths: Sequence[int], ranks: int) -> Plan:
    """All ranks as one parent; each is a child with samples of these lengths."""
    n = len(lengths)
    children = tuple(Child(r, 1, np.arange(r * n, (r + 1) * n)) for r in range(ranks))
    parents = (Parent(0, ranks, children),)
    return Plan(ranks, 1, np.arange(n * ranks), np.array(list(lengths) * ranks), parents)


def ours(bench: Bench, shape: Shape, shards: Shards) -> Callable[[], None]:
    """One all-to-all there, one back, and the same for gradients, whenever it is called."""
    t, H, K, D = shards.num_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim
    q, k, v = bench.randn(t, H, D), bench.randn(t, K, D), bench.randn(t, K, D)

    def run() -> None:
        heads = to_heads(q, k, v, shards)
        out = to_rows(heads[0], H, shards)
        torch.autograd.grad((out, *heads[1:]), (q, k, v), (out, *heads[1:]))

    return run


def exchanges(bench: Bench, shape: Shape, lengths: Sequence[int], shards: Shards) -> dict[str, Any]:
    """Seconds of the three ways, and how many times ours is faster."""
    P, longest = dist.get_world_size(), max(lengths)
    padded = -(-longest // P)
    seconds = {
        "ours": bench.seconds(ours(bench, shape, shards)),
        "separate": bench.seconds(usual(bench.randn, shape, 1, sum(lengths))),
        "padded": bench.seconds(usual(bench.randn, shape, P * len(lengths), padded)),
    }
    return {
        "what": "exchange", "seconds": seconds, "rows_a_rank": sum(lengths),
        "padded_rows_a_rank": P * len(lengths) * padded,
        "separate_over_ours": seconds["separate"] / seconds["ours"],
        "padded_over_ours": seconds["padded"] / seconds["ours"],
    }  # fmt: skip


def packing(bench: Bench, shape: Shape, shards: Shards, layer: float) -> dict[str, Any]:
    """All packing of a layer's two passes, and its share of `layer` seconds."""
    t, H, K, D = shards.num_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim
    heads = head_map(H, K, shards.layout.width)
    with torch.no_grad():
        q, k, v = bench.randn(t, H, D), bench.randn(t, K, D), bench.randn(t, K, D)
        there, back = pack([q, k, v], heads.qkv_blocks), pack([q], heads.q_blocks)

        def run() -> None:
            pack([q, k, v], heads.qkv_blocks)
            unpack(back, heads.q_blocks, t, D)
            pack([q], heads.q_blocks)
            unpack(there, heads.qkv_blocks, t, D)

        seconds = bench.seconds(run)
    return {"what": "packing", "seconds": seconds, "layer_seconds": layer, "share": seconds / layer}


def batch_of(plan: Plan, ranks: PlannedRanks, shape: Shape, device: torch.device) -> dict[str, Any]:
    """As `recipes.text.planned.planned_batch`, of random tokens."""
    parent, child = ranks.shards(plan)
    tokens = torch.randint(shape.vocab_size, (parent.num_rows,), device=device)
    host = {
        "positions_T": parent.layout.positions(parent.rank),
        "cu_seq_lens": parent.layout.offsets.astype(np.int32),
        "child_cu_seq_lens": child.layout.offsets.astype(np.int32),
    }
    tensors = {name: torch.from_numpy(value).to(device) for name, value in host.items()}
    return {"tokens_T": tokens, "labels_T": tokens, "plan": plan, **tensors}


def full_layer(bench: Bench, shape: Shape, batch: dict[str, Any], ranks: PlannedRanks) -> float:
    """Seconds of a full layer with experts, both passes."""
    with torch.device("meta"):
        layer = Layer(shape, FULL, experts=True)
    made(layer, bench.device, bench.dtype, shape.init_std)
    x = bench.randn(len(batch["tokens_T"]), shape.hidden_size)
    rows = planned_rows(batch, ranks)
    turns = rotations(rows.positions_T, shape.head_dim, shape.rope_theta, bench.dtype)

    def run() -> None:
        out, _ = layer(x, turns, rows)
        out.backward(out.detach())
        layer.zero_grad()

    return bench.seconds(run)


def whole_model(
    bench: Bench, shape: Shape, plan: Plan, ranks: PlannedRanks, calibration: Calibration
) -> dict[str, Any]:
    """Both passes of the model, measured, predicted, and as a share of the peak."""
    with torch.device("meta"):
        meta = Hybrid(shape)
    model: Any = made(meta, bench.device, bench.dtype, shape.init_std)
    for layer in model.model.layers:
        recompute(layer, "block" if ranks.recompute else "none")
    batch = batch_of(plan, ranks, shape, bench.device)

    def run() -> None:
        out = model(batch["tokens_T"], planned_rows(batch, ranks))
        next_token_loss(out.logits_TV, batch["labels_T"]).backward()
        model.zero_grad()

    seconds = bench.seconds(run)
    # The ranks are "nodes" of one only to have children of one: their links are those inside a node.
    near = replace(
        calibration, across_ratio=1.0, across_seconds=calibration.start_seconds(plan.num_ranks),
        all_to_all_rate={1: calibration.rate(plan.num_ranks)},
    )  # fmt: skip
    cost = CostModel(model_shape(shape, ranks), near, node_size=1)
    predicted = Planner(cost, plan.num_ranks, plan.num_ranks, RepackingConfig()).seconds(plan)
    flops = training_flops(shape, plan.lengths.tolist())
    return {
        "what": "model", "seconds": seconds, "predicted_seconds": predicted,
        "predicted_over_measured": predicted / seconds,
        "mfu": flops / seconds / plan.num_ranks / calibration.peak_flops,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_a_rank": int(plan.lengths.sum()) // plan.num_ranks,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank, in a process group."""
    kind = options.device
    torch.manual_seed(dist.get_rank())
    bench, shape, size = Bench(kind, options.quick), SHAPES[kind], dist.get_world_size()
    lengths = lengths_of(ROWS[kind], SHORT[kind], options.longs)
    plan = single_rank_children(lengths, size)
    ranks = PlannedRanks(
        size=size, rank=dist.get_rank(), node_size=1, max_parent=size,
        recompute=options.checkpointing, dtype_bytes=bench.dtype.itemsize, device_type=kind,
        groups=make_groups(size, kind),
    )  # fmt: skip
    parent, _ = ranks.shards(plan)
    rows = [exchanges(bench, shape, lengths, parent)]
    layer = full_layer(bench, shape, batch_of(plan, ranks, shape, bench.device), ranks)
    rows.append(packing(bench, shape, parent, layer))
    calibration = load(options.calibration or ("h200" if kind == "cuda" else "cpu"))
    rows.append(whole_model(bench, shape, plan, ranks, calibration))
    if dist.get_rank() == 0:
        report(options, rows, lengths, size)
    return rows


def report(
    options: argparse.Namespace, rows: list[dict[str, Any]], lengths: list[int], size: int
) -> None:
    """Print the figures, and write them where asked to."""
    exchange, packed, model = rows
    times = {name: f"{1e3 * value:.2f} ms" for name, value in exchange["seconds"].items()}
    print(f"{size} ranks, {sum(lengths):,} tokens each: {', '.join(map(str, lengths))}")
    print("exchange  " + ", ".join(f"{name} {value}" for name, value in times.items()))
    print(f"          padded / ours {exchange['padded_over_ours']:.2f}, "
          f"separate / ours {exchange['separate_over_ours']:.2f}")  # fmt: skip
    print(f"packing   {1e3 * packed['seconds']:.2f} ms, {100 * packed['share']:.1f} % of a full layer's "
          f"{1e3 * packed['layer_seconds']:.2f} ms")  # fmt: skip
    took, predicted = 1e3 * model["seconds"], 1e3 * model["predicted_seconds"]
    print(f"model     {took:.1f} ms, predicted {predicted:.1f} ({predicted / took:.2f} of it)")
    print(f"          MFU {100 * model['mfu']:.1f} %, passes only")
    if options.json is not None:
        config = {
            "lengths": lengths, "ranks": size, "checkpointing": options.checkpointing,
            "calibration": options.calibration, "repeats": 3 if options.quick else REPEATS,
        }  # fmt: skip
        summary = {
            "padded_over_ours": exchange["padded_over_ours"], "packing_share": packed["share"],
            "predicted_over_measured": model["predicted_over_measured"], "mfu": model["mfu"],
        }  # fmt: skip
        write(options.json, "repacking.exchange", options.device, config, rows, summary)


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    gpus = torch.cuda.device_count()
    parser.add_argument("--device", default="cuda" if gpus else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="three repetitions instead of nine")
    parser.add_argument("--longs", type=int, default=2, help="long samples of a rank (2)")
    parser.add_argument("--checkpointing", action="store_true", help="blocks are computed again")
    parser.add_argument("--calibration", help="of the cost model: a file, or h200 or cpu")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    if "RANK" in os.environ:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        measure(options)
        dist.destroy_process_group()
        return 0
    ranks = 1 << ((gpus if options.device == "cuda" else 2).bit_length() - 1)
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return subprocess.run([*start, "-m", "benchmarks.repacking.exchange", *sys.argv[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
