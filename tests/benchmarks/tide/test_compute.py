"""The models of the benchmark on one device, with nothing beside them."""

import json

import pytest
import torch

from benchmarks.tide import compute
from benchmarks.tide.scale import workloads

CONFIG = {"model": "tiny", "batch": 2, "lengths": [16, 32], "warmup": 1}


def test_every_length_is_measured_after_its_warmup():
    rows = compute.measure(CONFIG, "cpu", steps=3)
    assert [(row["length"], len(row["passes"])) for row in rows] == [(16, 3), (32, 3)]
    assert all(seconds > 0 for row in rows for seconds in row["passes"])


@pytest.mark.parametrize("kind", ["none", "block"])
def test_weights_are_in_bf16_buffers_as_they_were_and_gradients_go(kind):
    device = torch.device("cpu")
    work = compute.whole({**CONFIG, "parallel": {"activation_checkpointing": kind}}, device)
    assert {p.dtype for p in work.model.parameters()} == {torch.bfloat16}
    assert torch.bfloat16 not in {b.dtype for b in work.model.buffers()}
    reached = []
    for parameter in work.model.parameters():
        parameter.register_post_accumulate_grad_hook(reached.append)
    compute.passes(work, 2, 16, device)
    assert len(reached) == len(list(work.model.parameters()))
    assert all(p.grad is None for p in work.model.parameters())


def test_the_scale_model_takes_it_where_it_is_there(tmp_path, monkeypatch):
    shape = workloads.SHAPES[0]
    monkeypatch.setattr(workloads, "ALONE", tmp_path / "alone.json")
    traced = {found.tokens: found.kernels for found in workloads.measurements(shape)}
    rows = [{"file": shape.file, "length": 2048, "passes": [0.5, 0.25, 1.0]},
            {"file": "another", "length": 1024, "passes": [9.0]}]  # fmt: skip
    (tmp_path / "alone.json").write_text(json.dumps({"rows": rows}))
    found = {each.tokens: each.kernels for each in workloads.measurements(shape)}
    assert found == {**traced, 2048: 0.5}


def test_every_workload_that_is_predicted_is_measured():
    assert tuple(shape.file for shape in workloads.SHAPES) == compute.FILES
