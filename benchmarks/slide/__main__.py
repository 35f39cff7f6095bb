"""SLIDE's comparisons: teachers, students, direct lists and counts on public sets, with seeds.

    python -m benchmarks.slide prepare --folder FOLDER --sids FOLDER --set sets/beauty.npz
    python -m benchmarks.slide weights --set sets/beauty.npz --set sets/toys.npz --out runs/slide
    python -m benchmarks.slide counts --set sets/beauty.npz --out runs/slide
    python -m benchmarks.slide trials --set sets/beauty.npz --out runs/slide
    python -m benchmarks.slide students --set sets/beauty.npz --out runs/slide
    python -m benchmarks.slide reinforcements --set sets/beauty.npz --seed 0 --out runs/slide
    python -m benchmarks.slide study --set sets/beauty.npz --seed 0 --out runs/slide --resume
    python -m benchmarks.slide latency --set sets/beauty.npz --out runs/slide
    python -m benchmarks.slide.page runs/slide

`prepare` packs a folder with sequences.txt and the folder that `+recipe=sid_build` made of it.
`weights` chooses the weights of the co-occurrence table on validation, `counts` has the rows that need
no training, `trials` trains teachers in several ways, `students` does so with students, `study` trains
(in the ways that are best in these trials, if they are in `--out`) and compares everything for one set
and one seed, `reinforcements` is a study that tries all ways of list RL, the best of which later ones
have, `latency` measures decoding. Each writes JSON files into `--out`, one for each set and
seed: `--resume` passes over those that are whole, and goes on after the searches of one that was cut.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.slide import kept
from benchmarks.slide.counting import choose
from benchmarks.slide.latency import latencies
from benchmarks.slide.plan import LEARNINGS, PLANS, REINFORCEMENTS, TEACHINGS, Plan
from benchmarks.slide.scored import flags, scored
from benchmarks.slide.sets import Prepared, prepare
from benchmarks.slide.study import Study
from models.slide.history import NOTHING
from recipes.slide.rows import COUNTS, parse_row, recommender

WHAT = (
    "prepare", "weights", "counts", "trials", "students", "reinforcements", "study", "latency"
)  # fmt: skip
RL_TRIALS = "slide-rl-trials"


def main() -> None:
    """Parse, and do one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--set", type=Path, action="append", required=True, help="a packed set")
    parser.add_argument("--folder", help="prepare: with sequences.txt")
    parser.add_argument("--sids", help="prepare: of sid_build")
    parser.add_argument("--permute-ties", type=int, help="prepare: the control's seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", choices=PLANS, default="full")
    parser.add_argument("--out", type=Path, default=Path("runs/slide-study"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in training")
    parser.add_argument("--resume", action="store_true", help="pass over files that are whole")
    options = parser.parse_args()
    if options.what == "prepare":
        if options.folder is None or options.sids is None:
            parser.error("prepare needs --folder and --sids")
        prepare(options.folder, options.sids, options.set[0], options.permute_ties)
    elif options.what == "weights":
        found = choose({file.stem: Prepared.of(file).split for file in options.set})
        summary = {k: v for k, v in found.items() if k != "tried"}
        file = options.out / "slide-weights.json"
        results.write(file, "slide", "cpu", {}, found["tried"], summary)
        print(f"pairs {found['pairs']}, votes {found['votes']}; everything is in {file}")
    else:
        for path in options.set:
            of_set(options, path)


def of_set(options: argparse.Namespace, path: Path) -> None:
    """One file for one set."""
    names = {"counts": f"slide-{path.stem}-counts", "latency": "slide-latency",
             "trials": "slide-trials", "students": "slide-student-trials"}  # fmt: skip
    file = options.out / f"{names.get(options.what, f'slide-{path.stem}-{options.seed}')}.json"
    goes_on = options.resume and file.exists()
    tried = options.what != "reinforcements" or (options.out / f"{RL_TRIALS}.json").exists()
    if goes_on and tried and json.loads(file.read_text())["summary"]["whole"]:
        print(f"{file} is whole")
        return
    data = Prepared.of(path)
    strata = {name: flags(rows) for name, rows in data.split.strata("test").items()}
    config: dict[str, Any] = {"set": path.stem, "data": data.describe()["data"],
                              "users": data.sequences.num_users}  # fmt: skip
    if options.what == "counts":
        rows = counted(data)
        results.write(file, "slide", "cpu", config, rows, {"whole": True, "strata": strata})
    elif options.what == "latency":
        measured = json.loads(file.read_text())["rows"] if goes_on else []
        for row in latencies(data, torch.device(options.device), options.plan == "tiny", measured):
            measured.append(row)
            results.write(file, "slide", options.device, config, measured, {"whole": False})
        results.write(file, "slide", options.device, config, measured, {"whole": True})
    elif options.what == "trials":
        study = started(options, data, PLANS[options.plan])
        figures = study.trials(TEACHINGS)
        summary = {"whole": True, "validation ndcg@10": figures, "trainings": study.trainings,
                   "chosen": max(figures, key=lambda name: figures[name])}  # fmt: skip
        config |= {"seed": options.seed, "plan": plan_of(options.plan, study.plan),
                   "teachings": {name: asdict(how) for name, how in TEACHINGS.items()}}  # fmt: skip
        results.write(file, "slide", options.device, config, [], summary)
    elif options.what == "students":
        plan = replace(taught(PLANS[options.plan], options.out), students=("heads",))
        copies = max(way.copies for way in LEARNINGS.values())
        plan = replace(plan, learning=replace(plan.learning, copies=copies))
        study = started(options, data, plan)
        figures = study.learnings(LEARNINGS)
        summary = {"whole": True, "validation ndcg@10": figures, "trainings": study.trainings,
                   "chosen": max(figures, key=lambda name: figures[name])}  # fmt: skip
        config |= {"seed": options.seed, "plan": plan_of(options.plan, plan),
                   "learnings": {name: asdict(how) for name, how in LEARNINGS.items()}}  # fmt: skip
        results.write(file, "slide", options.device, config, [], summary)
    else:
        plan = taught(PLANS[options.plan], options.out)
        if options.what == "reinforcements":
            tiny: dict[str, Any] = {"steps": 2, "batch": 4} if options.plan == "tiny" else {}
            ways = {name: replace(way, **tiny) for name, way in REINFORCEMENTS.items()}
            plan = replace(plan, reinforcements=ways)
        study = started(options, data, plan)
        config |= {"seed": options.seed, "plan": plan_of(options.plan, plan)}
        done = kept.restore(study, file, config) if goes_on else kept.forget(file)
        for stage in study.run(done):
            summary = {"whole": False, "stage": stage, "trainings": study.trainings,
                       "seconds": study.seconds, "about": study.judging.about}  # fmt: skip
            kept.keep(study, file)
            results.write(file, "slide", options.device, config, study.judging.rows, summary)
        summary["whole"] = True
        results.write(file, "slide", options.device, config, study.judging.rows, summary)
        kept.forget(file)
        if options.what == "reinforcements":
            found = study.judging.about["reinforcements"]
            tried_by = {
                "reinforcements": {n: asdict(way) for n, way in plan.reinforcements.items()}
            }
            results.write(options.out / f"{RL_TRIALS}.json", "slide", options.device,
                          config | tried_by, [], {"whole": True, **found})  # fmt: skip
    print(f"everything is in {file}")


def said(line: str) -> None:
    """At once, for those who watch."""
    print(line, flush=True)
    sys.stdout.flush()


def started(options: argparse.Namespace, data: Prepared, plan: Plan) -> Study:
    """What the options ask for."""
    device = torch.zeros(0, device=options.device).device  # with its number, as tensors say it
    return Study(data, plan, options.seed, device, not options.eager, say=said)


def taught(plan: Plan, out: Path) -> Plan:
    """With everything trained as was best in trials, which are here or a folder above."""

    def chosen(name: str) -> str | None:
        files = [folder / f"{name}.json" for folder in (out, out.parent)]
        found = [
            json.loads(file.read_text())["summary"]["chosen"] for file in files if file.exists()
        ]
        return found[0] if found else None

    if teaching := chosen("slide-trials"):
        plan = replace(plan, teaching=TEACHINGS[teaching])
    if learning := chosen("slide-student-trials"):
        plan = replace(plan, learning=LEARNINGS[learning])
    if plan.reinforcements and (way := chosen(RL_TRIALS)):
        plan = replace(plan, reinforcements={way: REINFORCEMENTS[way]})
    return plan


def plan_of(name: str, plan: Plan) -> dict[str, Any]:
    """As plain data."""
    return {"name": name, **asdict(plan)}


def counted(data: Prepared) -> list[Any]:
    """The rows that need no training."""
    split = data.split
    histories = [split.history(x, int(e)) for x, e in enumerate(split.targets("test"))]
    rows = []
    for text in COUNTS:
        recommend = recommender(parse_row(text, {}), {}, split, 10, 0.0)
        lists = {
            "raw": recommend(histories, [h[:0] for h in histories]),
            "new": recommend(histories, histories),
        }
        assert all((x != NOTHING).all() for x in lists.values())
        rows.append(scored(text, lists, split, "test"))
        print(text, rows[-1]["figures"]["new"])
    return rows


if __name__ == "__main__":
    main()
