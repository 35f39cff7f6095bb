import shutil
import time
from collections import namedtuple

import pytest
import torch

from tests.ranks import run_ranks
from trainer import stop
from trainer.checkpoint import manifest
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.folder import Checkpoints
from trainer.checkpoint.loader import find, load
from trainer.checkpoint.saver import Saver
from trainer.errors import CheckpointError
from trainer.optim import OptimConfig, build_optimizer

CPU = torch.device("cpu")


def parts(value=1.0):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = build_optimizer(model.parameters(), OptimConfig())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def of(run_dir):
    return Checkpoints(run_dir / "checkpoints")


def progress(step):
    return {"step": step, "samples": step * 8, "skipped": 0, "tracker": None}


def save_some(folder, steps, keep):
    saver = Saver(CheckpointConfig(keep=keep), folder)
    for step in steps:
        saver.save(*parts(step), progress(step), CPU)
    saver.wait()
    newest = saver.checkpoints.newest()
    return newest.name, sorted(p.name for p in saver.checkpoints.path.iterdir())


def test_the_newest_are_kept_and_pointed_at(tmp_path):
    for newest, names in run_ranks(2, save_some, tmp_path, (3, 6, 9), 2):
        assert newest == "step-00000009"
        assert names == ["latest", "step-00000006", "step-00000009"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000009"


def save_twice(folder):
    saver = Saver(CheckpointConfig(), folder)
    for value in (1.0, 5.0):
        saver.save(*parts(value), progress(3), CPU)
    saver.wait()
    return sorted(p.name for p in saver.checkpoints.path.iterdir())


def test_saving_a_step_again_replaces_it(tmp_path):
    """A run that went back and did the steps again must not leave the old ones under their names."""
    [names] = run_ranks(1, save_twice, tmp_path)
    assert names == ["latest", "step-00000003"]
    [(weight, _, _)] = run_ranks(1, load_one, tmp_path)
    assert weight == parts(5.0)[0].weight[0, 0].item()


def load_one(folder):
    model, optimizer = parts(0.0)
    found = load(of(folder).newest(), model, optimizer, CPU)
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
    assert of(tmp_path).newest().name == "step-00000006"


def test_which_checkpoint_a_run_starts_from(tmp_path):
    empty = of(tmp_path / "empty")
    assert find("never", empty) is None
    assert find("auto", empty) is None
    run_ranks(1, save_some, tmp_path, (3, 6), 2)
    full = of(tmp_path)
    assert find("auto", full).name == "step-00000006"
    assert find(str(tmp_path), empty).name == "step-00000006"
    assert find(str(tmp_path / "checkpoints" / "step-00000003"), empty).name == "step-00000003"
    with pytest.raises(CheckpointError, match="already holds a run"):
        find("never", full)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        find(str(tmp_path / "checkpoints" / "step-00000004"), empty)


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


def test_those_of_every_nth_step_stay_for_ever(tmp_path):
    saver = CheckpointConfig(keep=1, keep_every=4)
    [names] = run_ranks(1, save_all, tmp_path, saver, range(2, 12, 2))
    assert names == ["latest", "step-00000004", "step-00000008", "step-00000010"]


def save_all(folder, config, steps):
    saver = Saver(config, folder)
    for step in steps:
        saver.save(*parts(step), progress(step), CPU)
    saver.wait()
    return sorted(p.name for p in saver.checkpoints.path.iterdir())


def save_slowly(folder):
    """Save twice over a slow disk, and train on in between."""
    original = manifest.describe_file

    def slow(path):
        time.sleep(1)
        return original(path)

    saver = Saver(CheckpointConfig(), folder)
    saver.save(*parts(1.0), progress(1), CPU)
    saver.wait()
    manifest.describe_file = slow
    model, optimizer = parts(2.0)
    saver.save(model, optimizer, progress(2), CPU)
    early = saver.checkpoints.newest().name, saver.ended()
    with torch.no_grad():
        model.weight.fill_(-1.0)
    saved = saver.wait()
    return early, saved.path.name, saver.checkpoints.newest().name


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """`latest` moves when the files are on the disk, and they hold the moment of the save."""
    for early, path, newest in run_ranks(2, save_slowly, tmp_path):
        assert early == ("step-00000001", None)
        assert path == newest == "step-00000002"
    [(weight, _, _)] = run_ranks(1, load_one, tmp_path)
    assert weight == parts(2.0)[0].weight[0, 0].item()


def fail_to_write(folder, background):
    saver = Saver(CheckpointConfig(background=background), folder)
    saver.save(*parts(1.0), progress(1), CPU)
    saver.wait()
    model, optimizer = parts(2.0)
    if torch.distributed.get_rank() == 1:  # its disk is full

        def full(path):
            raise OSError(28, "No space left on device", str(path))

        manifest.describe_file = full
    saver.save(model, optimizer, progress(2), CPU)
    try:
        saver.wait()
    except CheckpointError as error:
        return str(error), stop.requested(), saver.checkpoints.newest().name
    return None


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_last_good_one_stays(
    background, tmp_path
):
    """All ranks leave the loop together, since each has been asked to stop."""
    for message, asked, newest in run_ranks(2, fail_to_write, tmp_path, background):
        assert "rank 1: No space left on device" in message
        assert asked
        assert newest == "step-00000001"


def save_without_room(folder):
    usage = namedtuple("usage", "total used free")
    shutil.disk_usage = lambda path: usage(10**6, 10**6 - 50, 50)
    saver = Saver(CheckpointConfig(), folder)
    with pytest.raises(
        CheckpointError, match="a checkpoint needs 0.0 MiB, but .* has 0.0 MiB left"
    ):
        saver.save(*parts(1.0), progress(1), CPU)
    return [p.name for p in saver.checkpoints.path.iterdir()]


def test_room_on_the_disk_is_looked_for_before_anything_is_written(tmp_path):
    assert run_ranks(2, save_without_room, tmp_path) == [[], []]
