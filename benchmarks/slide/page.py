"""Writes the tables of `docs/slide.md` from the result files: no figure is typed.

    python -m benchmarks.slide.page [FOLDER]

FOLDER has what `benchmarks.slide.everything` wrote, with a folder for each plan whose results stand
apart; by default the results that are kept with the code.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import filled
from benchmarks.slide.compared import SetStudies, load
from benchmarks.slide.everything import ASIDE
from benchmarks.slide.tables import (
    NOT_YET,
    agreement,
    by_set,
    chosen,
    known_targets,
    latency,
    trainings,
    trials,
    weights,
)
from benchmarks.slide.verdicts import claims, verdicts

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "slide.md"
RESULTS = ROOT / "benchmarks" / "results"
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
    "rl_heads:greedy": "student with heads after list RL, first way, one greedy pass",
    "reinforced_heads:greedy": "student with heads after list RL, one greedy pass",
    "weak_heads:greedy": "student of its own start with heads, one greedy pass",
    "direct_heads:greedy": "direct list model with heads, one greedy pass",
    "direct_steps:greedy": "direct list model with steps, one greedy pass",
    "plain_heads:greedy": "student with heads, no copies of histories",
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
    ("list RL, first way, above its student", "rl_heads:greedy", "heads:greedy"),
    ("list RL in the chosen way above its student", "reinforced_heads:greedy", "heads:greedy"),
    ("heads above steps", "heads:greedy", "steps:greedy"),
]
"""What is tested, first above second; all of a set together for Holm's correction."""
LEVERS = {
    "heads:greedy": "lists in their order, all places alike",
    "log_heads:greedy": "later places weigh less",
    "shuffled_heads:greedy": "lists shuffled",
    "ends_heads:greedy": "also lists of whole training parts, of users who are not evaluated",
}
LEVER_CLAIMS = [
    ("in their order above shuffled", "heads:greedy", "shuffled_heads:greedy"),
    ("later places weighing less above all alike", "log_heads:greedy", "heads:greedy"),
    ("with lists of whole training parts above without", "ends_heads:greedy", "heads:greedy"),
]
CROSS = {
    "h:beam50": "the teacher of all users, beam 50",
    "weak_heads:greedy": "student of that teacher",
    "cross_heads:greedy": "student of teachers that did not train on the list's user",
}
CROSS_CLAIMS = [
    ("teachers of other users above one of all", "cross_heads:greedy", "weak_heads:greedy"),
    ("student of other users' teachers above beam 50", "cross_heads:greedy", "h:beam50"),
]


def tables(folder: Path) -> dict[str, list[str]]:
    """Every generated part of the page."""
    sets = load(folder)
    levers, cross = (_beside(sets, folder / plan) for plan in ASIDE)
    made: list[Any] = [file for of in sets.values() for file in of.files]
    devices = sorted({f"{f['machine']['device']}, torch {f['versions']['torch']}" for f in made})
    return {
        "weights": weights(folder),
        "offline": by_set(sets, OFFLINE),
        "online": by_set(sets, ONLINE),
        "claims": claims(sets, CLAIMS),
        "verdicts": verdicts(sets, CLAIMS, folder),
        "levers": [*by_set(levers, LEVERS), "", *claims(levers, LEVER_CLAIMS)],
        "cross": [
            *by_set(cross, CROSS),
            "",
            *known_targets(cross),
            "",
            *claims(cross, CROSS_CLAIMS),
        ],
        "trials": trials(folder),
        "learnings": trials(folder, "slide-student-trials", "learnings"),
        "reinforcements": trials(folder, "slide-rl-trials", "reinforcements"),
        "agreement": agreement(sets),
        "chosen": chosen(sets),
        "trainings": trainings(sets),
        "latency": latency(folder),
        "made": [f"On {'; '.join(devices)}."] if devices else [NOT_YET],
    }


def _beside(sets: dict[str, SetStudies], folder: Path) -> dict[str, SetStudies]:
    """Studies of a plan that stands apart; what nothing trains is the same for all plans."""
    found = load(folder)
    for name, of in found.items():
        of.counts = sets[name].counts if name in sets else None
    return found


def main() -> None:
    """Rewrite the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    PAGE.write_text(filled(PAGE.read_text(), tables(folder)))


if __name__ == "__main__":
    main()
