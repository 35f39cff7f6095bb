"""The parts of the page that are words and tables: state, figures at a glance, events, settings."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.watch.page.chart import written
from trainer.watch.page.figures import is_number, skips
from trainer.watch.page.panels import table
from trainer.watch.page.runs import Run

DONE, STOPPED = 0, 75


def state(run: Run) -> tuple[str, str]:
    """One word for how a run stands, and what it means; the word is a class of the page, too."""
    last = next((row for row in reversed(run.rows) if row["kind"] in ("start", "end")), {})
    if last.get("kind") != "end":
        return "open", "running when this page was written, or killed"
    if last.get("code") == DONE:
        return "done", f"after step {last['step']:,}"
    if last.get("code") == STOPPED:
        return "stopped", f"after step {last['step']:,}, by a signal"
    return "failed", f"after step {last['step']:,}: {last.get('why') or 'see the console'}"


def glance(run: Run) -> dict[str, str]:
    """The numbers that one looks for first."""
    train = run.of("train")
    if not train:
        return {}
    last = train[-1]
    start = run.of("start")[-1:] or [{}]
    steps = start[0].get("steps")
    found = {"step": f"{last['step']:,}" + (f" / {steps:,}" if isinstance(steps, int) else "")}
    for key, words, form in (
        ("loss", "loss", "number"),
        ("tokens", "tokens", "count"),
        ("tokens_per_second", "tokens/s", "count"),
        ("mfu", "MFU", "share"),
        ("memory_gib", "peak memory", "GiB"),
        ("goodput", "goodput", "share"),
    ):
        if is_number(last.get(key)):
            found[words] = written(last[key], form)
    for key, value in (run.of("eval") or [{}])[-1].items():
        if key not in ("kind", "step", "time") and is_number(value):
            found[f"eval {key}"] = written(value, "number")
    times = [row["time"] for row in run.rows if is_number(row.get("time"))]
    if times:
        begun = min(
            [*times, *(r["started"] for r in run.of("start") if is_number(r.get("started")))]
        )
        found["wall time"] = str(timedelta(seconds=round(max(times) - begun)))
    if last.get("skipped"):
        found["skipped steps"] = f"{last['skipped']:,}"
    return found


def subtitle(run: Run) -> str:
    """What ran on what."""
    starts = run.of("start")
    if not starts:
        return ""
    ranks, device = starts[-1].get("ranks", 1), starts[-1].get("device", "")
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(starts[0].get("started") or 0))
    return f"{ranks} x {device}, begun {begun}"


def summary(runs: Sequence[Run]) -> str:
    """Tiles for one run, a table for several."""
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in glance(runs[0]).items()
        )
        return (
            f'<dl class="tiles">{tiles}</dl>' if tiles else "<p>No step has been reported yet.</p>"
        )
    glances = [glance(run) for run in runs]
    names = list(dict.fromkeys(name for one in glances for name in one))
    rows = [
        [run.name, state(run)[0], *(one.get(name, "") for name in names)]
        for run, one in zip(runs, glances, strict=True)
    ]
    return table(["run", "state", *names], rows)


def events(runs: Sequence[Run]) -> list[list[Any]]:
    """When, in which run, at which step, what; the newest first."""
    found: list[tuple[float, list[Any]]] = []
    for run in runs:
        skipped, first = dict(skips(run)), run.of("start")[:1]
        for row in run.rows:
            words = _words(row, row in first)
            if row["kind"] == "train" and row["step"] in skipped:
                words = f"{skipped[row['step']]} steps skipped: loss or gradient not finite"
            if words:
                at = row["time"] if is_number(row.get("time")) else 0.0
                clock = time.strftime("%m-%d %H:%M:%S", time.localtime(at)) if at else ""
                found.append((at, [clock, run.name, row["step"], words]))
    return [line for _, line in sorted(found, key=lambda pair: -pair[0])]


def event_table(runs: Sequence[Run]) -> str:
    """The events; which run they are of, if there are several."""
    return _by_run(["time", "run", "step", "what"], events(runs), 1, runs)


def _by_run(columns: list[str], rows: list[list[Any]], at: int, runs: Sequence[Run]) -> str:
    """A table whose column `at` names the run, and is left out where there is only one."""
    if len(runs) > 1:
        return table(columns, rows)
    without = [[*row[:at], *row[at + 1 :]] for row in [columns, *rows]]
    return table(without[0], without[1:])


def _words(row: Mapping[str, Any], first: bool) -> str:
    """What a row says happened, or nothing."""
    if row["kind"] == "start":
        resumed = row.get("resumed")
        return "started" if first else f"started again, from {resumed or 'nothing'}"
    if row["kind"] == "end":
        why = {DONE: "done", STOPPED: "stopped by a signal"}.get(row.get("code", 1))
        return why or f"failed with exit code {row.get('code')}: {row.get('why') or ''}".rstrip(
            ": "
        )
    if row["kind"] == "save":
        return f"saved {row.get('name', '')}"
    if row["kind"] == "stall":
        ranks = row.get("ranks")
        return "stalled: " + "; ".join(map(str, ranks if isinstance(ranks, list) else []))
    if row["kind"] == "spike":
        return f"stands out: {_figure(row, 'loss')}, {_figure(row, 'grad_norm')}; {_whose(row)}"
    if row["kind"] == "eval":
        figures = [
            f"{key} {written(value, 'number')}"
            for key, value in row.items()
            if key not in ("kind", "step", "time") and is_number(value)
        ]
        return "evaluated: " + ", ".join(figures)
    return ""


def _figure(row: Mapping[str, Any], key: str) -> str:
    """`loss 9 instead of 2.5`."""
    value: Any = row.get(key)
    usual: Any = row.get(f"usual_{key}")
    words = written(value, "number") if is_number(value) else "not finite"
    return f"{key.replace('_', ' ')} {words}" + (
        f" instead of {written(usual, 'number')}" if is_number(usual) else ""
    )


def _whose(row: Mapping[str, Any]) -> str:
    """The rank whose samples had the highest loss, and the first of those with what they are made of."""
    samples, where = row.get("rank_samples"), row.get("where")
    named = samples[:4] if isinstance(samples, list) else []
    origins = where if isinstance(where, dict) else {}
    said = []
    for sample in map(str, named):
        of = origins.get(sample)
        said.append(sample + (f" ({', '.join(map(str, of))})" if isinstance(of, list) else ""))
    return f"highest on rank {row.get('rank')}, samples {', '.join(said)}"


def checkpoints(runs: Sequence[Run]) -> str:
    """What can be resumed from."""
    rows = [
        [run.name, one.name + " (latest)" * one.newest + " (best)" * one.best, f"{one.gib:.3g} GiB",
         time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written))]
        for run in runs
        for one in run.checkpoints
    ]  # fmt: skip
    return _by_run(["run", "checkpoint", "size", "written"], rows, 0, runs) if rows else ""


def differences(runs: Sequence[Run]) -> str:
    """The settings in which runs differ."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [
        [key, *(str(one.get(key, "")) for one in flat)]
        for key in keys
        if len({str(one.get(key, "")) for one in flat}) > 1
    ]
    if not rows:
        return "<p>All settings are the same.</p>"
    return table(["key", *(run.name for run in runs)], rows)


def _flat(text: str) -> dict[str, Any]:
    """`{"optim.lr": 0.001}` of a configuration; nothing if it cannot be read."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    try:
        plain = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, ValueError):
        return {}
    if isinstance(plain, dict):
        walk(plain, "")
    return found
