"""`python -m trainer.inspect_data`: what a person reads about the data before training on it."""

import json

import pytest
import torch

from trainer.inspect_data import main, show

SMALL = ("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=24",
         "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8")  # fmt: skip


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPRINGTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main([*words, *SMALL, "trainer.batch_size=2"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_text_is_shown_with_its_documents_positions_and_labels(inspect, tmp_path):
    (tmp_path / "a.txt").write_text("héllo")
    (tmp_path / "b.txt").write_text("yes")
    code, out, _ = inspect(
        "data=text",
        "data.files=[a.txt,b.txt]",
        "data.holdout=0",
        "data.sequence_length=16",
        "--lines",
        "0",
    )
    assert code == 0
    lines = {line[:17].strip(): line[18:] for line in out.splitlines()}
    assert lines["documents"] == "2; 0 held out"
    assert lines["tokens"] == "11, of which 11 are in sequences"
    assert lines["labels"] == "9, 81.8% of the tokens; 0 sequences have none"
    assert lines["padding"] == "31.25% of the tokens"
    assert lines["bad rows"] == "0 skipped"
    assert "5 to         8          1" in out
    assert "sample 0, number 0 of the run: 16 tokens, 9 labels, 5 padding" in out
    assert "learnt 'éllo<end>'" in out
    assert "learnt 'es<end>'" in out
    assert "padding: tokens 11-15" in out
    assert "  from tokens 0-6 of document 0 of a.txt\n" in out
    assert "  from tokens 0-3 of document 1 of b.txt\n" in out
    rows = [line.split() for line in out.splitlines() if line.endswith("'<end>'")]
    assert [row[3] for row in rows] == ["-", "-"]  # what closes a document has no label


def test_conversations_are_shown_with_what_is_learnt(inspect, tmp_path):
    rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nbroken")
    words = (
        "+recipe=sft",
        "data=chat",
        "data.files=[a.jsonl]",
        "data.holdout=0",
        "data.packing=none",
    )
    code, _, err = inspect(*words)
    assert (code, err.startswith("error: a.jsonl:4: not JSON")) == (3, True)
    code, out, _ = inspect(*words, "data.max_bad_rows=1", "--sample", "2", "--lines", "4")
    assert code == 0
    assert "bad rows          1 skipped: a.jsonl:4: not JSON" in out
    assert "given  'user\\nsay 2<end>assistant\\n'" in out
    assert "learnt '2<end>'" in out
    assert "... (--lines 0 prints all)\n  from tokens 0-" in out
    assert "of document 2 of a.jsonl:3\n" in out


def test_what_cannot_be_shown_is_one_clear_error(inspect, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    words = ("data=text", "data.files=[a.txt]", "data.holdout=0")
    code, _, err = inspect(*words, "--sample", "7")
    assert (code, err) == (2, "error: --sample 7: there are samples 0 to 0\n")
    code, _, err = inspect(*words, "--held-out")
    assert (code, err) == (3, "error: nothing is held out: set data.holdout above 0\n")
    code, _, err = inspect(*words, "data.pakcing=none")
    assert (code, err) == (2, "error: there is no key data.pakcing: did you mean data.packing?\n")


def test_a_task_that_says_nothing_is_shown_by_its_batch():
    class Silent:
        def collate(self, samples):
            return {"x": torch.tensor(samples), "count": 1}

        def count(self, batch):
            return batch["count"]

    lines = list(show(Silent(), [3.0, 4.0], 1))
    assert lines == ["1 labels", "  x: torch.float32 (1,) [4.0]", "  count: 1"]
