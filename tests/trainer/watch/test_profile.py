import gzip
import inspect
import json

import pytest
import torch
from torch.cuda import memory

from trainer.config import TrainerConfig
from trainer.watch.profile import Profile, ProfileConfig


@pytest.mark.parametrize("steps", [[5], [3, 2], [0, 4], [1, 2, 3]])
def test_a_window_has_a_first_and_a_last_step(steps):
    with pytest.raises(ValueError, match=r"set trainer.profile.steps to the first and last"):
        ProfileConfig(steps=steps)


def test_a_window_behind_the_run_is_refused():
    with pytest.raises(ValueError, match=r"begins after the last step, trainer.steps=5"):
        TrainerConfig(steps=5, profile=ProfileConfig(steps=[6, 7]))
    assert TrainerConfig(steps=6, profile=ProfileConfig(steps=[6, 7])).profile.steps == [6, 7]


def test_the_window_is_written_with_its_steps(tmp_path):
    said = []
    config = ProfileConfig(steps=[2, 3], memory=True)
    profile = Profile(config, tmp_path / "profile", 1, torch.device("cpu"), said.append)
    for number in (1, 2, 3, 4):
        with profile.step(number):
            torch.ones(8).sum()
        assert (tmp_path / "profile").exists() == (number >= 3)
    profile.close()
    assert [f.name for f in (tmp_path / "profile").iterdir()] == ["rank1.json.gz"]
    written = gzip.decompress((tmp_path / "profile" / "rank1.json.gz").read_bytes())
    events = json.loads(written)["traceEvents"]
    names = {event["name"] for event in events}
    assert {"step 2", "step 3", "aten::sum"} <= names
    assert not {"step 1", "step 4"} & names
    assert said[0] == "no memory profile: that needs a GPU"
    assert "https://ui.perfetto.dev" in said[1]


def test_a_run_that_ends_inside_the_window_writes_what_there_is(tmp_path):
    said = []
    profile = Profile(
        ProfileConfig(steps=[1, 9]), tmp_path / "p", 0, torch.device("cpu"), said.append
    )
    with profile.step(1):
        pass
    profile.close()
    assert (tmp_path / "p" / "rank0.json.gz").is_file()


def test_without_a_window_nothing_happens(tmp_path):
    profile = Profile(ProfileConfig(), tmp_path / "p", 0, torch.device("cpu"), print)
    with profile.step(1):
        pass
    profile.close()
    assert not (tmp_path / "p").exists()


def test_torchs_memory_history_is_called_as_before():
    inspect.signature(memory._record_memory_history).bind(enabled="all")
    inspect.signature(memory._dump_snapshot).bind("file")
