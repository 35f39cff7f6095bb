"""The report: what is on the page, and that nothing in a run can be more than text on it."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.trainer.watch.runs import HOSTILE, ROWS, SPIKE, STALL, STATISTICS, make_run, start, train
from trainer.report import main
from trainer.watch.config import LoggingConfig, WandbConfig
from trainer.watch.page import chart, figures, panels, sections
from trainer.watch.page.figures import Figure, Series, thin
from trainer.watch.page.page import page
from trainer.watch.page.runs import Run, load_run
from trainer.watch.record import Record


class Elements(HTMLParser):
    """The elements of a page, its texts, and the CSV behind its links."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.attributes, self.tables = [], [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.attributes += found.items()
        if found.get("class") == "csv":
            data = unquote(found["href"].split(",", 1)[1])
            self.tables[found["download"]] = list(csv.reader(io.StringIO(data)))

    def handle_data(self, data):
        self.texts.append(data)


def test_one_run_has_it_all(tmp_path):
    html = page([load_run(make_run(tmp_path / "first"))])
    found = Elements(html)
    assert found.tags.count("h1") == 1
    for title in ("Loss", "Evaluation: loss", "Gradient norm", "Learning rate", "MFU", "Goodput",
                  "Tokens per second and device", "Step time", "Imbalance",
                  "Peak memory of a rank", "Recall", "Layers", "Buckets", "Of tomorrow"):  # fmt: skip
        assert title in found.texts, title
    assert found.tables["loss.csv"] == [
        ["step", "loss", "highest rank"], ["10", "2.9", "3.1"], ["20", "2.8", "3.1"], ["30", "", "3.1"],
    ]  # fmt: skip
    split = found.tables["step-time.csv"]
    assert split[0] == [
        "step",
        "data",
        "forward",
        "backward",
        "communication",
        "optimizer",
        "other",
    ]
    assert [float(x) for x in split[1]] == pytest.approx([10, 0.01, 0.06, 0.1, 0.02, 0.005, 0.005])
    events = [
        t for t in found.texts if t.startswith(("started", "saved", "evaluated", "failed", "done"))
    ]
    assert events == [
        "done", "done", "started again, from step-00000020", f"failed with exit code 1: {HOSTILE}",
        "saved step-00000010", "evaluated: loss 2.95", "started",
    ]  # fmt: skip
    assert "2 steps skipped: loss or gradient not finite" in found.texts
    assert "step-00000010 (latest)" in found.texts


def test_what_stood_out_stalled_or_was_asked_for_is_there(tmp_path):
    rows = [start(0), SPIKE, STALL, STATISTICS, train(10)]
    found = Elements(page([load_run(make_run(tmp_path / "r", rows, ()))]))
    assert "stalled: rank 0: communication; rank 1: silent" in found.texts
    assert (
        "stands out: loss 9 instead of 2.5, grad norm not finite instead of 1; highest on rank 1, "
        "samples 4 (tokens 0-7 of document 1 of a.jsonl:2), 5"
    ) in found.texts
    for title, value in (("gradient-norm-of-blocks", 5.0), ("weight-norm-of-blocks", 0.1),
                         ("activations-of-blocks--root-mean-square", 100.0),
                         ("activations-of-blocks--largest", 1000.0)):  # fmt: skip
        [head, [name, power]] = found.tables[f"{title}.csv"]
        assert (head, name) == (["", "step 10"], "layers.1")
        assert 10 ** float(power) == pytest.approx(value)


@pytest.mark.parametrize("broken", [5, HOSTILE, [], {"a": HOSTILE}, {HOSTILE: {"norm": HOSTILE}}])
def test_odd_rows_of_a_run_are_text_at_most(broken):
    rows = [{"kind": kind, "step": 3, **dict.fromkeys(keys, broken)}
            for kind, keys in (("statistics", ("gradients", "weights", "activations")),
                               ("stall", ("ranks",)),
                               ("spike", ("loss", "rank", "rank_samples", "where")))]  # fmt: skip
    found = Elements(page([Run("r", [start(0), *rows])]))
    assert found.tags.count("script") == 1
    assert "img" not in found.tags


@pytest.mark.parametrize("several", [False, True])
def test_nothing_in_a_run_is_more_than_text(tmp_path, several):
    hostile = HOSTILE.replace("/", "")  # a folder cannot have that in its name
    rows = [*ROWS, {"kind": HOSTILE, "step": 40}, {"kind": "eval", "step": 40, HOSTILE: 1.0}]
    runs = [load_run(make_run(tmp_path / hostile, rows))]
    if several:
        runs.append(load_run(make_run(tmp_path / "other", panels=[HOSTILE, {"kind": HOSTILE}])))
    found = Elements(page(runs))
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    for _, value in found.attributes:  # nothing is loaded from anywhere
        assert value is None or not value.startswith(("http:", "https:", "//", "javascript:"))
    assert any(hostile in text for text in found.texts)
    assert any(HOSTILE in text for text in found.texts)


def test_several_runs_lie_over_each_other(tmp_path):
    first = load_run(make_run(tmp_path / "first"))
    second = load_run(make_run(tmp_path / "second", ROWS[:5], (), "optim:\n  lr: 0.002\n"))
    html = page([first, second])
    found = Elements(html)
    assert found.tables["gradient-norm.csv"][0] == ["step", "first", "second"]
    assert found.tables["step-time--second.csv"][1][0] == "10"
    assert "Recall: first" in found.texts
    at = found.texts.index("optim.lr")  # where they differ
    assert found.texts[at : at + 3] == ["optim.lr", "0.001", "0.002"]
    assert 'data-run="1"' in html


def test_a_run_without_a_step_has_a_page_too(tmp_path):
    html = page([load_run(make_run(tmp_path / "new", [start(0)], ()))])
    assert "No step has been reported yet." in html
    assert "running when this page was written, or killed" in html
    assert "NaN" not in html
    assert page([Run("empty")])


@pytest.mark.parametrize(
    ("ends", "word"), [([], "open"), ([0], "done"), ([75], "stopped"), ([5], "failed")]
)
def test_how_a_run_stands(ends, word):
    rows = [start(0), train(1), *({"kind": "end", "step": 1, "code": code} for code in ends)]
    assert sections.state(Run("r", rows))[0] == word
    assert sections.state(Run("r", [*rows, start(1)]))[0] == "open"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(2, 50))
def test_a_thinned_curve_keeps_its_ends_and_extremes(values, parts):
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points, parts)
    assert len(kept) <= max(2 * parts + 2, 2)
    assert kept == sorted(set(kept) & set(points))
    assert {min(values), max(values)} <= {y for _, y in kept}
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_round_and_inside(low, width, about):
    assume(width > 1e-6 * abs(low))
    found = chart.ticks(low, low + width, about)
    assert len(found) <= 2 * about + 2
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in found)


def test_outliers_do_not_flatten_the_rest():
    assert chart.limit([1.0] * 20 + [100.0]) == (2.0, True)
    assert chart.limit([1.0, 2.0, 3.0]) == (3.0, False)
    assert chart.limit([0.0] * 5) == (0.0, False)
    points = [(float(x), 100.0 if x == 0 else 1.0) for x in range(20)]
    html = chart.write_chart(Figure("t", "a.", [Series("s", points, 0)], cut=True))
    assert "Higher values are cut off." in html


def test_numbers_for_readers():
    pairs = [(0, "number", "0"), (1234567, "count", "1.235M"), (0.456, "share", "45.6 %"),
             (0.012, "seconds", "12 ms"), (1.5, "seconds", "1.5 s"), (80.25, "GiB", "80.2 GiB"),
             (3e-4, "number", "0.0003")]  # fmt: skip
    for value, form, text in pairs:
        assert chart.written(value, form) == text


BROKEN = [
    None, 5, [], "words", {}, {"kind": "lines"}, {"kind": "lines", "series": {"a": []}},
    {"kind": "lines", "series": [1]}, {"kind": "lines", "series": {"a": [[1]]}},
    {"kind": "heatmap", "rows": ["a"], "columns": ["b"], "values": []},
    {"kind": "heatmap", "rows": ["a"], "columns": ["b"], "values": [[None]]},
    {"kind": "table", "columns": 3, "rows": 4}, {"kind": "text", "text": 7}, {"kind": ["x"]},
    {"kind": "lines", "series": {"a": [[1, 1e308], [2, -1e308]]}},
]  # fmt: skip


@pytest.mark.parametrize("panel", BROKEN)
def test_a_panel_that_cannot_be_drawn_is_shown_as_text(panel):
    html = panels.write_panel(panel)
    assert "<pre>" in html
    assert "<svg" not in html


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["kind", "title", "series", "rows", "columns", "values", "form"])
                | st.text(max_size=3),
                st.sampled_from(["lines", "heatmap", "table", "text"]) | inner,
                max_size=6,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_a_panel_holds_it_is_shown(panel):
    html = panels.write_panel(json.loads(json.dumps(panel)))
    assert html.startswith("<figure")


def test_large_panels_are_thinned():
    values = [[r * c / 1e4 for c in range(300)] for r in range(200)]
    html = panels.write_panel({"title": "h", "kind": "heatmap", "values": values,
                               "rows": list(range(200)), "columns": list(range(300))})  # fmt: skip
    assert html.count("<rect") == 100 * 100
    html = panels.write_panel(
        {"title": "t", "kind": "table", "columns": ["n"], "rows": [[n] for n in range(500)]}
    )
    assert html.count("<tr>") == 201
    assert "300 more rows are in the CSV" in html


def test_long_runs_make_pages_that_open_fast():
    rows = [train(step) for step in range(1, 5001)]
    html = page([Run("long", rows)])
    assert len(html) < 1_500_000
    assert len(figures.training([Run("long", rows)])[0].series[0].points) <= 602


def test_what_is_no_row_or_no_text_is_left_out(tmp_path, capsys):
    folder = make_run(tmp_path / "a", [start(0), [1], 5, {"step": 3}, {"kind": "train"}],
                      [{"title": "half a letter \ud800", "kind": "text", "text": "\udfff"}])  # fmt: skip
    assert main([str(folder)]) == 0
    assert "half a letter ?" in (folder / "report.html").read_text()


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    assert main(["a"]) == 0
    assert capsys.readouterr().out == "a/report.html: open it in a browser\n"
    assert main(["a", "b"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert main(["a", "b", "--out", "both.html"]) == 0
    assert "2 runs" in (tmp_path / "both.html").read_text()
    assert not list(tmp_path.glob(".*.html"))


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["nowhere"]) == 2
    assert capsys.readouterr().err == (
        "error: nowhere is no run folder: it has no metrics.jsonl: give the folder of a run, such as "
        "runs/NAME\n"
    )
    make_run(tmp_path / "a")
    assert main(["a", "--out", "no/such/folder.html"]) == 2
    assert "set --out" in capsys.readouterr().err


def test_the_panels_of_the_documentation_are_drawn():
    text = (Path(__file__).parents[3] / "docs" / "writing-a-task.md").read_text()
    code = re.search(r"```python\n(def panels.*?)```", text, re.S)[1]
    found: dict = {}
    exec(code, found)
    shown = [panels.write_panel(panel) for panel in found["panels"](None)]
    assert [("<svg" in one, "<table" in one, "<pre" in one) for one in shown] == [
        (True, False, False), (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip


def test_a_tasks_panels_are_kept_and_broken_ones_switched_off(tmp_path):
    said = []
    record = Record(LoggingConfig(wandb=WandbConfig(mode="disabled")), tmp_path, said.append, None)
    record.open({}, 0)
    record.panels(lambda: [{"title": "mine", "kind": "text", "text": "words"}])
    record.panels(lambda: 1 / 0)
    record.panels(lambda: [])  # not asked again
    record.close(0)
    assert said == ["the task's panels are left out: ZeroDivisionError: division by zero"]
    assert "mine" in (tmp_path / "report.html").read_text()
