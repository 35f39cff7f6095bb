"""The page: its parts in order, its styles and its script inside it."""

import base64
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer.watch.page import figures, inside, sections
from trainer.watch.page.chart import write_chart
from trainer.watch.page.figures import Figure
from trainer.watch.page.panels import write_panel
from trainer.watch.page.runs import Run, load_run


def write_page(folders: Sequence[Path], target: Path) -> None:
    """Write the page about the runs in `folders`. Raises `ValueError` if one is no run folder.

    A reader never sees half of it.
    """
    html = page([load_run(folder) for folder in folders])
    temporary = target.with_name(f".{target.name}")
    temporary.write_bytes(html.encode("utf-8", "replace"))
    os.replace(temporary, target)


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    style, script = _part("page.css"), _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing may be loaded, and no script may run but ours, whatever a name or a panel says.
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    title = ", ".join(run.name for run in runs)
    parts = {
        "Summary": sections.summary(runs),
        "Training": _charts(figures.training(runs)) + _about_marks(runs),
        "Speed": _charts(figures.speed(runs)),
        "Memory": _charts(figures.memory(runs)),
        "Inside the model": _panels(runs, inside.panels),
        "From the task": _panels(runs, lambda run: run.panels),
        "Checkpoints": sections.checkpoints(runs),
        "Events": sections.event_table(runs),
        "Settings": _settings(runs),
    }
    links = "".join(f'<a href="#{_id(name)}">{name}</a>' for name, body in parts.items() if body)
    body = "".join(
        f'<section id="{_id(name)}"><h2>{name}</h2>{part}</section>'
        for name, part in parts.items()
        if part
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} · Springtide</title>
<style>{style}</style></head>
<body><header>{_heading(runs)}<nav>{links}</nav></header>
<main>{body}</main>
<footer>Written {time.strftime("%Y-%m-%d %H:%M:%S")} from metrics.jsonl by Springtide.</footer>
<script>{script}</script></body></html>
"""


def panel_page(panels: Sequence[Any]) -> str:
    """A document with panels alone, for a tracker that shows one."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{_part("page.css")}</style></head>
<body><main><div class="charts">{"".join(map(write_panel, panels))}</div></main></body></html>
"""


def _heading(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        buttons = "".join(
            f'<button type="button" aria-pressed="true" data-run="{number}">'
            f'<i class="c{number % 8}"></i>{escape(run.name)}</button>'
            for number, run in enumerate(runs)
        )
        return f'<h1>{len(runs)} runs</h1><div class="legend runs">{buttons}</div>'
    word, meaning = sections.state(runs[0])
    return (
        f'<h1>{escape(runs[0].name)} <span class="state {word}" title="{escape(meaning)}">{word}'
        f"</span></h1><p>{escape(sections.subtitle(runs[0]))}; {escape(meaning)}</p>"
    )


def _charts(found: Sequence[Figure]) -> str:
    return f'<div class="charts">{"".join(map(write_chart, found))}</div>' if found else ""


def _about_marks(runs: Sequence[Run]) -> str:
    if not any(figures.marks(run, 0) for run in runs):
        return ""
    return '<p class="note">Dotted lines: restarts, failures and skipped steps.</p>'


def _panels(runs: Sequence[Run], panels: Callable[[Run], Sequence[Any]]) -> str:
    several = len(runs) > 1
    found = [
        write_panel(panel, run.name if several else "") for run in runs for panel in panels(run)
    ]
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def _settings(runs: Sequence[Run]) -> str:
    different = sections.differences(runs) if len(runs) > 1 else ""
    return different + "".join(
        f"<details{'' if len(runs) > 1 else ' open'}><summary>config.yaml"
        f"{f' of {escape(run.name)}' if len(runs) > 1 else ''}</summary>"
        f"<pre>{escape(run.config)}</pre></details>"
        for run in runs
        if run.config
    )


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _part(name: str) -> str:
    return files("trainer.watch.page").joinpath(name).read_text(encoding="utf-8")
