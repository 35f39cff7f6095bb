"""The recipe of layerwise repacking as a whole run, on ranks that play nodes."""

import json
import shutil

import pytest

from tests.recipes.repacked import SLOW_LINKS
from tests.runs.helpers import metrics, program, train

pytestmark = pytest.mark.slow

SMALL = (
    "+recipe=hybrid_1f3s_repack", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_heads=6", "model.num_kv_heads=2", "model.head_dim=8", "model.expert_size=16",
    "data.sequence_length=300", "data.files=[texts/*.txt]", "trainer.batch_size=8",
    "trainer.micro_batch_size=4", "trainer.eval_every=0",
    "logging.wandb.mode=disabled", "logging.every=1", "checkpoint.every=0", "optim.warmup=0",
    "optim.schedule=constant", "parallel.activation_checkpointing=block", "parallel.node_size=2",
    "parallel.repacking.rows_per_rank=16", f"parallel.repacking.calibration={SLOW_LINKS}",
)  # fmt: skip


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(40):
        text = f"{number}: " + "what is long takes many ranks, " * (1 + number**3 % 9)
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    return tmp_path


def test_a_repacked_run_is_resumed_on_any_number_of_ranks_and_says_what_it_planned(texts):
    runs = (("straight", 3, 4, 1), ("r", 1, 4, 0), ("r", 3, 4, 0), ("fewer", 3, 2, 0))
    for folder, steps, ranks, workers in runs:
        code, output = train(*SMALL, f"trainer.steps={steps}", f"run.dir={folder}",
                             f"trainer.workers={workers}", "trainer.resume=auto", cwd=texts,
                             ranks=ranks)  # fmt: skip
        assert code == 0, output
        if (folder, steps) == ("r", 1):
            shutil.copytree(texts / "r", texts / "fewer")
    rows = metrics(texts / "straight")
    straight, resumed, fewer = ([row["loss"] for row in metrics(texts / name)]
                                for name in ("straight", "r", "fewer"))  # fmt: skip
    assert straight == resumed
    assert fewer == pytest.approx(straight, abs=2e-4)
    assert straight[-1] < straight[0] - 0.2

    assert any(row["repack_parents"] > 0 for row in rows)
    for row in rows:
        assert row["balance_predicted"] >= 1
        assert row["balance_measured"] == row["imbalance"]
        assert len(row["rank_seconds_predicted"]) == len(row["rank_seconds_measured"]) == 4
        assert row["repack_gb_across"] >= 0
        assert row["solver_seconds"] > 0
    panels = {p["title"]: p for p in json.loads((texts / "straight" / "panels.json").read_text())}
    heat = panels["Seconds of each rank, measured"]
    assert len(heat["values"]) == 4
    assert heat["columns"] == [f"step {n}" for n in range(1, 4)]
    (drawing,) = (p["text"] for title, p in panels.items() if title.startswith("The layout"))
    assert "parent SP" in drawing
    assert "predicted" in (texts / "straight" / "report.html").read_text()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_samples_that_ranks_cannot_hold_are_one_error_that_names_keys(texts, workers):
    few = ["parallel.repacking.max_rows=16", f"trainer.workers={workers}", "run.dir=r"]
    code, output = program(*SMALL, *few, "launch.nproc=2", cwd=texts)
    assert code == 3, output
    assert output.count("error: ") == 1
    assert "Traceback" not in output
    assert "set trainer.micro_batch_size lower" in output


def test_settings_are_refused_before_a_rank_starts_and_a_plan_for_gpus_needs_none(tmp_path):
    code, output = program("+recipe=tiny", "parallel.sequence.max_parent=4", cwd=tmp_path)
    assert code == 2
    assert "task pretrain does not plan" in output
    code, output = program(
        "+recipe=hybrid_1f3s_repack", "model=hybrid2b", "parallel=fsdp_bf16",
        "parallel.activation_checkpointing=block", "trainer.dry_run=true", "launch.nproc=32",
        "launch.device=h200", "parallel.repacking.max_rows=32768", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    words = " ".join(output.split())
    assert "parents of up to 32 of 32 ranks, nodes of 8" in words
    assert "memory is planned for 32,768, parallel.repacking.max_rows" in words
    assert "GB across, over all ranks" in words
