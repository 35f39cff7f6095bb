"""What is damaged, foreign, half written or hostile is named in one line, and never believed."""

import json
import os
import pickle
import shutil

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainer.checkpoint.test_saver import CPU, of, parts, save_some
from trainer.checkpoint import manifest
from trainer.checkpoint.folder import read_progress
from trainer.checkpoint.loader import find, load
from trainer.checkpoint.reader import read_metadata
from trainer.errors import CHECKPOINT, DONE, CheckpointError
from trainer.verify import verify


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    run_ranks(2, save_some, folder, (3, 6), 2)
    return folder


@pytest.fixture
def run_dir(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


def newest(run_dir):
    return run_dir / "checkpoints" / "step-00000006"


def flip(path, at=200):
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def loading(run_dir):
    """The message of every rank that tries to resume."""
    try:
        load(newest(run_dir), *parts(0.0), CPU)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("damage", [cut, empty, remove])
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "trainer.json"])
def test_a_missing_or_cut_file_is_found_before_any_rank_starts(name, damage, run_dir):
    damage(newest(run_dir) / name)
    with pytest.raises(CheckpointError) as caught:
        find("auto", of(run_dir))
    message = str(caught.value)
    assert f"{name} (written by rank 1)" in message or f"{name} " in message
    assert f"set trainer.resume={run_dir}/checkpoints/step-00000003, the one before it" in message
    assert "\n" not in message
    assert verify(run_dir) == CHECKPOINT


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json"])
def test_a_flipped_bit_is_found_by_every_rank(name, run_dir, capsys):
    where = newest(run_dir) / name
    flip(where, at=where.read_bytes().find(b"rank1") + 4 if name == ".metadata" else 200)
    assert verify(run_dir) == CHECKPOINT
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step-00000003  sound, ")
    assert "damaged" in shown[1] or "cannot" in shown[1]
    messages = run_ranks(2, loading, run_dir)
    for message in messages:
        assert name in message
        assert "step-00000003, the one before it" in message


def test_sound_checkpoints_are_said_to_be(run_dir, capsys):
    (run_dir / "checkpoints" / ".saving-step-00000009").mkdir()
    assert verify(run_dir) == DONE
    assert verify(newest(run_dir)) == DONE
    shown = capsys.readouterr().out
    assert "step-00000006  sound, 4 files, " in shown
    assert "(latest)" in shown
    assert ".saving-step-00000009  was not finished" in shown


def test_without_one_before_it_the_remedy_is_another(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / "step-00000003")
    remove(newest(run_dir) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="there is none before it: restore the file, or"):
        find("auto", of(run_dir))


def test_a_half_written_one_is_not_seen(run_dir):
    remove(newest(run_dir) / manifest.NAME)
    assert find("auto", of(run_dir)).name == "step-00000003"


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"format": 1}', "not json", '{"format": "x"}']
)
def test_a_foreign_manifest_is_not_ours(text, run_dir):
    (newest(run_dir) / manifest.NAME).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_progress(newest(run_dir))


def test_a_checkpoint_of_a_newer_version_is_refused(run_dir):
    (newest(run_dir) / manifest.NAME).write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="written by a newer version"):
        read_progress(newest(run_dir))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", ".."])
def test_a_manifest_does_not_lead_out_of_its_folder(name, run_dir):
    file = newest(run_dir) / manifest.NAME
    plain = json.loads(file.read_text())
    plain["files"][name] = {"size": 1, "sha256": ""}
    file.write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_progress(newest(run_dir))


class Hostile:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_metadata_that_wants_to_run_something_is_refused(run_dir, capsys):
    """torch's own reader runs it."""
    proof = run_dir / "it-ran"
    (newest(run_dir) / ".metadata").write_bytes(pickle.dumps(Hostile(proof)))
    with pytest.raises(ValueError, match="it wants to run posix.system"):
        read_metadata(newest(run_dir))
    files = {
        p.name: manifest.describe_file(p)
        for p in newest(run_dir).iterdir()
        if p.name != manifest.NAME
    }
    manifest.write_manifest(newest(run_dir), files)  # whoever writes metadata writes checksums, too
    assert verify(run_dir) == CHECKPOINT
    assert "it wants to run posix.system" in capsys.readouterr().out
    assert not proof.exists()


def test_metadata_does_not_lead_out_of_its_folder(run_dir):
    metadata = read_metadata(newest(run_dir))
    for place in metadata.storage_data.values():
        place.relative_path = "../step-00000003/__0_0.distcp"
    (newest(run_dir) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="points outside the checkpoint"):
        read_metadata(newest(run_dir))


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"hello", pickle.dumps({"a": 1}), pickle.dumps(3)]
)
def test_metadata_that_is_not_torchs_is_refused(content, run_dir):
    (newest(run_dir) / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata"):
        read_metadata(newest(run_dir))


def load_into_another(run_dir):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(CheckpointError) as caught:
        load(newest(run_dir), model, optimizer, CPU)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_named(run_dir):
    for message in run_ranks(2, load_into_another, run_dir):
        assert "is of another model: 6 tensors differ, such as 0.weight, absent there" in message
        assert "2 x 3 here" in message
