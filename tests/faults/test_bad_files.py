"""Files with bytes that are flipped, cut, doubled or made up end in rows or in one error that names the file."""

import io
import json
import os

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
        max_examples=examples * int(os.environ.get("SPRINGTIDE_STRESS", "1")),
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def names_the_file(error, file):
    assert str(file) in str(error)


def rows_or_error(file, reader, content, limit):
    file.write_bytes(content)
    try:
        rows = list(read_files([file], lambda _: reader, ["text"], BadRows(limit)))
    except DataError as error:
        names_the_file(error, file)
    else:
        assert all(isinstance(row.value, dict) for row in rows)


@many(150)
@given(content=damaged(LINES), limit=st.sampled_from([0, 2, 10**9]))
def test_json_lines(tmp_path, content, limit):
    rows_or_error(tmp_path / "a.jsonl", read_json_lines, content, limit)


@many(150)
@given(content=damaged(parquet()), limit=st.sampled_from([0, 10**9]))
def test_parquet(tmp_path, content, limit):
    rows_or_error(tmp_path / "a.parquet", read_parquet, content, limit)


@many(150)
@given(content=damaged(weights()))
def test_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        files = _Files(tmp_path)
        for name in files.names:
            files.read(name)
    except ValueError as error:
        names_the_file(error, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder, as transformers writes it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?"))
    made = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(made)
    assert load_tokenizer(str(made)).end == 2
    return made, {file: file.read_bytes() for file in made.glob("*.json")}


@many(40)
@given(data=st.data())
def test_tokenizers(folder, data):
    place, contents = folder
    broken = data.draw(st.sampled_from(sorted(contents)))
    broken.write_bytes(data.draw(damaged(contents[broken])))
    try:
        load_tokenizer(str(place))
    except DataError as error:
        names_the_file(error, place)
    finally:
        broken.write_bytes(contents[broken])
