"""`python -m trainer.dashboard`: the wandb workspace of our runs, as code.

Sections and panels are data (`SECTIONS`). A figure that a recipe reports lands in the section whose
pattern its name fits, so a new recipe needs no change here as long as it uses the field's names.

Exit codes: 0 saved, or printed with `--print`; 2 something is missing (the message says what to install
or to set); 1 the server did not take it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from trainer.watch.clock import PHASES
from trainer.watch.interval import PAUSES
from trainer.watch.tracker import has_key


@dataclass(frozen=True)
class Panel:
    """Curves over the step: of these metrics, or of all whose names fit a pattern."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str = ""
    stacked: bool = False


SECTIONS = {
    "Training": (
        Panel("Loss", ("train/loss", "train/loss_max")),
        Panel("Evaluation", pattern="eval/(loss|nats_per_byte)"),
        Panel("Gradient norm", ("train/grad_norm",)),
        Panel("Learning rate", ("train/lr",)),
        Panel("Skipped steps", ("train/skipped",)),
    ),
    "Throughput": (
        Panel("Tokens per second and device", ("train/tokens_per_second_per_device",)),
        Panel("MFU", ("train/mfu",)),
        Panel(
            "Step time", tuple(f"train/{part}_seconds" for part in (*PHASES, *PAUSES)), stacked=True
        ),
        Panel("Goodput", ("train/goodput",)),
        Panel("Peak memory", ("train/memory_gib", "train/memory_allocated_gib")),
        Panel("Allocator", ("train/alloc_retries", "train/ooms")),
    ),
    "Communication": (
        Panel("Compute waits", ("train/communication_seconds",)),
        Panel("Slowest rank over the mean", ("train/imbalance",)),
        Panel("By collective", pattern="(train|eval)/(comm|collective|bytes).*"),
    ),
    "Repacking": (
        Panel("Balance", pattern="(train|eval)/(repack|balance).*"),
        Panel("Planning", pattern="(train|eval)/(plan|solver).*"),
    ),
    "Adapters": (
        Panel("Ranks and switches", pattern="(train|eval)/(adapter|lora|switch).*"),
        Panel("Accuracy", pattern="eval/(accuracy|exact_match).*"),
    ),
    "Retrieval": (
        Panel("Recall", pattern="eval/(recall|ndcg|mrr|hit).*"),
        Panel("Invalid and duplicate items", pattern="eval/(invalid|duplicate).*"),
        Panel("Decoding", pattern="eval/(latency|users_per_second|codebook).*"),
    ),
    "CTR": (
        Panel("AUC", pattern="eval/g?auc.*"),
        Panel("Log loss", pattern="eval/log_?loss.*"),
        Panel("By time", pattern="eval/(bucket|lag).*"),
    ),
}


def describe() -> str:
    """The sections and panels in words, without an account."""
    lines = []
    for section, panels in SECTIONS.items():
        lines.append(section)
        lines += [
            f"  {panel.title}: {', '.join(panel.metrics) or panel.pattern}"
            + (" (stacked)" if panel.stacked else "")
            for panel in panels
        ]
    return "\n".join(lines)


def build(entity: str, project: str, name: str) -> Any:
    """The workspace as wandb-workspaces has it; nothing is sent."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2

    def plot(panel: Panel) -> Any:
        reports: Any = v2  # it does not say what it exports
        return reports.LinePlot(
            title=panel.title,
            x="step",
            y=list(panel.metrics),
            metric_regex=panel.pattern or None,
            plot_type="stacked-area" if panel.stacked else "line",
        )

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(name=section, panels=[plot(p) for p in panels], is_open=number < 2)
            for number, (section, panels) in enumerate(SECTIONS.items())
        ],
    )


def missing() -> str | None:
    """What stands between us and wandb's server, and what to do about it."""
    if find_spec("wandb_workspaces") is None:
        return "wandb-workspaces is not installed: pip install 'springtide[dashboard]'"
    if not has_key():
        return "there is no wandb account: set WANDB_API_KEY, or run wandb login"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the workspace and save it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.dashboard", description="The wandb workspace of our runs, as code."
    )
    parser.add_argument("--entity", help="by default that of the account")
    parser.add_argument("--project", default="springtide")
    parser.add_argument("--name", default="Springtide", help="of the workspace")
    parser.add_argument("--print", action="store_true", help="show it; needs no account")
    given = parser.parse_args(arguments)
    if given.print:
        print(describe())
        return 0
    lack = missing()
    if lack is not None:
        print(f"error: {lack}; --print shows the dashboard without", file=sys.stderr)
        return 2
    import wandb

    try:
        entity = given.entity or wandb.Api().default_entity or ""
        workspace = build(entity, given.project, given.name)
        workspace.save()
    except (wandb.Error, OSError, ValueError) as error:
        print(f"error: wandb did not take it: {error}", file=sys.stderr)
        return 1
    print(f"saved: {workspace.url}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
