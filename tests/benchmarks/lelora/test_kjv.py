"""From two translations and a model's file to a page of results."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.lelora import kjv as program
from benchmarks.lelora.gguf import F32, Packed
from benchmarks.lelora.page import tables
from benchmarks.lelora.prepare_kjv import (
    LENGTH,
    Verse,
    by_book,
    fits,
    stored_weight,
    tokenizer_of,
    tokens,
    translation,
)
from benchmarks.lelora.study import Study
from benchmarks.lelora.verdict import LIKELIHOOD, against, measure_of, values, within, word
from tests.benchmarks.lelora.tiny import llama, packed_verses

SMALL = ["--seeds", "2", "--rank", "2", "--steps", "3", "--batch-size", "4", "--runs", "3", "--rounds", "1",
         "--taught-steps", "2", "--device", "cpu", "--pairs", "20", "--at-once", "7"]  # fmt: skip


def start(monkeypatch, folder, *more):
    arguments = ["--data", str(folder / "data"), "--out", str(folder / "out"), "--json",
                 str(folder / "found.json"), *SMALL, *more]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["benchmarks.lelora.kjv", *arguments])
    program.main()


METHODS = ("lora", "frozen", "random", "full", "learned", "learned-half", "dora")


def test_a_study_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    save_file(packed_verses(llama()), tmp_path / "data")
    start(monkeypatch, tmp_path, "--seconds", "0")
    assert "no time left" in capsys.readouterr().out
    start(monkeypatch, tmp_path, "--method", "lora", "--method", "frozen", "--no-check")
    first = json.loads((tmp_path / "found.json").read_text())
    assert {row["method"] for row in first["rows"]} == {"lora", "frozen"}
    start(monkeypatch, tmp_path, *(word for name in METHODS for word in ("--method", name)))
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["method"] for row in found["rows"]} == set(METHODS)
    assert [row for row in found["rows"] if row["method"] == "lora"] == [
        row for row in first["rows"] if row["method"] == "lora"
    ]
    for row in found["rows"]:
        tried = found["summary"]["tasks"]["kjv"]["tuning"][row["method"]]
        assert len(tried) >= 3
        for run in row["runs"]:
            assert run["loss"] == pytest.approx(sum(run["nats"]) / sum(run["targets"]), abs=1e-4)
    page = tables([found])
    assert "**Modern to King James verse** (7 chapters" in page
    for method in METHODS:
        assert f"| {method} |" in page
    assert "nats a token" in page
    assert "thousandths of a nat" in page


def test_a_study_that_is_stopped_between_batches_ends_as_if_it_were_not(tmp_path, monkeypatch):
    save_file(packed_verses(llama()), tmp_path / "data")
    asked = ["--method", "lora", "--no-check"]
    start(monkeypatch, tmp_path, *asked)
    whole = json.loads((tmp_path / "found.json").read_text())["rows"]
    (tmp_path / "out" / "cells.json").unlink()
    begun, real = [], Study.in_time

    def stops(study):
        begun.append(study)
        if len(begun) == 2:
            raise TimeoutError
        real(study)

    monkeypatch.setattr(Study, "in_time", stops)
    start(monkeypatch, tmp_path, *asked)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["rows"] == []
    assert len(kept["summary"]["tasks"]["kjv"]["tuning"]["lora"]) == 3
    start(monkeypatch, tmp_path, *asked)
    again = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert again == whole


def test_likelihoods_are_compared_by_chapters():
    """More is better, in thousandths of a nat."""

    def runs(nats):
        found = []
        for seed in range(3):
            targets = [100, 200, 50, 150, 120]
            found.append(
                {"seed": seed, "targets": targets, "nats": [nats * n + seed for n in targets]}
            )
        return found

    assert measure_of(runs(1.0)[0]) is LIKELIHOOD
    found = {"lora": values(runs(1.0)), "full": values(runs(0.9)), "half": values(runs(1.002))}
    compared = against(found, "lora")
    assert compared["full"][0].mean == pytest.approx(100)
    assert word(*compared["full"]) == "significantly better"
    assert within(compared["half"][0], LIKELIHOOD).endswith(": shown")
    assert compared["half"][0].mean == pytest.approx(-2)


def test_translations_are_read_and_not_run(tmp_path):
    text = "\nIn the [very]  beginning.\nAnd then. \n"
    ends = text.index("\n", 2)
    code = (
        "raise SystemExit\nfrom somewhere import Bible\n"
        f"bible = Bible(Version.X, {text!r}, {{1001001: 1, 1001002: {ends + 1}}}, "
        f"{{1001001: {ends}, 1001002: {len(text)}}}, {{}}, {{}}, {{}}, False)\n"
    )
    (tmp_path / "bible.py").write_text(code)
    assert translation(tmp_path / "bible.py") == {
        1001001: "In the very beginning.", 1001002: "And then."
    }  # fmt: skip


def test_books_are_in_one_part_only():
    found = [
        Verse(1_000_000 * book + 1_000 * c + v, "a", "b")
        for book in range(1, 21) for c in range(1, 4) for v in range(1, 6)
    ]  # fmt: skip
    parts = by_book(found, {"train": 1_000, "validation": 10, "test": 40})
    books = {part: {verse.book for verse in of} for part, of in parts.items()}
    assert [len(parts[p]) for p in ("train", "validation", "test")] == [
        15 * len(books["train"]),
        10,
        40,
    ]
    assert len(books["train"] | books["validation"] | books["test"]) == sum(
        map(len, books.values())
    )
    assert by_book(found, {"train": 1_000, "validation": 10, "test": 40}) == parts


def test_pairs_are_source_mark_targets():
    letters = [*"abcdefghij", "Ġ", "ab", "<|im_start|>", "<|im_end|>"]
    fields = {
        "tokenizer.ggml.tokens": letters, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * 12 + [3, 3],
    }  # fmt: skip
    tokenizer = tokenizer_of(fields)
    short, long = Verse(2_003_001, "ab c", "cab"), Verse(2_003_002, "a" * LENGTH, "b")
    assert fits(short, tokenizer)
    assert not fits(long, tokenizer)
    made = tokens([short, Verse(2_001_001, "a", "b")], tokenizer)
    assert made["ids"][0][:9].tolist() == [12, 11, 10, 2, 13, 2, 11, 13, 0]
    assert made["first"].tolist() == [5, 3]
    assert made["lengths"].tolist() == [8, 5]
    assert made["chapters"].tolist() == [1, 0]
    assert int(made["bytes"]) == 4


def test_rows_of_queries_are_put_in_order():
    """llama.cpp has them as it turns them: the two halves of a head by turns."""
    heads, size, columns = 2, 6, 32
    rows = torch.randn(heads * size, columns)
    theirs = rows.view(heads, 2, size // 2, columns).transpose(1, 2).reshape(heads * size, columns)
    packed = Packed((heads * size, columns), F32, theirs.contiguous().view(torch.uint8).flatten())
    name, data = stored_weight("blk.3.attn_q.weight", packed, {"attn_q": heads})
    assert name == "model/model.layers.3.self_attn.q_proj.weight/0/32"
    assert torch.equal(data.view(torch.float32).view(-1, columns), rows)
    name, data = stored_weight("blk.3.attn_v.weight", packed, {"attn_q": heads})
    assert torch.equal(data, packed.data)
