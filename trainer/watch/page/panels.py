"""What a task adds to the report: plain data from outside, so nothing in it is taken on trust.

A panel is an object with `title`, `kind` and what that kind needs (`docs/writing-a-task.md`); one of
a kind that is not known here, or that lacks something, is shown as text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from trainer.watch.page.chart import caption, csv_text, write_chart, written
from trainer.watch.page.figures import Figure, Series, is_number, thin

CELLS = 100
"""Rows and columns of a heatmap, at most; of more, evenly spaced ones are shown."""
ROWS = 200
"""Rows of a table, at most."""
LONG = 40
"""Letters of a cell that is broken into lines."""

Panel = Mapping[str, Any]


def write_panel(panel: Any, run_name: str = "") -> str:
    """One panel as HTML, whatever it holds."""
    if not isinstance(panel, Mapping):
        return _text({"title": "Panel", "text": panel}, run_name)
    write = KINDS.get(str(panel.get("kind")), _text)
    try:
        return write(panel, _title(panel, run_name))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        return _text(panel, _title(panel, run_name))


def _title(panel: Panel, run_name: str) -> str:
    title = str(panel.get("title", "Panel"))
    return f"{title}: {run_name}" if run_name else title


def _about(panel: Panel) -> str:
    return str(panel.get("about", ""))


def _lines(panel: Panel, title: str) -> str:
    series = [
        Series(str(name), thin([(float(x), float(y)) for x, y in points if is_number(y)]), number)
        for number, (name, points) in enumerate(panel["series"].items())
    ]
    drawn = [one for one in series if one.points]
    if not drawn:
        raise ValueError("nothing to draw")
    figure = Figure(title, _about(panel), drawn, str(panel.get("form", "number")),
                    x=str(panel.get("x", "step")))  # fmt: skip
    return write_chart(figure)


def _heatmap(panel: Panel, title: str) -> str:
    values = [[float(v) if is_number(v) else None for v in row] for row in panel["values"]]
    rows = [str(name) for name in panel["rows"]]
    columns = [str(name) for name in panel["columns"]]
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError("rows and columns are not those of the values")
    data = csv_text(["", *columns], [[name, *row] for name, row in zip(rows, values, strict=True)])
    some_rows, some_columns = _some(len(rows)), _some(len(columns))
    known = [v for row in values for v in row if v is not None]
    low, high = min(known), max(known)
    form = str(panel.get("form", "number"))
    cells = []
    for y, r in enumerate(some_rows):
        for x, c in enumerate(some_columns):
            value = values[r][c]
            if value is not None:
                weight = (value - low) / (high - low) if high > low else 0.5
                said = f"{rows[r]}, {columns[c]}: {written(value, form)}"
                cells.append(
                    f'<rect x="{x}" y="{y}" width="1.03" height="1.03" '
                    f'fill-opacity="{0.06 + 0.94 * weight:.3f}"><title>{escape(said)}</title></rect>'
                )
    size = f"0 0 {len(some_columns)} {len(some_rows)}"
    names = "".join(f"<span>{escape(rows[r])}</span>" for r in _some(len(rows), 12))
    below = "".join(f"<span>{escape(columns[c])}</span>" for c in _some(len(columns), 4))
    return f"""<figure class="chart heat">{caption(title, _about(panel), data)}
<div class="plot"><div class="names">{names}</div>
<div class="area"><svg viewBox="{size}" preserveAspectRatio="none" role="img"
 aria-label="{escape(title)}">{"".join(cells)}</svg></div><div class="below">{below}</div></div>
<p class="scale"><span>{written(low, form)}</span><i></i><span>{written(high, form)}</span></p>
</figure>"""


def _some(count: int, limit: int = CELLS) -> list[int]:
    """All of `count` numbers, or `limit` of them, evenly spaced."""
    if count <= limit:
        return list(range(count))
    return sorted({round(n * (count - 1) / (limit - 1)) for n in range(limit)})


def _table(panel: Panel, title: str) -> str:
    columns, rows = [str(name) for name in panel["columns"]], [list(row) for row in panel["rows"]]
    body = table(columns, rows[:ROWS])
    more = f"<p>{len(rows) - ROWS} more rows are in the CSV.</p>" if len(rows) > ROWS else ""
    return (
        f'<figure class="chart wide">{caption(title, _about(panel), csv_text(columns, rows))}'
        f"{body}{more}</figure>"
    )


def _text(panel: Panel, title: str) -> str:
    text = panel.get("text") if set(panel) <= {"title", "kind", "about", "text"} else None
    if not isinstance(text, str):
        text = json.dumps(panel, indent=1, default=str, ensure_ascii=False)
    return (
        f'<figure class="chart wide"><figcaption><h3>{escape(title)}</h3>'
        f"<p>{escape(_about(panel))}</p></figcaption><pre>{escape(text)}</pre></figure>"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table that scrolls by itself where it is wider than the screen; numbers to the right."""

    def cell(value: Any) -> str:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        if isinstance(value, int) and is_number(value):
            text = f"{value:,}"
        kind = ' class="number"' if is_number(value) else ' class="long"' * (len(text) > LONG)
        return f"<td{kind}>{escape(text)}</td>"

    numbers = [all(is_number(row[n]) for row in rows if n < len(row)) for n in range(len(columns))]
    kinds = [' class="number"' if number and rows else "" for number in numbers]
    head = "".join(f"<th{k}>{escape(c)}</th>" for k, c in zip(kinds, columns, strict=True))
    body = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


KINDS: dict[str, Callable[[Panel, str], str]] = {
    "lines": _lines,
    "heatmap": _heatmap,
    "table": _table,
    "text": _text,
}
