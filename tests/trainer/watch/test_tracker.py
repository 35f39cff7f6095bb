"""Weights & Biases: offline unless asked, never in the way, and without gap or overlap on resume."""

import struct
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.runs.helpers import wait_for
from trainer.watch import tracker
from trainer.watch.config import LoggingConfig, WandbConfig
from trainer.watch.record import Record
from trainer.watch.redact import redact
from trainer.watch.tracker import PATIENCE, Tracker, named, wandb_step


def train(step, loss=1.0):
    return {"kind": "train", "step": step, "loss": loss}


def evaluated(step):
    return {"kind": "eval", "step": step, "loss": 2.0}


class Server:
    """wandb as the tracker sees it: a server that keeps rows by run, or cannot be reached."""

    def __init__(self, monkeypatch):
        self.rows, self.inits, self.reachable, self.deaf = {}, [], True, False
        self.in_use = set()
        module = ModuleType("wandb")
        module.Error = type("Error", (Exception,), {})
        module.Settings = lambda **settings: SimpleNamespace(**settings)
        module.init, module.teardown = self.init, self.teardown
        module.Html = lambda text, inject: text
        self.module = module
        monkeypatch.setitem(sys.modules, "wandb", module)

    def teardown(self):
        self.in_use.clear()

    def init(self, **given):
        assert given["id"] not in self.in_use, "wandb's service would refuse"
        self.inits.append(given)
        self.in_use.add(given["id"])
        if given["mode"] == "online" and not self.reachable:
            raise self.module.Error("timed out\nmore words")
        known = self.rows.setdefault(given["id"], {}) if given["mode"] == "online" else {}
        if given["mode"] == "offline":
            self.offline = known

        def log(row, step):
            assert step not in known, "wandb would merge or drop this row"
            assert step > max(known, default=-1), "wandb would drop this row"
            if not self.deaf:
                known[step] = row

        return SimpleNamespace(
            define_metric=lambda *names, **more: None,
            starting_step=max(known, default=-1) + 1,
            log=log,
            finish=lambda exit_code: self.in_use.clear(),
        )


def follow(config, folder, step, kept, rows, run_id="id"):
    one = Tracker(config, folder, run_id, print)
    one.open({}, step, kept)
    for row in rows:
        one.log(row)
    one.close(0)
    return one


ONLINE = WandbConfig(mode="online")


def test_online_a_resumed_run_has_each_row_once(monkeypatch, tmp_path):
    """Saved at 10, ran to 15, killed, resumed at 10."""
    monkeypatch.setenv("WANDB_API_KEY", "k")
    server = Server(monkeypatch)
    first = [train(5), train(10), evaluated(10), train(12), train(15)]
    follow(ONLINE, tmp_path, 0, [], first)
    again = [train(12), train(15), evaluated(15), train(20)]
    follow(ONLINE, tmp_path, 10, first[:3], again)
    steps = [(row["step"], "eval/loss" in row) for row in server.rows["id"].values()]
    assert steps == [
        (5, False), (10, False), (10, True), (12, False), (15, False), (15, True), (20, False),
    ]  # fmt: skip
    assert all(given["resume"] == "allow" for given in server.inits)


def test_online_rows_that_a_kill_kept_from_the_server_are_sent_after_the_resume(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    server = Server(monkeypatch)
    follow(ONLINE, tmp_path, 0, [], [train(5)])
    server.deaf = True  # what is logged from here on never arrives
    follow(ONLINE, tmp_path, 0, [], [train(10), evaluated(10), train(15)])
    server.deaf = False
    follow(ONLINE, tmp_path, 10, [train(5), train(10), evaluated(10)], [train(15)])
    assert list(server.rows["id"]) == [10, 20, 21, 30]


def test_panels_of_the_task_stand_beside_each_evaluation(monkeypatch, tmp_path):
    server = Server(monkeypatch)
    record = Record(LoggingConfig(wandb=WandbConfig(mode="offline")), tmp_path, print, None)
    record.open({}, 0)
    panel = {"title": "Groups <1>", "kind": "heatmap", "rows": ["r"], "columns": ["new", "old"],
             "values": [[1.5, None]]}  # fmt: skip
    record.panels(lambda: [panel])
    for row in (train(5), evaluated(5)):
        record.write(row)
    record.close(0)
    assert "eval/panels" not in server.offline[10]
    shown = server.offline[11]["eval/panels"]
    assert "Groups &lt;1&gt;" in shown
    assert "r, new: 1.5" in shown


def test_online_without_an_answer_goes_offline_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    server = Server(monkeypatch)
    server.reachable = False
    said = []
    one = Tracker(ONLINE, tmp_path, None, said.append)
    one.open({}, 0, [])
    assert [given["mode"] for given in server.inits] == ["online", "offline"]
    assert server.inits[0]["settings"].init_timeout == PATIENCE
    assert said == ["wandb is offline: it cannot be reached (timed out)"]
    one.log(train(1))
    assert list(server.offline) == [2]


def test_online_without_a_key_goes_offline_without_asking(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    server = Server(monkeypatch)
    assert tracker.mode(ONLINE) == "offline"
    follow(ONLINE, tmp_path, 0, [], [train(1)])
    assert [given["mode"] for given in server.inits] == ["offline"]
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert tracker.mode(ONLINE) == "online"
    assert tracker.mode(WandbConfig()) == "offline"


def test_rows_about_the_run_stay_at_home():
    assert wandb_step(train(7)) < wandb_step(evaluated(7)) < wandb_step(train(8))
    assert named(evaluated(3)) == {"step": 3, "eval/loss": 2.0}


@pytest.mark.slow
def test_offline_a_resumed_run_is_one_run_with_each_row_once(monkeypatch, tmp_path):
    """The real thing, read back from its file; the one before is put aside. No secret is in it."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("SECRET_IN_ENVIRONMENT", "hunter2hunter2")
    offline = WandbConfig(mode="offline")
    first = [train(5), evaluated(5), train(10)]
    plain = redact({"hub": {"token": "abcdefabcdef"}})
    for step, kept, rows in (
        (0, [], first),
        (5, first[:2], [train(10), {"kind": "save", "step": 10}]),
    ):
        one = Tracker(offline, tmp_path, "one", print)
        one.open(plain, step, kept)
        one.panels = [{"title": "Some words", "kind": "text", "text": "hello"}]
        for row in rows:
            one.log(row)
        one.close(0)
    [current] = (tmp_path / "wandb").glob("offline-run-*/run-one.wandb")
    [old] = (tmp_path / "wandb" / "superseded").glob("offline-run-*/run-one.wandb")
    assert history(current) == [(10, "5"), (11, "5"), (20, "10")]
    assert history(old) == [(10, "5"), (11, "5"), (20, "10")]
    [shown] = old.parent.rglob("*.html")
    assert "hello" in shown.read_text()
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        assert b"hunter2hunter2" not in file.read_bytes(), file
        assert b"abcdefabcdef" not in file.read_bytes(), file


def history(file):
    """`_step` and `step` of every row in a file of wandb, whose own process writes the end of it."""
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    def read():
        found = [Entry.FromString(data) for data in entries(file.read_bytes())]
        return found if found and found[-1].WhichOneof("record_type") == "exit" else None

    rows = [e.history for e in wait_for(read) if e.WhichOneof("record_type") == "history"]
    named = [{i.key or ".".join(i.nested_key): i.value_json for i in row.item} for row in rows]
    return [
        (int(items.get("_step", row.step.num)), items["step"])
        for row, items in zip(rows, named, strict=True)
    ]


def entries(data, block=32768):
    """The entries of a log in LevelDB's format, after wandb's seven bytes of its own."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_a_view_that_breaks_is_switched_off(tmp_path, monkeypatch):
    said = []
    record = Record(LoggingConfig(wandb=WandbConfig(mode="offline")), tmp_path, said.append, None)
    monkeypatch.setattr(record.tracker, "_start", lambda *given: 1 / 0)
    record.open({}, 0)
    record.write(train(1))
    record.close(0)
    assert said == ["wandb is switched off after an error: ZeroDivisionError: division by zero"]
    assert (tmp_path / "report.html").is_file()


def test_tensorboard_is_an_extra(monkeypatch):
    from trainer.watch import config

    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'springtide\[tensorboard\]'"):
        LoggingConfig(tensorboard=True)
    assert LoggingConfig().tensorboard is False
