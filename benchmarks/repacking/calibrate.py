"""Measures the coefficients of repacking's cost model on the device at hand, and writes a calibration
file.

    python -m benchmarks.repacking.calibrate [--device cpu|cuda] [--quick] [--out FILE] [--base NAME]
    torchrun --nproc-per-node=8 -m benchmarks.repacking.calibrate --device cuda    # all-to-alls, too

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
from torch import Tensor
from torch.nn import functional as F

from benchmarks.repacking.workloads import CONSTANTS, read_constants
from benchmarks.results import machine, versions
from models.attention import documents_attention
from parallel.repacking.calibration import load, read
from parallel.repacking.shape import ModelShape
from parallel.sequence import Documents

# Legend: L tokens, H heads, D head dim, M hidden, B tokens of a block, k blocks that a query sees.

ATTENTION_LENGTHS = {"cuda": (256, 1024, 4096, 16384, 65536), "cpu": (64, 256, 1024, 2048)}
"""Of samples; the longest is also how many tokens are attended to in one call."""
SPARSE_LENGTH = {"cuda": 32768, "cpu": 2048}
ROWS = {"cuda": 16384, "cpu": 256}
HEADS = {"cuda": 8, "cpu": 2}
"""Heads of the attention that is timed: what a rank of a group of eight has of 64, and fewer on a
CPU."""
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


def train(output: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Forward and backward, with gradients of all inputs."""

    def step() -> None:
        out = output()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def full_attention(bench: Bench, D: int) -> dict[str, float]:
    """The rate on long samples, and the length of half that rate: a line through seconds an
    operation.

    Samples are packed, as in training: one call attends to as many short ones as there are tokens in
    the longest.
    """
    H, tokens = HEADS[bench.kind], max(ATTENTION_LENGTHS[bench.kind])
    per_flop, inverse = [], []
    q, k, v = (bench.randn(tokens, H, D) for _ in range(3))
    for L in ATTENTION_LENGTHS[bench.kind]:
        lengths = [L] * (tokens // L)
        cu_seq_lens = torch.arange(0, tokens + 1, L, dtype=torch.int32, device=bench.device)
        samples = Documents(cu_seq_lens, lengths)
        attend = train(partial(documents_attention, q, k, v, samples, samples), q, k, v)
        seconds = bench.seconds("full attention", attend, length=L, heads=H, samples=len(lengths))
        per_flop.append(seconds / (3 * 4 * H * D * len(lengths) * L * (L + 1) / 2))
        inverse.append(1 / L)
    # seconds a flop = a + b / L, each length weighted by how well it is known relative to its size.
    weight = 1 / np.array(per_flop)
    matrix = np.stack([np.ones(len(inverse)), inverse], 1) * weight[:, None]
    (a, b), *_ = np.linalg.lstsq(matrix, np.ones(len(inverse)), rcond=None)
    best = min(per_flop)
    a = a if a > 0.2 * best else best
    return {"full_attention_flops": 1 / a, "full_attention_half_length": max(b / a, 0.0)}


def sparse_attention(bench: Bench, shape: ModelShape) -> dict[str, float]:
    """A sliding window, blocks chosen by score, and the scores."""
    H, D, L, B = HEADS[bench.kind], shape.head_dim, SPARSE_LENGTH[bench.kind], shape.block
    q, k, v = (bench.randn(1, H, L, D) for _ in range(3))
    rates = {}
    for kind, span in (("window", shape.window), ("topk", shape.block * shape.top_k)):
        pairs = span * (span + 1) / 2 + (L - span) * span
        attend = (
            _flex(bench, q, k, v, kind, span)
            if bench.kind == "cuda"
            else _blocks(q, k, v, kind, span, B)
        )
        seconds = bench.seconds(
            f"{kind} attention", train(attend, q, k, v), length=L, heads=H, span=span
        )
        rates[f"{kind}_attention_flops"] = 3 * 4 * H * D * pairs / seconds

    def choose() -> Tensor:
        with torch.no_grad():
            means = k.view(1, H, L // B, B, D).mean(3)
            return (q @ means.transpose(-1, -2)).topk(min(shape.top_k, L // B), dim=-1).indices

    seconds = bench.seconds("scores of blocks", choose, length=L, heads=H)
    rates["topk_scores_flops"] = 2 * H * D * L * (L + 1) / 2 / B / seconds
    return rates


def _flex(
    bench: Bench, q: Tensor, k: Tensor, v: Tensor, kind: str, span: int
) -> Callable[[], Tensor]:
    """Flex attention over a mask of blocks: a band, or for each block of queries some earlier blocks."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    L, size = q.shape[2], 128
    if kind == "window":
        mask = create_block_mask(
            lambda b, h, at, to: (at >= to) & (at - to < span),
            None,
            None,
            L,
            L,
            device=str(q.device),
        )
    else:
        # Each block of queries sees itself, causally, and random earlier blocks, as many as fill the
        # span.
        blocks, generator = L // size, torch.Generator().manual_seed(0)
        own = torch.zeros(blocks, blocks, dtype=torch.int32)
        own[:, 0] = torch.arange(blocks)
        others = torch.zeros(blocks, blocks, dtype=torch.int32)
        counts = torch.arange(blocks).clamp(max=span // size - 1).to(torch.int32)
        for block, count in enumerate(counts.tolist()):
            picked = torch.randperm(block, generator=generator)[:count]
            others[block, :count] = picked.sort().values.int()
        mask = BlockMask.from_kv_blocks(
            torch.ones_like(counts).to(q.device)[None, None], own.to(q.device)[None, None],
            counts.to(q.device)[None, None], others.to(q.device)[None, None],
            BLOCK_SIZE=size, mask_mod=lambda b, h, at, to: at >= to,
        )  # fmt: skip
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask)


def _blocks(q: Tensor, k: Tensor, v: Tensor, kind: str, span: int, B: int) -> Callable[[], Tensor]:
    """The same by plain attention, block by block of queries, each over the keys that it sees."""
    L = q.shape[2]
    seen = []
    generator = torch.Generator().manual_seed(0)
    for block in range(L // B):
        if kind == "window":
            first = max((block * B - span) // B, 0)
            picked = torch.arange(first, block + 1)
        else:
            others = torch.randperm(block, generator=generator)[: span // B - 1]
            picked = torch.cat([others, torch.tensor([block])]).sort().values
        seen.append((picked[:, None] * B + torch.arange(B)).flatten())

    def attend() -> Tensor:
        out = []
        for block, rows in enumerate(seen):
            at = torch.arange(block * B, (block + 1) * B)[:, None]
            mask = (at >= rows) & (at - rows < span) if kind == "window" else at >= rows
            out.append(
                F.scaled_dot_product_attention(
                    q[:, :, block * B : (block + 1) * B],
                    k[:, :, rows],
                    v[:, :, rows],
                    attn_mask=mask,
                )
            )
        return torch.cat(out, 2)

    return attend


def row_by_row(bench: Bench, shape: ModelShape) -> dict[str, float]:
    """Products of a projection and of experts, and what a layer costs with next to no rows."""
    rows, M, inner = ROWS[bench.kind], shape.hidden, shape.expert_hidden
    if bench.kind == "cpu":
        M, inner = M // 8, inner // 8
    x, w = bench.randn(rows, M), bench.randn(M, M)
    seconds = bench.seconds("dense product", train(lambda: x @ w, x, w), rows=rows)
    dense = 3 * 2 * rows * M * M / seconds
    experts, chosen = (64, 8) if bench.kind == "cuda" else (8, 2)
    up, down = (bench.randn(experts, M, 2 * inner), bench.randn(experts, inner, M))

    def moe(x: Tensor, picked: Tensor) -> Tensor:
        order = picked.flatten().argsort(stable=True)
        counts = torch.bincount(picked.flatten(), minlength=experts)
        inside = x[order // chosen]
        if bench.kind == "cuda" and hasattr(F, "grouped_mm"):
            ends = counts.cumsum(0).to(torch.int32)
            gate, value = F.grouped_mm(inside, up, offs=ends).chunk(2, -1)
            outside = F.grouped_mm(F.silu(gate) * value, down, offs=ends)
        else:
            parts = []
            for expert, part in enumerate(inside.split(counts.tolist())):
                gate, value = (part @ up[expert]).chunk(2, -1)
                parts.append((F.silu(gate) * value) @ down[expert])
            outside = torch.cat(parts)
        return torch.zeros_like(x).index_add(0, order // chosen, outside)

    picked = torch.stack([torch.randperm(experts)[:chosen] for _ in range(rows)]).to(bench.device)
    seconds = bench.seconds(
        "mixture of experts", train(lambda: moe(x, picked), x, up, down),
        rows=rows, experts=experts, chosen=chosen, hidden=inner,
    )  # fmt: skip
    flops = 3 * 6 * rows * chosen * M * inner
    return {"dense_flops": dense, "moe_flops": flops / seconds, "layer_seconds": launches(bench)}


def launches(bench: Bench) -> float:
    """Seconds of a layer with next to no rows and weights: projections, attention, two experts,
    norms."""
    n, M = 16, 128
    x, w = bench.randn(n, M), [bench.randn(M, M) for _ in range(8)]

    def layer() -> Tensor:
        q, k, v = ((F.rms_norm(x, (M,)) @ w[i]).view(1, 1, n, M) for i in range(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0] @ w[3]
        inside = F.rms_norm(x + attended, (M,))
        order = inside[:, 0].argsort(stable=True)
        parts = inside[order].split(n // 2)
        outside = [F.silu(part @ w[4 + 2 * e]) @ w[5 + 2 * e] for e, part in enumerate(parts)]
        return torch.zeros_like(x).index_add(0, order, torch.cat(outside)) + x

    return bench.seconds("layer of 16 rows", train(layer, x, *w), rows=n, hidden=M)


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
    options = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    shape = ModelShape(**read_constants(options.constants)["shape"])
    bench = Bench(device, options.quick)
    measured: dict[str, Any] = {}
    if local == 0:  # the others wait, so that they do not disturb
        measured |= full_attention(bench, shape.head_dim)
        measured |= sparse_attention(bench, shape)
        measured |= row_by_row(bench, shape)
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
        "command": "python -m benchmarks.repacking.calibrate",
        "base": options.base,
        "machine": where,
        "versions": versions(),
        "coefficients": entries,
        "measurements": bench.rows,
    }


if __name__ == "__main__":
    main()
