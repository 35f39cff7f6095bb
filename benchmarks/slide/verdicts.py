"""What is shown and what is not, in tables and in sentences, out of the same tests."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.slide.compared import SetStudies, against
from benchmarks.slide.tables import NOT_YET, SETS, speeds
from recipes.ctr.significance import Difference, holm

About = Sequence[tuple[str, str, str]]
"""What is tested: in words, the first row, and the second, which it is to be above."""
LEVEL = 0.05
FIGURES = {"recall@10": "recall", "ndcg@10": "NDCG"}


class Tested(NamedTuple):
    """One difference of new lists."""

    label: str
    figure: str
    difference: Difference
    seeds: int
    p: float
    """After Holm's correction over all of its set."""

    @property
    def verdict(self) -> str:
        """A key of `VERDICTS`."""
        if self.p >= LEVEL:
            return "open"
        return "shown" if self.difference.mean > 0 else "below"


VERDICTS = {"shown": "shown on", "open": "not shown on", "below": "significantly below on"}


def tested(of: SetStudies, about: About) -> list[Tested]:
    """All that this set has both rows of, recall and NDCG of each."""
    found: list[tuple[str, str, Difference, int]] = []
    for words, first, second in about:
        strata: list[tuple[str, str | None]] = [(words, None)]
        if second in ("markov", "cooccurrence") and _has_strata(of):
            strata.append((f"{words}, later", "later"))
        for label, only in strata:
            for figure in FIGURES:
                made = against(of, first, second, "new", figure, only)
                if made:
                    found.append((label, figure, *made))
    corrected = holm([difference.p for _, _, difference, _ in found]) if found else []
    return [Tested(*one, float(p)) for one, p in zip(found, corrected, strict=True)]


def _has_strata(of: SetStudies) -> bool:
    return of.counts is not None and bool(of.counts["summary"]["strata"])


def claims(sets: Mapping[str, SetStudies], about: About) -> list[str]:
    """Differences of new recall@10 and NDCG@10 with p after Holm's correction over those of a set."""
    lines: list[str] = []
    for name, words in SETS.items():
        found = tested(sets[name], about) if name in sets else []
        if not found:
            continue
        lines += [f"{words}:", "", "| first above second | figure | difference | 95 % | p | seeds |",
                  "|---" * 6 + "|"]  # fmt: skip
        for label, figure, d, seeds, p in found:
            interval = f"{d.low:+.4f} to {d.high:+.4f}"
            lines.append(f"| {label} | {figure} | {d.mean:+.4f} | {interval} | {p:.3g} | {seeds} |")
        lines.append("")
    return lines[:-1] if lines else [NOT_YET]


def verdicts(sets: Mapping[str, SetStudies], about: About, folder: Path) -> list[str]:
    """A sentence for each claim, one for how students were trained, and for what there is nothing of."""
    by_label: dict[str, dict[str, list[Tested]]] = {}
    for name, words in SETS.items():
        for one in tested(sets[name], about) if name in sets else []:
            by_label.setdefault(one.label, {}).setdefault(words, []).append(one)
    lines = [f"- {_capital(label)}: {_sentence(found)}." for label, found in by_label.items()]
    missing = [words for words, *_ in about if words not in by_label]
    if missing:
        lines.append(f"- Not measured: {'; '.join(missing)}.")
    lines += [f"- {line}" for line in (*_trained(sets), *speeds(folder))]
    lacking = [words for name, words in SETS.items() if name not in sets or not sets[name].files]
    if lacking:
        lines.append(f"- Nothing is trained yet on {_listed(lacking)}.")
    return lines


def _sentence(found: Mapping[str, Sequence[Tested]]) -> str:
    parts = []
    for verdict, words in VERDICTS.items():
        sets = []
        for name, tests in found.items():
            of = [one for one in tests if one.verdict == verdict]
            if of:
                figures = ", ".join(f"{FIGURES[x.figure]} {_short(x.difference.mean)}" for x in of)
                seeds = f"{of[0].seeds} seed" + ("s" if of[0].seeds > 1 else "")
                sets.append(f"{name} ({figures}; {seeds})")
        if sets:
            parts.append(f"{words} {_listed(sets)}")
    return "; ".join(parts)


def _trained(sets: Mapping[str, SetStudies]) -> Iterator[str]:
    """How students of each set learnt: studies may differ in this."""
    ways: dict[str, list[str]] = {}
    for name, words in SETS.items():
        for file in sets[name].files if name in sets else []:
            ways.setdefault(_way(file["config"]["plan"]), []).append(
                f"{words} (seed {file['config']['seed']})"
            )
    for way, where in ways.items():
        yield f"Students of {_listed(where)} learnt for {way}."


def _way(plan: Mapping[str, Any]) -> str:
    learning = plan.get("learning")
    if learning is None:  # of the first study, whose plan had these apart
        learning = {"epochs": plan["student_epochs"], "lr": plan["student_optim"]["lr"],
                    "copies": plan["copies"]}  # fmt: skip
    epochs = learning["epochs"] * plan.get("shorter", 1.0)
    copies = f"{learning['copies']} copy of each history" if learning["copies"] else "no copies"
    return f"{epochs:g} epochs at a rate of {learning['lr']:g}, with {copies}"


def _short(number: float) -> str:
    return f"{number:+.4f}".replace("0.", ".", 1)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
