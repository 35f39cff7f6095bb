import json

import pytest
import torch
from rich.console import Console

from trainer.launch import Invocation
from trainer.watch.metrics import Metrics, read
from trainer.watch.peak import memory, peak_flops, peak_flops_by_name
from trainer.watch.progress import ProgressLine, describe, short
from trainer.watch.redact import redact, redact_override
from trainer.watch.watch import resume_command

ROW = {
    "kind": "train", "step": 20, "loss": 2.5, "grad_norm": 0.123, "tokens_per_second": 12345.0,
    "mfu": 0.417, "memory_gib": 3.25, "skipped": 2,
}  # fmt: skip


def test_rows_of_steps_that_are_done_again_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    metrics.open(0)
    for step in (1, 2, 3):
        metrics.write({"kind": "train", "step": step})
    metrics.close()
    with file.open("a") as lines:
        lines.write('{"kind": "train", "st')  # a crash in the middle of a line
    metrics.open(2)
    metrics.write({"kind": "train", "step": 3, "again": True})
    metrics.close()
    assert [row["step"] for row in read(file)] == [1, 2, 3]
    assert read(file)[-1]["again"]
    assert read(tmp_path / "none") == []


def test_the_progress_line_says_it_all():
    line = describe(ROW, 1000, 3725.0)
    assert line == (
        "step   20/1000  loss 2.5000  norm 0.123  12.3k tokens/s  mfu 41.7 %  3.2 GiB  2 skipped"
        "  1:02:05 left"
    )
    assert "mfu" not in describe(ROW | {"mfu": None}, 1000, 0)
    assert [short(n) for n in (5, 1234, 2.5e6, 7.1e10)] == ["5", "1.23k", "2.5M", "71G"]


def test_a_terminal_gets_a_live_line_and_others_plain_ones(capsys):
    live = ProgressLine(Console(force_terminal=True, width=120), 100)
    live.open(0)
    live.update(ROW, 60)
    live.close()
    assert "\x1b[" in capsys.readouterr().out
    plain = ProgressLine(Console(force_terminal=False), 100)
    plain.open(0)
    plain.update(ROW, 60)
    plain.close()
    assert capsys.readouterr().out.count("\n") == 1


def test_secrets_are_hidden_at_any_depth():
    plain = {"a": {"api_key": "x", "list": [{"password": "y"}]}, "hub_token": "z", "key": None}
    assert redact(plain) == {
        "a": {"api_key": "***", "list": [{"password": "***"}]}, "hub_token": "***", "key": None,
    }  # fmt: skip
    assert redact({"text_key": "text", "tokens": 5, "tokenizer": "t", "num_keys": 3}) == {
        "text_key": "text", "tokens": 5, "tokenizer": "t", "num_keys": 3,
    }  # fmt: skip
    assert redact_override("+task.hub_token=abc") == "+task.hub_token=***"
    assert redact_override("optim.lr=1") == "optim.lr=1"
    hidden = redact_override("+model.config={api_key: abc, a: {hub_token:def}, size: 3}")
    assert hidden == "+model.config={api_key: ***, a: {hub_token:***}, size: 3}"


def test_mfu_knows_devices_by_the_longest_name():
    assert peak_flops_by_name("NVIDIA H200") == 989e12
    assert peak_flops_by_name("NVIDIA H100 PCIe") == 756e12
    assert peak_flops_by_name("NVIDIA H100 80GB HBM3") == 989e12
    for name in ("Some Device", "NVIDIA RTX A1000 Laptop GPU"):
        assert peak_flops_by_name(name) is None
    assert peak_flops(torch.device("cpu")) is None
    assert 0.01 < memory(torch.device("cpu")).peak_gib < 100


def test_the_resume_command_is_the_command_again(tmp_path):
    invocation = Invocation(
        "local", ["trainer.steps=5", "run.dir=old", "trainer.resume=never", "data.files=[a b.txt]"]
    )
    assert resume_command(invocation, tmp_path) == (
        f"python -m trainer trainer.steps=5 'data.files=[a b.txt]' run.dir={tmp_path} "
        "trainer.resume=auto"
    )


def test_under_other_launchers_the_command_is_theirs(tmp_path):
    invocation = Invocation("torchrun", ["trainer.steps=5"])
    assert resume_command(invocation, tmp_path).startswith("the same command with run.dir=")


def test_rows_are_json():
    assert json.loads(json.dumps(ROW)) == pytest.approx(ROW)


def test_a_figure_that_is_not_finite_is_null_in_the_file(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.open(0)
    metrics.write(ROW | {"loss": float("nan"), "grad_norm": float("inf")})
    metrics.close()
    [row] = read(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["grad_norm"], row["step"]) == (None, None, 20)
