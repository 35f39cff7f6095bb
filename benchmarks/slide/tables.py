"""Tables in Markdown, out of the result files of one folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.slide.compared import SetStudies

SETS = {
    "beauty": "Beauty",
    "toys": "Toys",
    "yelp": "Yelp-P5",
    "movielens": "MovieLens-1M",
    "beauty_permuted": "Beauty, ties permuted",
}
NOT_YET = "Not measured yet."
TARGETS = "targets in the lists of "
"""What `benchmarks.slide.study` notes by this name and those of the teachers."""


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


def chosen(sets: Mapping[str, SetStudies]) -> list[str]:
    """How the ensemble and the counts' weight were chosen, and what training took."""
    lines = ["| set | seed | plan | ensemble | counts weigh | targets in the first 10 of its lists |",
             "|---" * 6 + "|"]  # fmt: skip
    for name, words in SETS.items():
        for file in sets[name].files if name in sets else []:
            about = file["summary"]["about"]
            if "ensemble" not in about or "counts of e" not in about:
                continue
            models = about["ensemble"]["models"]
            top = about.get(f"{TARGETS}{'+'.join(models)}", {}).get("10")
            lines.append(
                f"| {words} | {file['config']['seed']} | {file['config']['plan']['name']} "
                f"| {', '.join(models)} | {about['counts of e']['chosen']:g} "
                f"| {'' if top is None else f'{top:.3f}'} |"
            )
    return lines if len(lines) > 2 else [NOT_YET]


def known_targets(sets: Mapping[str, SetStudies]) -> list[str]:
    """How often each list of a training prefix has what really followed: how much teachers remember."""
    lines = ["| set | seed | teachers | in the first item | in the first 10 | in the first 50 |",
             "|---" * 6 + "|"]  # fmt: skip
    for name, words in SETS.items():
        for file in sets[name].files if name in sets else []:
            for key, shares in file["summary"]["about"].items():
                if not key.startswith(TARGETS):
                    continue
                cells = " | ".join(f"{shares[top]:.3f}" for top in ("1", "10", "50"))
                models = key.removeprefix(TARGETS).replace("+", ", ")
                lines.append(f"| {words} | {file['config']['seed']} | {models} | {cells} |")
    return lines if len(lines) > 2 else [NOT_YET]


def agreement(sets: Mapping[str, SetStudies]) -> list[str]:
    """What students' lists share with those of their teachers."""
    lines = ["| set | seed | student | lists it learnt from | histories it never saw |",
             "|---" * 5 + "|"]  # fmt: skip
    for name, words in SETS.items():
        for file in sets[name].files if name in sets else []:
            seed, found = file["config"]["seed"], file["summary"]["about"].get("agreement", {})
            for student, of in found.items():
                cells = [f"{of[part]:.3f}" if part in of else "" for part in ("strong", "ends")]
                lines.append(f"| {words} | {seed} | {student} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else [NOT_YET]


def trials(folder: Path, name: str = "slide-trials", of: str = "teachings") -> list[str]:
    """NDCG@10 on validation of teachers, or students, that were trained in several ways."""
    file = folder / f"{name}.json"
    if not file.exists():
        return [NOT_YET]
    result = json.loads(file.read_text())
    figures, ways = result["summary"]["validation ndcg@10"], result["config"][of]
    keys = [
        key for key in next(iter(ways.values())) if len({way[key] for way in ways.values()}) > 1
    ]
    lines = ["| way | " + " | ".join(key.replace("_", " ") for key in keys) + " | NDCG@10 |",
             "|---" * (2 + len(keys)) + "|"]  # fmt: skip
    for name in sorted(figures, key=lambda name: -figures[name]):
        settings = " | ".join(str(ways[name][key]) for key in keys)
        lines.append(f"| {name} | {settings} | {figures[name]:.4f} |")
    return lines


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
        + " | " + " | ".join(f"batch {b}, users/s" for b in batches)
        + f" | batch {batches[-1]}, peak MiB |",
        "|---" * (5 + 2 * len(batches)) + "|",
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
        last = found[-1]
        cells.append(f"{last['peak_mib']:,.0f}" if last and "peak_mib" in last else "")
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


def speeds(folder: Path) -> Iterator[str]:
    """A sentence for each size on lists by heads against beam search (B = 50) of both kinds."""
    file = folder / "slide-latency.json"
    if not file.exists():
        return
    rows = json.loads(file.read_text())["rows"]
    at = {(r["size"], r["codes"], r["how"], r["batch"]): r["users_per_second"] for r in rows}
    for size in dict.fromkeys(r["size"] for r in rows):
        for codes in ("steps", "heads"):
            found = {
                batch: at[size, "heads", "greedy", batch] / at[size, codes, "beam50", batch]
                for batch in sorted({r["batch"] for r in rows})
                if (size, "heads", "greedy", batch) in at and (size, codes, "beam50", batch) in at
            }
            if found:
                shares = ", ".join(f"{found[b]:.2f} at batch {b}" for b in found)
                yield (f"Size {size}, users per second, a list by heads over beam search (B = 50) "
                       f"by {codes}: {shares}.")  # fmt: skip


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
