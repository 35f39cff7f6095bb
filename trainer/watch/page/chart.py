"""A figure as HTML: an SVG that stretches, labels that do not, and its data as CSV.

The CSV in the download link is the page's only copy of the data; its script reads values from there.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from urllib.parse import quote

from trainer.watch.page.figures import Figure, Series

SIZE = 1000
"""Width and height of an SVG's own coordinates; it is stretched to whatever room there is."""


def write_chart(figure: Figure) -> str:
    """The figure with title, legend, axes, curves and CSV."""
    series = _stack(figure.series) if figure.stacked else figure.series
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    x_low, x_high = _spread(min(xs), max(xs))
    if figure.stacked:  # the first part of a stack has a width, too
        x_low = max(2 * xs[0] - xs[1], 0) if len(series[0].points) > 1 else 0
    highest, cut = limit(ys) if figure.cut else (max(ys), False)
    y_low, y_high = _y_range(min(ys), highest, figure.zero or figure.stacked)
    scale = _Scale(x_low, x_high, y_low, y_high)
    y_ticks, x_ticks = ticks(y_low, y_high, 5), ticks(x_low, x_high, 6)
    grid = "".join(f'<path class="grid" d="M0 {scale.y(y):.1f}H{SIZE}"/>' for y in y_ticks)
    marks = "".join(
        f'<path class="mark c{mark.color % 8}" d="M{scale.x(mark.x):.1f} 0V{SIZE}">'
        f"<title>{escape(mark.text)} at {figure.x} {mark.x:g}</title></path>"
        for mark in figure.marks
        if x_low <= mark.x <= x_high
    )
    if figure.stacked:  # the highest first: those below are drawn over it
        curves = "".join(_area(series, n, scale) for n in reversed(range(len(series))))
    else:
        curves = "".join(_line(series, n, scale) for n in range(len(series)))
    labels_y = "".join(
        f'<span style="top:{scale.y(y) / SIZE:.2%}">{written(y, figure.form)}</span>'
        for y in y_ticks
    )
    labels_x = "".join(
        f'<span style="left:{scale.x(x) / SIZE:.2%}">{written(x, "count")}</span>' for x in x_ticks
    )
    return f"""<figure class="chart" data-form="{escape(figure.form)}" data-x="{escape(figure.x)}"
 data-range="{x_low} {x_high} {y_low} {y_high}" data-stacked="{int(figure.stacked)}">
{caption(figure.title, figure.about + cut * " Higher values are cut off.", csv_of(figure))}
{_legend(figure.series)}
<div class="plot"><div class="y">{labels_y}</div>
<div class="area{cut * " cut"}"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none"
 role="img" aria-label="{escape(figure.title)}">{grid}{marks}{curves}</svg>
<div class="cursor"></div></div>
<div class="x">{labels_x}</div></div>
</figure>"""


def caption(title: str, about: str, data: str) -> str:
    """Title, what it means, and the link to its data."""
    file = "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-") or "data"
    return (
        f"<figcaption><h3>{escape(title)}</h3>"
        f'<a class="csv" download="{escape(file)}.csv" '
        f'href="data:text/csv;charset=utf-8,{quote(data, safe=",")}">CSV</a>'
        f"<p>{escape(about)}</p></figcaption>"
    )


def csv_of(figure: Figure) -> str:
    """One line for each x, one column for each series; empty where it has no point."""
    columns = [dict(series.points) for series in figure.series]
    xs = sorted({x for column in columns for x in column})
    rows = [[f"{x:.10g}", *(_cell(column.get(x)) for column in columns)] for x in xs]
    return csv_text([figure.x, *(series.name for series in figure.series)], rows)


def csv_text(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """CSV whose every row is one line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in [header, *rows]:
        writer.writerow(" ".join(str(cell).split()) for cell in row)
    return file.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"


class _Scale:
    """From values to the SVG's coordinates."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x, self._width = x_low, x_high - x_low
        self._y, self._height = y_high, y_high - y_low

    def x(self, value: float) -> float:
        return (value - self._x) / self._width * SIZE

    def y(self, value: float) -> float:
        return (self._y - value) / self._height * SIZE


def _line(series: list[Series], number: int, scale: _Scale) -> str:
    one = series[number]
    at = [(scale.x(x), scale.y(y)) for x, y in one.points]
    style = one.style
    if style == "dots" or len(at) == 1:
        style, path = "dots", "".join(f"M{x:.1f} {y:.1f}h0" for x, y in at)
    else:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    return f'<path class="curve {style} c{one.color % 8}" {_names(one, number)} d="{path}"/>'


def _area(series: list[Series], number: int, scale: _Scale) -> str:
    """Down to the axis, under the parts that are drawn over it; a row is about the steps before it."""
    one = series[number]
    path = f"M0 {SIZE}" + "".join(f"V{scale.y(y):.1f}H{scale.x(x):.1f}" for x, y in one.points)
    path += f"V{SIZE}Z"
    return f'<path class="band c{one.color % 8}" {_names(one, number)} d="{path}"/>'


def _names(one: Series, number: int) -> str:
    """What the page's script asks a curve for."""
    run = "" if one.run is None else f' data-run="{one.run}"'
    return f'data-series="{number}"{run} data-name="{escape(one.name)}"'


def _stack(series: list[Series]) -> list[Series]:
    """Each curve on top of those before it; all have the same x."""
    sums: dict[float, float] = {}
    stacked = []
    for one in series:
        for x, y in one.points:
            sums[x] = sums.get(x, 0.0) + y
        points = [(x, sums[x]) for x, _ in one.points]
        stacked.append(replace(one, points=points))
    return stacked


def _legend(series: Sequence[Series]) -> str:
    """A button for each curve, which shows and hides it; runs have theirs at the top of the page."""
    if len(series) == 1 or all(one.run is not None for one in series):
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{number}">'
        f'<i class="{escape(one.style)} c{one.color % 8}"></i>{escape(one.name)}</button>'
        for number, one in enumerate(series)
    )
    return f'<div class="legend">{buttons}</div>'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, `about` as many as asked for."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def limit(values: Sequence[float]) -> tuple[float, bool]:
    """Where an axis ends so that a few outliers do not flatten the rest; whether it cuts them off."""
    ordered = sorted(values)
    usual = ordered[int(0.9 * (len(ordered) - 1))]
    return (2 * usual, True) if 0 < 4 * usual < ordered[-1] else (ordered[-1], False)


def _spread(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _y_range(low: float, high: float, zero: bool) -> tuple[float, float]:
    """The axis: some room above and below, nothing below zero for what starts there."""
    if zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def written(value: float, form: str) -> str:
    """A number for a reader: `1.2k`, `45 %`, `12 ms`."""
    if value == 0:
        return "0"
    if form == "share":
        return f"{100 * value:.3g} %"
    if form == "seconds":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    if form == "GiB":
        return f"{value:.3g} GiB" if abs(value) < 1000 else f"{value:.0f} GiB"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
