"""The curves of a report, as plain data: which there are, and what is in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainer.watch.page.runs import Row, Run

POINTS = 300
"""A longer curve is shown by the lowest and highest point of so many parts."""

SPLIT = (
    ("data", "data_seconds"),
    ("forward", "forward_seconds"),
    ("backward", "backward_seconds"),
    ("communication", "communication_seconds"),
    ("optimizer", "optimizer_seconds"),
    ("evaluation", "evaluation_seconds"),
    ("saving", "saving_seconds"),
)


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: list[tuple[float, float]]
    color: int
    style: str = "line"
    """line, dashed, or dots."""
    run: int | None = None
    """The run that it is about, where several are compared: one click hides all that is about it."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    x: float
    text: str
    color: int


@dataclass(frozen=True)
class Figure:
    """Curves over one axis."""

    title: str
    about: str
    series: list[Series]
    form: str = "number"
    """How values are written: number, share, seconds, GiB, or count."""
    zero: bool = False
    """Whether the axis begins at zero."""
    stacked: bool = False
    cut: bool = False
    """Whether outliers may be cut off."""
    x: str = "step"
    marks: list[Mark] = field(default_factory=list)


def curve(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Step and value of a key, where it has one."""
    return [(row["step"], row[key]) for row in rows if is_number(row.get(key))]


def is_number(value: object) -> bool:
    """Whether it can be drawn; null and true cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def thin(points: list[tuple[float, float]], parts: int = POINTS) -> list[tuple[float, float]]:
    """At most twice `parts` of the points, among them the lowest and highest of each part."""
    if len(points) <= 2 * parts:
        return points
    kept: set[int] = {0, len(points) - 1}
    for part in range(parts):
        inside = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        kept.add(min(inside, key=lambda i: points[i][1]))
        kept.add(max(inside, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)][: 2 * parts + 2]


def training(runs: Sequence[Run]) -> list[Figure]:
    """Loss, evaluation, norm, learning rate."""
    figures = [
        _figure(
            runs, "Loss", "Mean over all labels; dashed, the rank whose mean was highest.", "train",
            (("loss", "", "line"), ("loss_max", "highest rank", "dashed")),
        )
    ]  # fmt: skip
    figures += evaluation(runs)
    figures += [
        replace(
            _figure(
                runs,
                "Gradient norm",
                "Before clipping.",
                "train",
                (("grad_norm", "", "line"),),
                zero=True,
            ),
            cut=True,
        ),
        _figure(runs, "Learning rate", "", "train", (("lr", "", "line"),), zero=True),
    ]
    return _drawn(figures, runs)


def evaluation(runs: Sequence[Run]) -> list[Figure]:
    """A figure for each number that evaluations report."""
    keys: list[str] = []
    for run in runs:
        for row in run.of("eval"):
            keys += [k for k in row if k not in ("kind", "step", "time") and k not in keys]
    return [
        _figure(runs, f"Evaluation: {key}", "On held-out data.", "eval", ((key, "", "line"),))
        for key in keys
    ]


def speed(runs: Sequence[Run]) -> list[Figure]:
    """Throughput, MFU, goodput, the split of a step, balance."""
    split = [step_split(run, number, len(runs)) for number, run in enumerate(runs)]
    figures = [
        _figure(
            runs, "Tokens per second and device", "", "train",
            (("tokens_per_second_per_device", "", "line"),), form="count", zero=True,
        ),
        _figure(
            runs, "MFU", "Of the device's bf16 peak.", "train", (("mfu", "", "line"),),
            form="share", zero=True,
        ),
        _figure(
            runs, "Goodput", "Time in steps that count, of all time since the first start.", "train",
            (("goodput", "", "line"),), form="share", zero=True,
        ),
        _figure(
            runs, "Imbalance", "Compute of the slowest rank over the mean; 1 is even.", "train",
            (("imbalance", "", "line"),),
        ),
    ]  # fmt: skip
    return [*_drawn(split), *_drawn(figures, runs)]


def memory(runs: Sequence[Run]) -> list[Figure]:
    """Peak memory and what the allocator had to do for it."""
    figures = [
        _figure(
            runs, "Peak memory of a rank", "Reserved on the GPU, or resident; dashed, in tensors.",
            "train", (("memory_gib", "peak", "line"), ("memory_allocated_gib", "in tensors", "dashed")),
            form="GiB", zero=True,
        ),
    ]  # fmt: skip
    retries = _figure(
        runs, "Allocator retries", "Times that the allocator had to give its cache back.", "train",
        (("alloc_retries", "", "line"),), form="count", zero=True,
    )  # fmt: skip
    if any(y for series in retries.series for _, y in series.points):
        figures.append(retries)
    return _drawn(figures, runs)


def step_split(run: Run, number: int, of: int) -> Figure:
    """Where the time of a step goes, saves and evaluations shared out over the steps."""
    rows = [row for row in run.of("train") if is_number(row.get("step_seconds"))]
    kept = {x for x, _ in thin([(row["step"], row["step_seconds"]) for row in rows])}
    rows = [row for row in rows if row["step"] in kept]

    def part(get: Callable[[Row], float]) -> list[tuple[float, float]]:
        return [(row["step"], get(row)) for row in rows]

    def other(row: Row) -> float:
        known = sum(row.get(key) or 0.0 for _, key in SPLIT[:5])
        return max(row["step_seconds"] - known, 0.0)

    series = [
        Series(name, part(lambda row, key=key: row.get(key) or 0.0), color)  # type: ignore[misc]
        for color, (name, key) in enumerate(SPLIT)
    ]
    series = [s for s in series if any(y for _, y in s.points)]
    if series and any(other(row) for row in rows):
        series.append(Series("other", part(other), len(SPLIT)))
    return Figure(
        title="Step time" + (f": {run.name}" if of > 1 else ""),
        about="Seconds a step, mean over ranks. Communication is what compute waits for.",
        series=series, form="seconds", stacked=True, cut=True, marks=marks(run, number),
    )  # fmt: skip


def marks(run: Run, color: int) -> list[Mark]:
    """Restarts, skips and failures."""
    found = [
        Mark(row["step"], f"{run.name} restarted", color)
        for row in run.of("start")[1:]
    ]  # fmt: skip
    found += [
        Mark(row["step"], f"{run.name} failed", color)
        for row in run.of("end")
        if row.get("code") not in (0, 75)
    ]
    return found + [Mark(step, f"{run.name} skipped", color) for step, _ in skips(run)]


def skips(run: Run) -> list[tuple[int, int]]:
    """Rows that count more skipped steps than the row before, and how many more."""
    found, before = [], 0
    for row in run.rows:
        if row["kind"] not in ("start", "train"):
            continue
        count = row.get("skipped") or 0
        if count > before and row["kind"] == "train":
            found.append((row["step"], count - before))
        before = count
    return found


def _figure(
    runs: Sequence[Run],
    title: str,
    about: str,
    kind: str,
    keys: Sequence[tuple[str, str, str]],
    form: str = "number",
    zero: bool = False,
) -> Figure:
    """The same keys of every run; a key is its name, what to call it, and a style."""
    series = []
    for number, run in enumerate(runs):
        for key, words, style in keys:
            points = curve(run.of(kind), key)
            label = " · ".join(w for w in (run.name if len(runs) > 1 else "", words) if w)
            if points:
                name = label or key.replace("_", " ")
                about_run = number if len(runs) > 1 else None
                series.append(Series(name, thin(points), number, style, about_run))
    return Figure(title, about, series, form, zero)


def _drawn(figures: Sequence[Figure], runs: Sequence[Run] = ()) -> list[Figure]:
    """Those that have something in them, with what happened to the runs."""
    happened = [mark for number, run in enumerate(runs) for mark in marks(run, number)]
    return [replace(figure, marks=figure.marks or happened) for figure in figures if figure.series]
