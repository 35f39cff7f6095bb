"""Tables of docs/lelora.md from what was measured: `python -m benchmarks.lelora.page`.

python -m benchmarks.lelora.page                 benchmarks/results/lelora-*.json into docs/lelora.md
python -m benchmarks.lelora.page FILE...         prints the tables of these results
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lelora.methods import METHODS
from benchmarks.lelora.verdict import (
    LIKELIHOOD,
    Measure,
    against,
    interval,
    measure_of,
    sentence,
    values,
    within,
    word,
)
from recipes.ctr.significance import Values, difference

ROOT = Path(__file__).parent.parent.parent
PAGE, RESULTS = ROOT / "docs" / "lelora.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured -->", "<!-- end of what was measured -->"
TITLES = {"wordnet": "WordNet glosses", "newsgroups": "20 newsgroups", "reuters": "Reuters-52",
          "kjv": "Modern to King James verse"}  # fmt: skip
PAIRS = (
    *((policy, other) for policy in ("learned", "online") for other in ("frozen", "random", "lora")),
    ("online", "learned"), ("frozen", "lora"),
)  # fmt: skip
HALVES = ("frozen-half", "learned-half")


def by_task(result: Mapping[str, Any]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Runs by task and method, in the order of `METHODS`."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    order = {method: n for n, method in enumerate(METHODS)}
    for row in sorted(result["rows"], key=lambda row: order[row["method"]]):
        found.setdefault(row["task"], {})[row["method"]] = row["runs"]
    return {task: found[task] for task in TITLES if task in found}


def comparison(result: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: a table for each task, and what may be said."""
    config, machine = result["config"], result["machine"]
    plan = config["plan"]
    lines = [
        f"{config['seeds']} paired seeds, {plan['steps']} steps of {plan['batch_size']} texts, rank "
        f"{config['rank']}, on {machine['device']} (torch {result['versions']['torch']}, "
        f"{config['dtype'].removeprefix('torch.')} products, `{result['versions']['springtide']}`). "
        f"{_scale(result)}, with 95 % "
        "intervals over texts and seeds, and words after Holm's correction over a task's methods. "
        "Milliseconds are a run's share of a step of all its seeds side by side. Means, differences and "
        "words are over all seeds, those that collapsed (ended worse than they began) included.",
        "",
    ]
    lines += [_checked(check) for check in result["summary"]["checks"]] + [""]
    for task, runs in by_task(result).items():
        found = {method: values(of) for method, of in runs.items()}
        lines += [*_table(task, runs, found, result["summary"]["tasks"][task]), ""]
        measure = measure_of(next(iter(runs.values()))[0])
        summary = result["summary"]["tasks"][task]
        said = [*_said(found, measure), *policies(runs, summary)]
        lines += [f"- {line}" for line in said] + [""]
    return lines


def _scale(result: Mapping[str, Any]) -> str:
    """What is measured, and in which units."""
    if any("nats" in run for row in result["rows"] for run in row["runs"]):
        return (
            "Nats a token of the test part's King James verses, in books that nobody trained on; "
            "differences from tuned LoRA in thousandths of a nat (more is better; texts are whole "
            "chapters)"
        )
    return "Accuracy on the test part in per cent; differences from tuned LoRA in points"


def _table(
    task: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], found: Mapping[str, Values],
    summary: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    compared = against(found, "lora") if "lora" in found else {}
    first = next(iter(runs.values()))[0]
    measure = measure_of(first)
    likelihood = measure is LIKELIHOOD
    clock = summary.get("clock", {})
    there = (
        f"{len(first['nats'])} chapters, {sum(first['targets']):,} tokens"
        if likelihood
        else (f"{first['texts']:,} test texts")
    )
    scale, digits, column = (-1000.0, 4, "nats a token") if likelihood else (1.0, 2, "accuracy")
    lines = [
        f"**{TITLES[task]}** ({there})",
        "",
        f"| method | parameters | learning rate | ms a step | {column} | median | sd of seeds "
        "| collapsed | against LoRA | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method, of in runs.items():
        real = found[method].real_S
        sd = statistics.stdev(real.tolist()) if len(real) > 1 else 0.0
        told = ["", ""]
        if method in compared:
            told = [interval(compared[method][0]), word(*compared[method])]
        parameters = statistics.mean(run["parameters"] for run in of)
        took = f"{clock[method]:.3f}" if method in clock else ""
        rate = f"{of[0]['lr']:.3g}"
        counted = [run["collapsed"] for run in of if "collapsed" in run]
        cells = [
            method, f"{parameters:,.0f}", rate, took, f"{real.mean() / scale:.{digits}f}",
            f"{statistics.median(real.tolist()) / scale:.{digits}f}", f"{sd / abs(scale):.{digits}f}",
            str(sum(counted)) if counted else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join([*cells, *told]) + " |")
    if "start" in summary:
        loss, accuracy = summary["start"]["test"]
        began = f"{100 * accuracy:.2f} % (loss {loss:.3f}): a linear probe"
        if likelihood:
            began = f"{loss:.4f} nats ({100 * accuracy:.1f} % of tokens right): the model as it is"
            if first["bytes"]:
                began += f"; {first['bytes'] / sum(first['targets']):.2f} bytes are a token"
        lines += ["", f"All begin at {began}."]
    whole = sum(seconds for _, seconds in summary["seconds"].values())
    lines += ["", f"All of this, with tuning and teaching: {whole:.0f} s."]
    return lines


def _checked(check: Mapping[str, Any]) -> str:
    both = f"{check['accuracy_32']:.2f} against {check['accuracy']:.2f} %"
    if check["task"] == "kjv":
        both = f"{check['loss_32']:.4f} against {check['loss']:.4f} nats a token"
        return (
            f"With products in TF32, {check['runs']} of the runs: {both}; a recorded step and the same "
            f"step by step differ by {check['graph']:.1e}."
        )
    return (
        f"With products in TF32, {check['runs']} of the runs: {both} (largest difference of one run "
        f"{check['largest']:.2f}); a recorded step and the same step by step differ by "
        f"{check['graph']:.1e}."
    )


def _said(found: Mapping[str, Values], measure: Measure) -> list[str]:
    lines = []
    for one, other in PAIRS:
        if one in found and other in found:
            of = difference(found[one], found[other])
            lines.append(sentence(one, other, of, of.p, "uncorrected", measure))
    for half in HALVES:
        if half in found and "lora" in found:
            of = difference(found[half], found["lora"])
            lines.append(
                f"{half} against LoRA: {interval(of)} {measure.points}; {within(of, measure)}"
            )
    if {"full", "lora", "learned"} <= found.keys():
        full, lora, learned = (float(found[m].real_S.mean()) for m in ("full", "lora", "learned"))
        if full > lora:
            share = 100 * (learned - lora) / (full - lora)
            lines.append(
                f"full fine-tuning is {full - lora:.2f} {measure.points} above LoRA; learned closes "
                f"{share:.0f} % of it"
            )
    return lines


def policies(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], summary: Mapping[str, Any]
) -> list[str]:
    """What policies did: the contest in the end of teaching, and decisions during runs."""
    lines = []
    if "contest" in summary:
        won = summary["contest"]
        how = "so it is taken" if won["better"] else "so equal ranks are kept"
        lines.append(
            f"what populations chose is better than equal ranks by {won['gain']:.4f} nats, standard "
            f"error {won['error']:.4f}, in {won['pairs']} pairs of runs: {how}"
            if won["pairs"]
            else "populations chose equal ranks"
        )
    decided = [run["decisions"] for run in runs.get("online", ()) if "decisions" in run]
    if decided:
        rows, switched, learnt, back = (
            statistics.mean(sum(float(row.get(key) or 0) for row in of) for of in decided)
            for key in ("rows", "switched", "learnt", "went_back")
        )
        lines.append(
            f"online, a run: {rows:.1f} rows switched in {switched:.1f} matrices; learnt from "
            f"{learnt:.1f} of {len(decided[0])} periods; went back {back:.1f} times"
        )
    return lines


def speed(result: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: steps of the recipe, and decompositions."""
    steps, counts = _of(result, "step"), _of(result, "operators")
    device = result["machine"]["device"]
    lines = [
        "Operators, on any machine:" if len(counts) == len(result["rows"]) else f"On {device}:",
        "",
    ]
    if steps:
        lines += [
            "| method | ms a step | against LoRA | without decisions | against LoRA | ms a decision |",
            "|---|---|---|---|---|---|",
        ]
        lora = {key: _median(steps.get("lora", []), key) for key in ("milliseconds", "plain")}
        for method, rows in steps.items():
            cells = [method]
            for key, base in lora.items():
                found = _median(rows, key)
                cells += ["" if found is None else f"{found:.2f}", _ratio(found, base)]
            decision = _median(rows, "decision")
            every = rows[0].get("steps")
            often = f" ({rows[0]['decisions']} in {every} steps)" if decision is not None else ""
            cells.append("" if decision is None else f"{decision:.0f}{often}")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if counts:
        lines += ["| method | operators a step | against LoRA | a decision |", "|---|---|---|---|"]
        base = _median(counts.get("lora", []), "step")
        for method, rows in counts.items():
            step, decision = _median(rows, "step"), _median(rows, "decision")
            told = "" if decision is None else f"{decision:,.0f}"
            lines.append(f"| {method} | {step:,.0f} | {_ratio(step, base)} | {told} |")
        lines.append("")
    svd = [row for row in result["rows"] if row["kind"] == "svd"]
    if svd:
        lines += ["| matrix | seconds, exact | of an 8B model |", "|---|---|---|"]
        for row in svd:
            m, n = row["shape"]
            lines.append(f"| {m} x {n} | {row['seconds']:.2f} | {row['count']} |")
        total = sum(row["seconds"] * row["count"] for row in svd)
        lines += [
            "",
            f"All of them: {total / 60:.1f} minutes on one GPU; ranks share them out.",
            "",
        ]
    return lines


def _of(result: Mapping[str, Any], kind: str) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of one kind, by method."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if row["kind"] == kind:
            found.setdefault(row["method"], []).append(row)
    return found


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """None: it was not measured."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def _ratio(found: float | None, base: float | None) -> str:
    return "" if found is None or base is None else f"{found / base:.2f}"


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """Everything about these results."""
    if not results:
        return "Nothing has been measured yet.\n"
    lines: list[str] = []
    for result in results:
        lines += comparison(result) if result["name"] == "lelora" else speed(result)
    return "\n".join(lines).rstrip() + "\n"


def filled(page: str, found: str) -> str:
    """A page with `found` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{found}{END}{after}"


def committed() -> list[Mapping[str, Any]]:
    """What is in this repository."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("lelora*.json"))]


def main() -> None:
    """Print, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    if options.files:
        print(tables([json.loads(file.read_text()) for file in options.files]))
        return
    PAGE.write_text(filled(PAGE.read_text(), tables(committed())))


if __name__ == "__main__":
    main()
