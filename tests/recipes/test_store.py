import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.task import DataError
from recipes.text.config import TextConfig
from recipes.text.corpus import find
from recipes.text.documents import TextEncoder
from recipes.text.store import tokenized
from recipes.text.tokenizers import ByteTokenizer, load_tokenizer


def store(files, tokenizer, holdout, cache, bad=0, key="text"):
    source = find("data", TextConfig(files=[str(file) for file in files]))
    return tokenized(source, TextEncoder(tokenizer, key), holdout, bad, cache)


def documents_of(part):
    return [
        bytes(part.tokens[a : b - 1].astype(np.uint8))
        for a, b in zip(part.starts, part.starts[1:], strict=False)
    ]


def test_bytes_go_in_and_come_out(tmp_path):
    texts = [b"abc", b"\xff\x00", b"d" * 1000] + [str(n).encode() for n in range(500)]
    files = []
    for number, text in enumerate(texts):
        file = tmp_path / f"{number:04}.txt"
        file.write_bytes(text)
        files.append(file)
    made = store(files, ByteTokenizer(), 0.2, tmp_path / "cache")
    train, held_out = made.train, made.held_out
    assert sorted(documents_of(train) + documents_of(held_out)) == sorted(texts)
    assert 50 < len(documents_of(held_out)) < 150
    assert (train.tokens[train.starts[1:] - 1] == 256).all()
    assert train.num_bytes + held_out.num_bytes == sum(map(len, texts))


def test_the_cache_is_read_again_and_a_changed_file_is_not(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one")
    first = store([file], ByteTokenizer(), 0.0, tmp_path / "cache").train
    assert documents_of(store([file], ByteTokenizer(), 0, tmp_path / "cache").train)
    file.write_bytes(b"two!")
    second = store([file], ByteTokenizer(), 0.0, tmp_path / "cache").train
    assert (documents_of(first), documents_of(second)) == ([b"one"], [b"two!"])


def test_many_readers_at_once_make_one_cache(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 100_000)
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(
                len(store([file], ByteTokenizer(), 0.0, tmp_path / "c").train.tokens)
            )
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [100_001] * 8
    assert len([p for p in (tmp_path / "c").iterdir() if p.is_dir()]) == 1


def test_a_failure_leaves_no_half_cache(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nbroken')
    for _ in range(2):
        with pytest.raises(DataError, match=r"bad\.jsonl:2"):
            store([tmp_path / "bad.jsonl"], ByteTokenizer(), 0.0, tmp_path / "cache")
    assert not any(p.is_dir() for p in (tmp_path / "cache").iterdir())


@pytest.fixture
def tokenizer_folder(tmp_path):
    words = {word: n for n, word in enumerate(["[UNK]", "<end>", "hello", "world", "."])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="[UNK]")
    wrapped.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_tokenizer_from_a_folder(tokenizer_folder, tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert (tokenizer.size, tokenizer.end) == (5, 1)
    (tmp_path / "a.txt").write_text("hello world . what")
    train = store([tmp_path / "a.txt"], tokenizer, 0.0, tmp_path / "cache").train
    assert train.tokens.tolist() == [2, 3, 4, 0, 1]


def test_a_missing_tokenizer_is_named():
    with pytest.raises(DataError, match=r"data.tokenizer=/nowhere cannot be loaded"):
        load_tokenizer("/nowhere")


def test_the_digest_is_of_the_content_wherever_it_lies(tmp_path):
    digests = []
    for folder, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(text)
        made = store([tmp_path / folder / "x.txt"], ByteTokenizer(), 0.0, tmp_path / "cache")
        digests.append(made.train.digest)
    assert digests[0] == digests[1] != digests[2]


def test_skipped_rows_are_remembered_with_the_cache(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\nbroken\n')
    for _ in range(2):  # written, then read
        made = store([file], ByteTokenizer(), 0.0, tmp_path / "cache", bad=1)
        assert (made.bad_rows, len(made.first_bad)) == (1, 1)
        assert made.first_bad[0].startswith(f"{file}:2: not JSON")
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        store([file], ByteTokenizer(), 0.0, tmp_path / "cache", bad=0)


def test_a_tokenizer_of_text_refuses_other_bytes(tokenizer_folder, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    tokenizer = load_tokenizer(str(tokenizer_folder))
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8"):
        store([tmp_path / "a.txt"], tokenizer, 0.0, tmp_path / "cache")


def test_bytes_are_shown_as_text():
    assert ByteTokenizer().decode([*"für".encode(), 256, 255]) == "für<end>\\xff"
