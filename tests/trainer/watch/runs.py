"""Run folders as a run would leave them, for tests of the report."""

import json

HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
"""What nobody should call anything."""

PANELS = [
    {"title": "Recall", "kind": "lines", "about": HOSTILE, "x": "latency",
     "series": {"beam": [[1, 0.5], [2, 0.6]], HOSTILE: [[0.5, 0.4], [3, None], [4, 0.7]]}},
    {"title": "Layers", "kind": "heatmap", "rows": ["a", HOSTILE], "columns": ["x", "y"],
     "values": [[1.0, 2.0], [None, 4.0]]},
    {"title": "Buckets", "kind": "table", "columns": ["name", "AUC"],
     "rows": [["morning", 0.7], [HOSTILE, 123456]]},
    {"title": HOSTILE, "kind": "text", "text": HOSTILE},
    {"title": "Of tomorrow", "kind": "hologram", "data": HOSTILE},
]  # fmt: skip


def train(step, **changes):
    """A row as `trainer.watch.watch` writes it."""
    return {
        "kind": "train", "step": step, "loss": 3.0 - step / 100, "grad_norm": 1.0, "lr": 1e-3,
        "tokens": 1000 * step, "tokens_per_second": 5000.0, "tokens_per_second_per_device": 2500.0,
        "mfu": 0.4, "step_seconds": 0.2, "loss_max": 3.1, "data_seconds": 0.01,
        "forward_seconds": 0.06, "backward_seconds": 0.1, "communication_seconds": 0.02,
        "optimizer_seconds": 0.005, "saving_seconds": 0.0, "evaluation_seconds": 0.0,
        "imbalance": 1.1, "memory_gib": 0.6, "memory_allocated_gib": None, "alloc_retries": 0,
        "ooms": 0, "skipped": 0, "goodput": 0.9, "seconds": 0.2 * step, "time": 1e9 + step,
    } | changes  # fmt: skip


def start(step, **changes):
    """The row that begins a run, or the rest of it."""
    return {
        "kind": "start", "step": step, "started": 1e9 + step - 1, "ranks": 2, "device": "CPU",
        "steps": 100, "skipped": 0, "resumed": None, "time": 1e9 + step,
    } | changes  # fmt: skip


SPIKE = {
    "kind": "spike", "step": 7, "loss": 9.0, "usual_loss": 2.5, "grad_norm": None,
    "usual_grad_norm": 1.0, "samples": [3, 4, 5], "rank": 1, "rank_loss": None, "rank_samples": [4, 5],
    "where": {"4": ["tokens 0-7 of document 1 of a.jsonl:2"]}, "time": 1e9 + 10,
}  # fmt: skip
STALL = {
    "kind": "stall", "step": 8, "seconds": 30.0, "usual_seconds": 0.2, "time": 1e9 + 10,
    "ranks": ["rank 0: communication", "rank 1: silent"],
}  # fmt: skip
STATISTICS = {
    "kind": "statistics", "step": 10, "time": 1e9 + 10,
    "gradients": {"layers.1.a": {"norm": 3.0, "max": 1.0, "broken": 0},
                  "layers.1.b": {"norm": 4.0, "max": 1.0, "broken": 0},
                  "scale": {"norm": 0.0, "max": 0.0, "broken": 0}},
    "weights": {"layers.1.a": {"norm": 0.1, "max": 1.0, "broken": 0}},
    "activations": {"layers.1": {"rms": 100.0, "max": 1000.0, "broken": 0.0}},
}  # fmt: skip
"""Rows that not every run has."""

ROWS = [
    start(0), train(10), {"kind": "eval", "step": 10, "loss": 2.95, "time": 1e9 + 10},
    {"kind": "save", "step": 10, "name": "step-00000010", "time": 1e9 + 11}, train(20, skipped=2),
    {"kind": "end", "step": 20, "code": 1, "why": HOSTILE, "time": 1e9 + 21},
    start(20, resumed="step-00000020", time=1e9 + 60, skipped=2), train(30, skipped=2, loss=None),
    {"kind": "end", "step": 30, "code": 0, "why": None, "time": 1e9 + 90},
]  # fmt: skip


def make_run(folder, rows=tuple(ROWS), panels=tuple(PANELS), config="optim:\n  lr: 0.001\n"):
    """A run folder with these rows."""
    folder.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.yaml").write_text(f"recipe: '{HOSTILE.replace(chr(39), '')}'\n{config}")
    (folder / "panels.json").write_text(json.dumps(panels))
    checkpoint = folder / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "latest").write_text("step-00000010")
    return folder
