"""Writes the tables of `docs/slide.md` from the result files: no figure is typed.

    python -m benchmarks.slide.page [FOLDER]

FOLDER has what `benchmarks.slide` wrote; by default the results that are kept with the code.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import filled
from benchmarks.slide.compared import SetStudies, against, load
from recipes.ctr.significance import holm

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "slide.md"
RESULTS = ROOT / "benchmarks" / "results"
SETS = {
    "beauty": "Beauty",
    "toys": "Toys",
    "yelp": "Yelp-P5",
    "movielens": "MovieLens-1M",
    "beauty_permuted": "Beauty, ties permuted",
}
OFFLINE = {
    "popularity": "popularity",
    "markov": "Markov counts",
    "cooccurrence": "co-occurrence counts",
    "sasrec:beam10": "SASRec, full cross-entropy, S",
    "s:repeat": "teacher S, repeated greedy with exclusion",
    "s:beam10": "teacher S, beam 10",
    "s:beam20": "teacher S, beam 20",
    "s:beam50": "teacher S, beam 50",
    "h:beam50": "teacher S with heads, beam 50",
    "m:beam50": "teacher M with heads, beam 50",
    "s:beam50+counts": "teacher S, beam 50, with counts",
    "e:beam50": "ensemble, beam 50",
    "e:beam50+counts": "ensemble, beam 50, with counts",
}
ONLINE = {
    "heads:greedy": "student with heads, one greedy pass",
    "steps:greedy": "student with steps, one greedy pass",
    "rl_heads:greedy": "student with heads after list RL, one greedy pass",
    "weak_heads:greedy": "student of its own start with heads, one greedy pass",
    "direct_heads:greedy": "direct list model with heads, one greedy pass",
    "direct_steps:greedy": "direct list model with steps, one greedy pass",
    "cross_heads:greedy": "student of models that did not train on its users, with heads",
    "plain_heads:greedy": "student with heads, no copies of histories",
    "log_heads:greedy": "student with heads, later places weigh less",
    "shuffled_heads:greedy": "student with heads, lists shuffled",
    "heads:beam50": "student with heads, beam 50",
    "steps:beam50": "student with steps, beam 50",
}
CLAIMS = [
    ("teacher S above Markov counts", "s:beam50", "markov"),
    ("teacher S above co-occurrence counts", "s:beam50", "cooccurrence"),
    ("teacher S above SASRec", "s:beam50", "sasrec:beam10"),
    ("ensemble with counts above counts", "e:beam50+counts", "cooccurrence"),
    ("student above direct list model, heads", "heads:greedy", "direct_heads:greedy"),
    ("student above direct list model, steps", "steps:greedy", "direct_steps:greedy"),
    ("student above beam 50 of its size, heads", "heads:greedy", "h:beam50"),
    ("student above beam 50 of its size, steps", "steps:greedy", "s:beam50"),
    ("student with heads above beam 50 with steps", "heads:greedy", "s:beam50"),
    ("stronger teacher, better student", "heads:greedy", "weak_heads:greedy"),
    ("copies of histories above none", "heads:greedy", "plain_heads:greedy"),
    ("teachers of other users above one of all", "cross_heads:greedy", "weak_heads:greedy"),
    ("list RL above its student", "rl_heads:greedy", "heads:greedy"),
    ("heads above steps", "heads:greedy", "steps:greedy"),
]
"""What is tested, first above second; all of a set together for Holm's correction."""
NOT_YET = "Not measured yet."


def number(values: list[float], digits: int = 4) -> str:
    """Mean, and the standard deviation if there are several seeds."""
    if not values:
        return ""
    mean = f"{np.mean(values):.{digits}f}".replace("0.", ".", 1)
    if len(values) == 1:
        return mean
    return f"{mean} ({np.std(values, ddof=1):.{digits}f})".replace("(0.", "(.")


def table(of: SetStudies, names: Mapping[str, str]) -> list[str]:
    """Recall and NDCG of rows, raw and new, and new recall by stratum."""
    lines = [
        "| row | raw recall | raw NDCG | new recall | new NDCG | same day | later |",
        "|---" * 7 + "|",
    ]
    for text, words in names.items():
        if not of.rows(text):
            continue
        cells = [
            number(of.figures(text, kind, name))
            for kind, name in (
                ("raw", "recall@10"), ("raw", "ndcg@10"), ("new", "recall@10"), ("new", "ndcg@10"),
                ("new", "recall@10_same_day"), ("new", "recall@10_later"),
            )
        ]  # fmt: skip
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return lines


def by_set(sets: Mapping[str, SetStudies], names: Mapping[str, str]) -> list[str]:
    """A table for each set."""
    lines: list[str] = []
    for name, words in SETS.items():
        if name in sets and any(sets[name].rows(text) for text in names):
            of = sets[name]
            seeds = [file["config"]["seed"] for file in of.files]
            how = f"seeds {', '.join(map(str, seeds))}" if seeds else "counts only so far"
            lines += [f"{words}, {of.users:,} users, {how}:", "", *table(of, names), ""]
    return lines[:-1] if lines else [NOT_YET]


def claims(sets: Mapping[str, SetStudies]) -> list[str]:
    """Differences of new recall@10 and NDCG@10 with p after Holm's correction over those of a set."""
    lines: list[str] = []
    for name, words in SETS.items():
        found = []
        for about, first, second in CLAIMS:
            strata: list[tuple[str, str | None]] = [(about, None)]
            if second in ("markov", "cooccurrence") and sets.get(name) and _has_strata(sets[name]):
                strata.append((f"{about}, later", "later"))
            for label, only in strata:
                for figure in ("recall@10", "ndcg@10"):
                    made = name in sets and against(sets[name], first, second, "new", figure, only)
                    if made:
                        found.append((label, figure, *made))
        if not found:
            continue
        corrected = holm([d.p for _, _, d, _ in found])
        lines += [f"{words}:", "", "| first above second | figure | difference | 95 % | p | seeds |",
                  "|---" * 6 + "|"]  # fmt: skip
        lines += [
            f"| {label} | {figure} | {d.mean:+.4f} | {d.low:+.4f} to {d.high:+.4f} | {p:.3g} | {n} |"
            for (label, figure, d, n), p in zip(found, corrected, strict=True)
        ]
        lines.append("")
    return lines[:-1] if lines else [NOT_YET]


def _has_strata(of: SetStudies) -> bool:
    return of.counts is not None and bool(of.counts["summary"]["strata"])


def offline(sets: Mapping[str, SetStudies]) -> list[str]:
    """How the ensemble and the counts' weight were chosen, and what training took."""
    lines = ["| set | seed | plan | ensemble | counts weigh | targets in the first 10 of its lists |",
             "|---" * 6 + "|"]  # fmt: skip
    for name, words in SETS.items():
        for file in sets[name].files if name in sets else []:
            about = file["summary"]["about"]
            if "ensemble" not in about or "counts of e" not in about:
                continue
            models = about["ensemble"]["models"]
            top = about.get(f"targets in the lists of {'+'.join(models)}", {}).get("10")
            lines.append(
                f"| {words} | {file['config']['seed']} | {file['config']['plan']['name']} "
                f"| {', '.join(models)} | {about['counts of e']['chosen']:g} "
                f"| {'' if top is None else f'{top:.3f}'} |"
            )
    return lines if len(lines) > 2 else [NOT_YET]


def trainings(sets: Mapping[str, SetStudies]) -> list[str]:
    """Steps, parameters and the step of the best checkpoint."""
    lines = ["| set | seed | model | parameters | steps | best at | validation NDCG@10 | seconds |",
             "|---" * 8 + "|"]  # fmt: skip
    for name, words in SETS.items():
        for file in sets[name].files if name in sets else []:
            for model, t in file["summary"]["trainings"].items():
                lines.append(
                    f"| {words} | {file['config']['seed']} | {model} | {t['parameters']:,} "
                    f"| {t['steps']:,} | {t['best']['step']:,.0f} | {t['best']['ndcg@10']:.4f} "
                    f"| {t['seconds']:.0f}, {t['together']} together |"
                )
    return lines if len(lines) > 2 else [NOT_YET]


def latency(folder: Path) -> list[str]:
    """Milliseconds of a batch, and users per second of a greedy list over those of each search."""
    file = folder / "slide-latency.json"
    if not file.exists():
        return [NOT_YET]
    result = json.loads(file.read_text())
    rows = result["rows"]
    at = {(r["size"], r["codes"], r["how"], r["batch"]): r for r in rows}
    batches = sorted({r["batch"] for r in rows})
    sizes = list(dict.fromkeys(r["size"] for r in rows))
    lines = [
        "| model | codes | decoding | passes | " + " | ".join(f"batch {b}, ms" for b in batches)
        + " | " + " | ".join(f"batch {b}, users/s" for b in batches) + " |",
        "|---" * (4 + 2 * len(batches)) + "|",
    ]  # fmt: skip
    for size, codes, how in sorted(
        {(r["size"], r["codes"], r["how"]) for r in rows},
        key=lambda key: (
            sizes.index(key[0]),
            key[1] != "steps",
            key[2] != "greedy",
            len(key[2]),
            key[2],
        ),
    ):
        found = [at.get((size, codes, how, b)) for b in batches]
        first = next(r for r in found if r)
        cells = [f"{r['ms']:.2f}" if r else "" for r in found]
        cells += [f"{r['users_per_second']:,.0f}" if r else "" for r in found]
        lines.append(f"| {size}, {first['parameters'] / 1e6:.1f} M | {codes} | {how} "
                     f"| {first['steps']} | " + " | ".join(cells) + " |")  # fmt: skip
    lines += ["", "| users per second, list over search | " + " | ".join(f"batch {b}" for b in batches)
              + " |", "|---" * (1 + len(batches)) + "|"]  # fmt: skip
    for size in sizes:
        for mine, theirs, how in (
            (m, t, h)
            for h in ("beam50", "beam200")
            for m in ("heads", "steps")
            for t in ("steps", "heads")
        ):
            cells = []
            for b in batches:
                one, two = at.get((size, mine, "greedy", b)), at.get((size, theirs, how, b))
                both = one and two
                cells.append(f"{one['users_per_second'] / two['users_per_second']:.2f}"  # type: ignore[index]
                             if both else "")  # fmt: skip
            if any(cells):
                lines.append(
                    f"| {size}, list by {mine} over {how} by {theirs} | " + " | ".join(cells) + " |"
                )
    device = result["machine"]["device"]
    return [*lines, "", f"Medians, {device}, torch {result['versions']['torch']}."]


def weights(folder: Path) -> list[str]:
    """NDCG@10 on validation of the co-occurrence table's weights."""
    file = folder / "slide-weights.json"
    if not file.exists():
        return [NOT_YET]
    result = json.loads(file.read_text())
    names = [name for name in SETS if name in result["rows"][0]["ndcg@10"]]
    lines = ["| distance in pairs | place in history | " + " | ".join(SETS[n] for n in names)
             + " | mean share of the best |", "|---" * (3 + len(names)) + "|"]  # fmt: skip
    best = sorted(result["rows"], key=lambda row: -row["share"])
    for row in best[:5]:
        cells = [f"{row['ndcg@10'][name]:.4f}".lstrip("0") for name in names]
        lines.append(f"| n ** -{row['pairs']:g} | k ** -{row['votes']:g} | " + " | ".join(cells)
                     + f" | {row['share']:.3f} |")  # fmt: skip
    return lines


def tables(folder: Path) -> dict[str, list[str]]:
    """Every generated part of the page."""
    sets = load(folder)
    made: list[Any] = [file for of in sets.values() for file in of.files]
    devices = sorted({f"{f['machine']['device']}, torch {f['versions']['torch']}" for f in made})
    return {
        "weights": weights(folder),
        "offline": by_set(sets, OFFLINE),
        "online": by_set(sets, ONLINE),
        "claims": claims(sets),
        "chosen": offline(sets),
        "trainings": trainings(sets),
        "latency": latency(folder),
        "made": [f"On {'; '.join(devices)}."] if devices else [NOT_YET],
    }


def main() -> None:
    """Rewrite the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    PAGE.write_text(filled(PAGE.read_text(), tables(folder)))


if __name__ == "__main__":
    main()
