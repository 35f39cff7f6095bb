import json
import random

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from trainer.checkpoint import CheckpointConfig, Saver, find, read_progress
from trainer.errors import CheckpointError
from trainer.optim import OptimConfig, build_optimizer
from trainer.rng import rng_state, set_rng_state

CPU = torch.device("cpu")


def parts(value=1.0):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = build_optimizer(model.parameters(), OptimConfig())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def progress(step):
    return {"step": step, "samples": step * 8, "skipped": 0, "tracker": None}


def save_some(folder, steps, keep):
    saver = Saver(CheckpointConfig(keep=keep), folder)
    for step in steps:
        saver.save(*parts(step), progress(step), CPU)
    newest = saver.newest()
    return newest.name, sorted(p.name for p in saver.folder.iterdir())


def test_the_newest_are_kept_and_pointed_at(tmp_path):
    for newest, names in run_ranks(2, save_some, tmp_path, (3, 6, 9), 2):
        assert newest == "step-00000009"
        assert names == ["latest", "step-00000006", "step-00000009"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000009"


def save_twice(folder):
    saver = Saver(CheckpointConfig(), folder)
    for value in (1.0, 5.0):
        saver.save(*parts(value), progress(3), CPU)
    return sorted(p.name for p in saver.folder.iterdir())


def test_saving_a_step_again_replaces_it(tmp_path):
    """A run that went back and did the steps again must not leave the old ones under their names."""
    [names] = run_ranks(1, save_twice, tmp_path)
    assert names == ["latest", "step-00000003"]
    [(weight, _, _)] = run_ranks(1, load_one, tmp_path)
    assert weight == parts(5.0)[0].weight[0, 0].item()


def load_one(folder):
    saver = Saver(CheckpointConfig(), folder)
    model, optimizer = parts(0.0)
    found = saver.load(saver.newest(), model, optimizer, CPU)
    state = optimizer.state[model.weight]
    return model.weight[0, 0].item(), state["exp_avg"][0, 0].item(), found["samples"]


def test_what_was_saved_is_loaded(tmp_path):
    run_ranks(2, save_some, tmp_path, (3,), 2)
    expected, optimizer = parts(3)
    moment = optimizer.state[expected.weight]["exp_avg"][0, 0].item()
    for ranks in (1, 2):
        for weight, exp_avg, samples in run_ranks(ranks, load_one, tmp_path):
            assert (weight, exp_avg, samples) == (expected.weight[0, 0].item(), moment, 24)


@pytest.mark.parametrize("pointer", ["step-00000099", "../../elsewhere", "", None])
def test_a_stale_pointer_is_not_followed(pointer, tmp_path):
    run_ranks(1, save_some, tmp_path, (3, 6), 2)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    assert Saver(CheckpointConfig(), tmp_path).newest().name == "step-00000006"


def test_which_checkpoint_a_run_starts_from(tmp_path):
    empty = Saver(CheckpointConfig(), tmp_path / "empty")
    assert find("never", empty) is None
    assert find("auto", empty) is None
    run_ranks(1, save_some, tmp_path, (3, 6), 2)
    full = Saver(CheckpointConfig(), tmp_path)
    assert find("auto", full).name == "step-00000006"
    assert find(str(tmp_path), empty).name == "step-00000006"
    assert find(str(tmp_path / "checkpoints" / "step-00000003"), empty).name == "step-00000003"
    with pytest.raises(CheckpointError, match="already holds a run"):
        find("never", full)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        find(str(tmp_path / "checkpoints" / "step-00000004"), empty)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"format": 1}', "not json"])
def test_a_foreign_file_is_not_a_checkpoint(text, tmp_path):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        read_progress(tmp_path)


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path):
    (tmp_path / "trainer.json").write_text(json.dumps({"format": 99, "world_size": 1, "step": 1}))
    with pytest.raises(CheckpointError, match="written by a newer version"):
        read_progress(tmp_path)


def save_where_it_cannot(folder):
    try:
        save_some(folder, (3,), 1)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_folder_that_cannot_be_written_is_named_on_every_rank(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    for message in run_ranks(2, save_where_it_cannot, tmp_path):
        assert "cannot write under" in message
        assert "set run.dir" in message


def test_random_states_come_back():
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1), np.random.standard_normal()  # both now hold a second value back
    state = rng_state(CPU)

    def draw():
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            torch.rand(2).tolist(),
        )

    first = draw()
    draw()
    set_rng_state(state, CPU)
    assert draw() == first
