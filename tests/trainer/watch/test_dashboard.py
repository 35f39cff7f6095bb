"""The workspace as the library has it, and what is said without an account. No network."""

import pytest

from trainer import dashboard
from trainer.dashboard import SECTIONS, build, describe, main
from trainer.watch.interval import summarize


def test_the_sections_are_all_there():
    workspace = build("someone", "springtide", "Springtide")
    names = [section.name for section in workspace.sections]
    assert names == [
        "Training", "Throughput", "Communication", "Repacking", "Adapters", "Retrieval", "CTR",
    ]  # fmt: skip
    plots = {plot.title: plot for section in workspace.sections for plot in section.panels}
    assert plots["Step time"].plot_type == "stacked-area"
    assert "train/communication_seconds" in plots["Step time"].y
    assert plots["Recall"].metric_regex == "eval/(recall|ndcg|mrr|hit).*"
    assert all(plot.x == "step" for plot in plots.values())
    assert workspace._to_model().model_dump_json()  # what would be sent


def test_it_shows_metrics_that_runs_report():
    gathered = summarize([[1.0] * 8 + [1.0, 1.0, 0, 0]])
    reported = {
        *gathered, "loss", "grad_norm", "lr", "mfu", "goodput", "skipped",
        "tokens_per_second_per_device",
    }  # fmt: skip
    for panels in SECTIONS.values():
        for panel in panels:
            assert bool(panel.metrics) != bool(panel.pattern)
            assert {m.removeprefix("train/") for m in panel.metrics} <= reported


def test_it_is_printed_without_an_account(capsys):
    assert main(["--print"]) == 0
    assert "Retrieval\n  Recall: eval/(recall|ndcg|mrr|hit).*" in capsys.readouterr().out
    assert describe().count("\n") > 20


@pytest.mark.parametrize(
    ("installed", "key", "says"),
    [
        (False, True, "pip install 'springtide[dashboard]'"),
        (True, False, "set WANDB_API_KEY, or run wandb login"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, capsys, installed, key, says):
    monkeypatch.setattr(dashboard, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(dashboard, "has_key", lambda: key)
    assert main([]) == 2
    assert says in capsys.readouterr().err


def test_a_server_that_cannot_be_reached_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(dashboard, "missing", lambda: None)
    monkeypatch.setattr(dashboard, "build", lambda *given: 1 / 0)

    def refuse(*given):
        raise OSError("no route to host")

    monkeypatch.setattr(dashboard, "build", refuse)
    assert main(["--entity", "someone"]) == 1
    assert capsys.readouterr().err == "error: wandb did not take it: no route to host\n"
