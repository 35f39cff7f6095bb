"""What a run says about its plans: figures for each report, panels for the page, lines for the header.

Rank 0 notes the plan of every micro-batch, which is that of all ranks. At a report it works out what was
predicted for each rank and what travelled, beside what each rank measured: forward and backward pass
without the communication that it waited for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallel.repacking.drawing import draw
from parallel.repacking.layout import Floats
from parallel.repacking.plan import FALLBACKS, MEMORY, NO_GAIN, REPACKED, Plan
from parallel.repacking.planner import Planner, rank_seconds
from parallel.repacking.traffic import Traffic, traffic

COLUMNS = 60
"""Reports that the heat maps show, the newest."""
PARENTS = 4
"""Parents of a plan that are drawn."""


@dataclass
class Report:
    """One report: each rank's seconds a step."""

    step: int
    predicted: Floats
    measured: Floats


@dataclass
class PlanWatch:
    """Keeps what the page shows; a resumed run begins anew."""

    planner: Planner
    reports: list[Report] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """What happened to parents that have samples, over all plans so far."""
    drawn: tuple[int, Plan] | None = None
    """The newest plan that repacks something, or the newest if none has, and the step of its report."""
    _noted: list[tuple[Plan, float]] = field(default_factory=list)

    def note(self, plan: Plan, seconds: float) -> None:
        """A micro-batch has this plan, which took so long to make."""
        self._noted.append((plan, seconds))

    def figures(self, step: int, steps: int, measured: Sequence[float]) -> dict[str, Any]:
        """Of the micro-batches noted since the last call, a step; `measured`: seconds of each rank."""
        noted, self._noted = self._noted, []
        if not noted:
            return {}
        plans = [plan for plan, _ in noted]
        cost = self.planner.cost
        predicted = np.sum([rank_seconds(cost, plan) for plan in plans], axis=0) / steps
        sent = sum((traffic(plan, cost.shape) for plan in plans), Traffic(0, 0))
        sent = sent.times(cost.calls / steps)
        busy = [p for plan in plans for p in plan.parents if len(p.samples)]
        self.reasons.update(parent.fallback for parent in busy)
        self.reports.append(Report(step, predicted, np.asarray(measured)))
        self.drawn = self._chosen(step, plans)
        parents = Counter(parent.width for parent in busy)
        children = Counter(c.width for parent in busy for c in parent.children if len(c.samples))
        repacked = sum(parent.fallback == REPACKED for parent in busy)
        balance = _over_mean(predicted), _over_mean(np.asarray(measured))
        return {
            "plan": f"parents {_counted(parents)}, {repacked} repacked; children "
            f"{_counted(children)}; slowest rank over the mean {balance[0]:.2f} predicted, "
            f"{balance[1]:.2f} measured; {sent.inside / 1e9:.2f} GB inside nodes, "
            f"{sent.across / 1e9:.2f} across",
            "balance_predicted": balance[0],
            "balance_measured": balance[1],
            "repack_parents": repacked / steps,
            "repack_fallbacks": sum(p.fallback in (NO_GAIN, MEMORY) for p in busy) / steps,
            "repack_gb_inside": sent.inside / 1e9,
            "repack_gb_across": sent.across / 1e9,
            "plan_seconds": sum(plan.seconds for plan in plans) / steps,
            "solver_seconds": sum(seconds for _, seconds in noted) / len(noted),
            **{f"plan_parents_{width}": n / steps for width, n in sorted(parents.items())},
            **{f"plan_children_{width}": n / steps for width, n in sorted(children.items())},
            "rank_seconds_predicted": [round(value, 6) for value in predicted.tolist()],
            "rank_seconds_measured": [round(value, 6) for value in measured],
        }

    def _chosen(self, step: int, plans: Sequence[Plan]) -> tuple[int, Plan] | None:
        repacked = [plan for plan in plans if _repacks(plan)]
        if repacked:
            return step, repacked[-1]
        if self.drawn is None or not _repacks(self.drawn[1]):
            return step, plans[-1]
        return self.drawn

    def panels(self) -> list[dict[str, Any]]:
        """See `docs/writing-a-task.md` for the kinds."""
        if not self.reports or self.drawn is None:
            return []
        step, plan = self.drawn
        return [
            {
                "title": "Balance of ranks",
                "kind": "lines",
                "about": "Seconds of the slowest rank over the mean of all; 1 is even.",
                "x": "step",
                "series": {
                    "predicted": [[r.step, _over_mean(r.predicted)] for r in self.reports],
                    "measured": [[r.step, _over_mean(r.measured)] for r in self.reports],
                },
            },
            self._heat("measured", "Forward and backward pass, without waiting for other ranks."),
            self._heat("predicted", "By the cost model: layers and exchanges, without waiting."),
            {
                "title": "What became of parents",
                "kind": "table",
                "columns": ["parents with samples", "number"],
                "rows": [[FALLBACKS[why], n] for why, n in self.reasons.most_common()],
            },
            {
                "title": f"The layout of a micro-batch of step {step}",
                "kind": "text",
                "about": "Rows of each rank before and after repacking; samples are document:tokens.",
                "text": draw(plan, PARENTS),
            },
        ]

    def _heat(self, which: str, about: str) -> dict[str, Any]:
        shown = self.reports[-COLUMNS:]
        by_rank = np.stack([getattr(report, which) for report in shown], axis=1)
        return {
            "title": f"Seconds of each rank, {which}",
            "kind": "heatmap",
            "about": about,
            "rows": [f"rank {rank}" for rank in range(len(by_rank))],
            "columns": [f"step {report.step}" for report in shown],
            "values": by_rank.tolist(),
            "form": "seconds",
        }


def _counted(widths: Counter[int]) -> str:
    """Widths, the widest first, each as often as it is there."""
    return ", ".join(f"{n} x {width}" for width, n in sorted(widths.items(), reverse=True))


def fullest(planner: Planner, plan: Plan) -> tuple[int, int]:
    """Rows that a rank may have to hold, and the width of its parent: by the limit, or by a plan."""
    if planner.config.max_rows is not None:
        return planner.config.max_rows, planner.max_parent
    return max((int(plan.layout(p).rows_per_rank.max()), p.width) for p in plan.parents)


def foreseen(planner: Planner, plan: Plan) -> dict[str, str]:
    """A plan and what it sends, in lines for a dry run."""
    cost, rows = planner.cost, fullest(planner, plan)[0]
    widths = Counter(parent.width for parent in plan.parents if len(parent.samples))
    repacked = sum(len(parent.children) > 1 for parent in plan.parents)
    sent = traffic(plan, cost.shape).times(cost.calls)
    limit = "parallel.repacking.max_rows" if planner.config.max_rows else "this micro-batch's most"
    return {
        "first micro-batch": f"{len(plan.ids):,} documents, {int(plan.lengths.sum()):,} tokens; "
        f"parents: {_counted(widths)}; {repacked} repacked; by the cost model "
        f"{plan.seconds:.3g} s, slowest rank {_over_mean(rank_seconds(cost, plan)):.3f} of the mean",
        "exchanges": f"{sent.inside / 1e9:.3g} GB inside nodes and {sent.across / 1e9:.3g} GB across, "
        "over all ranks, layers and passes of it; not in the times below",
        "rows a rank": f"memory is planned for {rows:,}, {limit}",
    }


def _over_mean(values: Floats) -> float:
    return float(values.max() / values.mean()) if values.any() else 1.0


def _repacks(plan: Plan) -> bool:
    return any(len(parent.children) > 1 for parent in plan.parents)


def settings_in_words(planner: Planner) -> str:
    """What the planner may do, for the header."""
    config, cost = planner.config, planner.cost
    words = [
        f"parents of up to {planner.max_parent} of {planner.num_ranks} ranks, nodes of "
        f"{cost.node_size}; {config.baseline} baseline, {config.rows_per_rank:,} rows a rank"
    ]
    if not config.enabled:
        return words[0] + "; not repacked: a sample keeps its group in all layers"
    children = ", ".join(map(str, planner.child_widths))
    where = "all parents" if config.inside_nodes else "parents that span nodes"
    words.append(f"{where} repacked into children of {children}")
    solver = "parent solver off"
    if config.parent_solver:
        several = ", several widths" if config.several_widths else ""
        solver = f"parent solver on{several}, {config.search_parents} parents searched"
    words.append(solver)
    if config.max_rows is not None:
        words.append(f"at most {config.max_rows:,} rows a rank")
    return "; ".join(words)
