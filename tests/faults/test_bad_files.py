"""Files with bytes that are flipped, cut, doubled or made up end in rows or in one error that names the file."""

import io
import json

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from parallel.weights import _Files
from recipes.task import DataError
from recipes.text.rows import BadRows, read_files, read_json_lines, read_parquet
from recipes.text.tokenizers import load_tokenizer

LINES = b"".join(
    json.dumps({"text": text, "number": number}).encode() + b"\n"
    for number, text in enumerate(["a", "b\u00fcc", "", "\ud83d\ude00", "x" * 50])
)


def parquet():
    import pyarrow
    from pyarrow import parquet

    stream = io.BytesIO()
    table = pyarrow.table({"text": ["a", "büc", None, "x" * 50], "number": [1, 2, 3, 4]})
    parquet.write_table(table, stream)
    return stream.getvalue()


def weights():
    return save(
        {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    )


@st.composite
def damaged(draw, whole):
    """A file, with one to four accidents in it; or anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "double", "zero"]))
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 100))]
        elif kind == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "double":
            content[at:at] = content[at : at + 40]
        else:
            content[at : at + 8] = bytes(len(content[at : at + 8]))
    return bytes(content)


def many(examples):
    return settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def names(error, place):
    assert str(place) in str(error)


def check_rows(file, reader, content, limit):
    """Rows, or an error that names the file; returns which."""
    file.write_bytes(content)
    try:
        rows = list(read_files([file], lambda _: reader, ["text"], BadRows(limit)))
    except DataError as error:
        names(error, file)
        return "error"
    assert all(isinstance(row.value, dict) for row in rows)
    return "rows"


def check_safetensors(folder, content):
    """Likewise, with tensors."""
    (folder / "model.safetensors").write_bytes(content)
    try:
        files = _Files(folder)
        for name in files.names:
            files.read(name)
    except ValueError as error:
        names(error, folder)
        return "error"
    return "rows"


def tokenizer_in(folder):
    """A tokenizer's folder, as transformers writes it, and its files."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    assert load_tokenizer(str(folder)).end == 2
    return {file: file.read_bytes() for file in folder.glob("*.json")}


def check_tokenizer(contents, broken, content):
    """Likewise, where one of the files is broken."""
    broken.write_bytes(content)
    try:
        load_tokenizer(str(broken.parent))
    except DataError as error:
        names(error, broken.parent)
        return "error"
    finally:
        broken.write_bytes(contents[broken])
    return "rows"


LIMITS = st.sampled_from([0, 2, 10**9])
"""Bad rows that are allowed."""


@many(80)
@given(content=damaged(LINES), limit=LIMITS)
def test_json_lines(tmp_path, content, limit):
    check_rows(tmp_path / "a.jsonl", read_json_lines, content, limit)


@many(80)
@given(content=damaged(parquet()), limit=LIMITS)
def test_parquet(tmp_path, content, limit):
    check_rows(tmp_path / "a.parquet", read_parquet, content, limit)


@many(80)
@given(content=damaged(weights()))
def test_safetensors(tmp_path, content):
    check_safetensors(tmp_path, content)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@many(20)
@given(data=st.data())
def test_tokenizers(contents, data):
    broken = data.draw(st.sampled_from(sorted(contents)))
    check_tokenizer(contents, broken, data.draw(damaged(contents[broken])))
