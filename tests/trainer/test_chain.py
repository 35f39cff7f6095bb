"""Tasks that train nothing, and rows of tasks: on the example of SLIDE's stages."""

import json
import re

import pytest

from tests.ranks import forks
from tests.runs.helpers import metrics, program, train
from trainer import rundir
from trainer.chain import run_chain, stage_config
from trainer.compose import run_jobs
from trainer.config import build_config
from trainer.errors import DONE, FAILED, ConfigError
from trainer.plugins import tasks

TINY = (
    "+recipe=slide", "data=planted", "data.planted_users=60", "model.hidden_size=16", "model.num_layers=1",
    "trainer.batch_size=16", "trainer.workers=0", "trainer.eval_every=1", "checkpoint.every=0",
    "task.stages.sid_build.task.codes=32", "task.stages.sid_build.task.features=16",
    "task.stages.gr_train.trainer.steps=2", "task.stages.list_distill.trainer.steps=2",
    "task.stages.beam_export.task.shards=3", "logging.wandb.mode=disabled",
    "task.stages.list_eval.task.rows=[markov,'student:greedy','teacher:beam12']",
)  # fmt: skip


def composed(*words):
    found = []
    assert run_jobs([*TINY, *words], lambda plain, *_: found.append(plain) or 0) == 0
    return found[0]


def run_stage(plain):
    from trainer import worker

    raise SystemExit(worker.run({"config": plain, "kind": "local", "overrides": []}))


def forked(plain, overrides):
    """A stage on one rank of its own."""
    process = forks.Process(target=run_stage, args=(plain,))
    process.start()
    process.join(120)
    return process.exitcode


def test_all_stages_run_and_then_find_nothing_to_do(tmp_path, capfd):
    """From interactions to a comparison; the second time only finished stages are looked at."""
    plain = composed(f"run.dir={tmp_path}", "trainer.resume=auto")
    ran = []

    def run(plain, overrides):
        ran.append(plain["task"]["name"])
        return forked(plain, overrides)

    assert run_chain(build_config(plain), plain, [], run) == DONE
    assert ran == ["sid_build", "gr_train", "beam_export", "list_distill", "list_eval"]
    said = capfd.readouterr().out
    for stage in ("gr_train", "list_distill"):
        ndcg = [row["ndcg@10"] for row in metrics(tmp_path / stage, "eval")]
        best = ndcg.index(max(ndcg)) + 1
        assert f"step-{best:08d} of {tmp_path / stage} is in" in said
    result = json.loads((tmp_path / "list_eval" / "eval.json").read_text())
    assert set(result["rows"]) == {"markov", "student:greedy", "teacher:beam12"}
    for kind in ("raw", "new"):
        assert all(
            row[kind]["repeats"] == row[kind]["missing"] == 0 for row in result["rows"].values()
        )
    inputs = {
        stage: json.loads((tmp_path / stage / "manifest.json").read_text())["inputs"]
        for stage in ("sid_build", "beam_export", "list_eval")
    }
    assert inputs["beam_export"].keys() == {"data", "sids", "teachers"}
    assert inputs["list_eval"]["teacher"] == inputs["beam_export"]["teachers"]
    assert (tmp_path / "list_eval" / "report.html").is_file()
    files = [p for p in tmp_path.rglob("*") if p.suffix in (".parquet", ".npz")]
    when = {file: file.stat().st_mtime_ns for file in files}
    rundir.unlock()  # as at the end of a command
    assert run_chain(build_config(plain), plain, [], run) == DONE
    assert {file: file.stat().st_mtime_ns for file in files} == when
    # other settings are not mixed in
    changed = composed(f"run.dir={tmp_path}", "task.stages.sid_build.task.codes=33")
    rundir.unlock()
    capfd.readouterr()
    assert run_chain(build_config(changed), changed, [], forked) != DONE
    assert "sid_build ended with exit code 3" in capfd.readouterr().err
    rundir.unlock()


def test_a_stage_that_fails_ends_the_chain(tmp_path):
    plain, ran = composed(f"run.dir={tmp_path}"), []
    assert run_chain(build_config(plain), plain, [], lambda p, _: ran.append(p) or FAILED) == FAILED
    assert len(ran) == 1


def test_each_stage_has_its_own_settings_on_top_of_the_chains(tmp_path):
    plain = composed("optim.lr=5e-3", "+task.stages.gr_train.optim.lr=7e-3")
    stages = tasks()["slide"](task=build_config(plain).task, model=None, data=None, seed=0).stages(
        tmp_path
    )
    its = {stage.name: build_config(stage_config(plain, stage, tmp_path)) for stage in stages}
    assert its["gr_train"].optim.lr == 7e-3
    assert its["list_distill"].optim.lr == 5e-3
    assert its["gr_train"].model.list_length == 0
    assert its["list_distill"].model.list_length == 10
    assert its["list_distill"].model.hidden_size == 16
    assert its["beam_export"].task.teachers == [str(tmp_path / "gr_train" / "exported")]
    assert its["list_eval"].run.dir == str(tmp_path / "list_eval")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+task.stages.gr_train.trainer.step=5", "stage gr_train: "),
        ("+task.stages.sid_build.task.cods=5", "stage sid_build: "),
        (
            "+task.stages.sid_build.task.collisions=drop",
            "stage sid_build: task.collisions=drop is not one of",
        ),
    ],
)
def test_what_a_stage_cannot_have_is_said_before_the_first_begins(tmp_path, word, message):
    plain = composed(word, f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=message) as error:
        run_chain(build_config(plain), plain, [], lambda *_: pytest.fail("it began"))
    assert "set it under task.stages." in str(error.value)


def test_a_stage_that_does_not_exist():
    with pytest.raises(
        ConfigError, match="task.stages.list_train: the stages are sid_build, gr_train"
    ):
        build_config(composed("+task.stages.list_train.task.x=1"))


def test_the_command(tmp_path):
    """Its launcher, once; and what it says of a launcher above it."""
    short = [*TINY, "task.until=sid_build", "run.dir=chain"]
    code, output = program(*short, "trainer.dry_run=true", cwd=tmp_path)
    assert code == 0, output
    assert "1 of 1: sid_build, in chain/sid_build" in output
    assert not (tmp_path / "chain").exists()
    code, output = program(*short, "launch.nproc=1", cwd=tmp_path)
    assert code == 0, output
    assert re.search(r"^ids +96$", output, re.M)
    assert (tmp_path / "chain" / "sid_build" / "manifest.json").is_file()
    code, output = train(*short, cwd=tmp_path, ranks=1)
    assert code == 2
    assert "give it no launcher, or run its stages one by one" in output


def test_work_on_two_ranks_is_that_of_one(tmp_path):
    """The trainer's own run of a task without training: folder, figures, report."""
    words = ["+recipe=sid_build", "data=planted", "data.planted_users=60", "task.codes=32",
             "logging.wandb.mode=disabled"]  # fmt: skip
    for ranks in (1, 2):
        code, output = train(*words, f"run.dir=on{ranks}", cwd=tmp_path, ranks=ranks)
        assert code == 0, output
    one, two = ((tmp_path / f"on{n}" / "sids.parquet").read_bytes() for n in (1, 2))
    assert one == two
    rows = [
        json.loads(line) for line in (tmp_path / "on2" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["kind"] for row in rows] == ["start", "eval", "end"]
    assert rows[1]["ids"] == 96
    page = (tmp_path / "on2" / "report.html").read_text()
    assert "Use of codes" in page
    code, output = train(*words, "run.dir=on1", "task.cap=2", cwd=tmp_path, ranks=1)
    assert code == 3
    assert "with cap=1, and here it is 2" in output
