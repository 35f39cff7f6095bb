"""How an error is put into words, and where it is left."""

import errno
import json
import os

import pytest
import torch

from collectives.symmetric.transport import PeerError
from recipes.task import DataError
from trainer.errors import ConfigError
from trainer.failure import in_words, report
from trainer.launch import EXCHANGE

GLOO = (
    "[/somewhere/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation "
    "to complete. Hints follow"
)


def words(error, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    try:
        raise error
    except type(error) as raised:
        return in_words(raised)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("set this"), 2, "error: set this"),
        (DataError("line 3"), 3, "error: line 3"),
        (
            DataError(
                "Caught DataError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
                'last):\n  File "a.py", line 1, in b\nrecipes.task.DataError: line 3\n'
            ),
            3, "error: line 3",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "a.json"), 4,
            "error: rank 1 cannot write a.json: No space left on device: free some space, or set "
            "another run.dir",
        ),
        (PeerError("rank 0 is gone"), 1, "rank 1 failed: rank 0 is gone"),
        (
            RuntimeError(GLOO), 1,
            "rank 1 lost its peers: Timed out waiting 5000ms for recv operation to complete",
        ),
    ],
)  # fmt: skip
def test_what_a_person_can_act_on_has_no_traceback(error, code, text, monkeypatch):
    assert words(error, monkeypatch) == (code, text)


@pytest.mark.parametrize(
    "error", [ValueError("a mistake of ours"), OSError(errno.ENOENT, "No such file", "x")]
)
def test_everything_else_has_one(error, monkeypatch):
    code, text = words(error, monkeypatch)
    assert code == 1
    assert text.startswith("rank 1 failed:\nTraceback (most recent call last):")


def test_memory_that_ran_out_says_what_to_set(monkeypatch):
    _, text = words(torch.OutOfMemoryError("CUDA out of memory."), monkeypatch)
    assert "rank 1 ran out of memory: set trainer.micro_batch_size to less" in text.splitlines()[-1]


def test_our_launcher_gets_a_record_and_torchs_file_stays_unwritten(tmp_path, monkeypatch):
    """A rank that is killed while it writes torch's file takes torch's launcher along."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(EXCHANGE, str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        raise ValueError("it")
    except ValueError:
        assert report(1, "text") == 1
    assert os.listdir(tmp_path) == ["rank-1.json"]
    assert json.loads((tmp_path / "rank-1.json").read_text())["text"] == "text"


def test_a_record_that_cannot_be_written_is_said_at_least(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(EXCHANGE, str(tmp_path / "gone"))
    assert report(1, "text") == 1
    assert "text" in capfd.readouterr().err
