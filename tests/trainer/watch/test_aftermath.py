from tests.trainer.watch.runs import make_run, start, train
from trainer.watch.aftermath import note_failure, shortened
from trainer.watch.metrics import read

ENDED = {"kind": "end", "step": 5, "code": 5, "why": "NonFiniteError: too often"}
LOST = {"kind": "end", "step": 5, "code": 1, "why": "PeerError: rank 1 is gone"}


def test_a_killed_run_has_an_end_and_a_page(tmp_path):
    folder = make_run(tmp_path / "r", [start(0), train(5)], [])
    note_failure(folder, 1, "rank 1 was killed by SIGKILL (often the kernel, out of memory)")
    end = read(folder / "metrics.jsonl")[-1]
    assert (end["kind"], end["step"], end["code"]) == ("end", 5, 1)
    assert "killed by SIGKILL" in (folder / "report.html").read_text()


def test_the_cause_is_what_counts(tmp_path):
    folder = make_run(tmp_path / "r", [start(0), train(5), LOST], [])
    note_failure(folder, 1, "rank 1 failed:\nTraceback\nRuntimeError: it")
    note_failure(folder, 1, "rank 1 failed:\nTraceback\nRuntimeError: it")
    rows = read(folder / "metrics.jsonl")
    assert [row["kind"] for row in rows] == ["start", "train", "end"]
    assert rows[-1]["why"] == "rank 1 failed: RuntimeError: it"
    assert "after step 5: rank 1 failed: RuntimeError: it" in (folder / "report.html").read_text()


def test_a_reason_that_is_given_stands_and_a_run_that_never_began_has_none(tmp_path):
    for name, rows in (("ended", [start(0), train(5), ENDED]), ("never", [])):
        folder = make_run(tmp_path / name, rows, [])
        note_failure(folder, 1, "words")
        assert read(folder / "metrics.jsonl") == rows
        assert (folder / "report.html").exists() == (name == "ended")
    note_failure(tmp_path / "nowhere", 1, "words")


def test_the_end_of_an_earlier_attempt_stands(tmp_path):
    rows = [start(0), train(5), {**LOST, "time": 10.0}]
    folder = make_run(tmp_path / "r", rows, [])
    note_failure(folder, 4, "step-00000004 is damaged", since=20.0)
    note_failure(folder, 4, "step-00000004 is damaged", since=20.0)
    *before, end = read(folder / "metrics.jsonl")
    assert before == rows
    assert (end["code"], end["why"]) == (4, "step-00000004 is damaged")


def test_a_late_row_about_an_earlier_step_costs_no_row(tmp_path):
    """A checkpoint is reported when it is on the disk, steps after the one that it is of."""
    rows = [start(0), train(4), train(5), {"kind": "save", "step": 4, "name": "step-00000004"}]
    folder = make_run(tmp_path / "r", rows, [])
    note_failure(folder, 1, "rank 1 was killed by SIGKILL")
    *before, end = read(folder / "metrics.jsonl")
    assert (before, end["step"]) == (rows, 5)


def test_who_and_what():
    assert shortened("rank 1 failed:\nTraceback\n  line\nError: 5\n") == "rank 1 failed: Error: 5"
    assert shortened("one line") == "one line"
    assert shortened("") == ""
