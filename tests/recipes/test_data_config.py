"""The `data` node: what it refuses, and what it says."""

import pytest

from recipes.sft import ChatConfig
from recipes.text.config import TextConfig
from trainer.compose import run_jobs
from trainer.config import build_config
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"files": []}, "data.files is empty: set data.files to globs"),
        ({"files": ["a"], "dataset": "b"}, "data.files and data.dataset are both set"),
        ({"packing": "best"}, "data.packing=best is not one of none, stream, whole"),
        ({"long_documents": "cut"}, "data.long_documents=cut is not one of drop, split, truncate"),
        ({"max_bad_rows": -1}, "data.max_bad_rows=-1 is too small"),
        ({"holdout": 1.0}, "data.holdout=1.0: set data.holdout"),
        ({"mixture": {"a": {}}, "files": ["x"]}, "data.mixture and a single source are both set"),
        (
            {"mixture": {"a": {"weight": -1}}},
            "weight=-1.0: set data.mixture.a.weight to a number of 0",
        ),
        ({"mixture": {"a": {"weight": float("nan")}}}, "weight=nan: set data.mixture.a.weight"),
        ({"mixture": {"a": {"weight": float("inf")}}}, "weight=inf: set data.mixture.a.weight"),
        ({"mixture": {"a": {"weight": 0}, "b": {"weight": 0}}}, "every source .* has weight 0"),
        ({"mixture": {"a": {"weight": "much"}}}, "data.mixture.a: Value 'much'"),
        ({"mixture": {"a": {"weigh": 1}}}, "set a key of data.mixture.a=weight"),
        ({"mixture": {"a": {"files": []}}}, "data.mixture.a.files is empty"),
        ({"mixture": {"a": 3}}, "data.mixture.a=3 is no group of keys"),
        ({"mixture": {"a b": {}}}, "data.mixture.a b: name a source with letters"),
    ],
)
def test_what_cannot_be_says_what_to_set(values, message):
    for kind in (TextConfig, ChatConfig):
        with pytest.raises(ValueError, match=message):
            kind(**values)


def test_a_mixture_is_written_on_the_command_line_or_in_a_file(tmp_path):
    found = []

    def job(plain, *_):
        found.append(build_config(plain).data.sources())
        return 0

    written = ["+data.mixture.code.weight=3", "+data.mixture.prose.files=[a.txt]"]
    assert run_jobs([*written, "+data.mixture.prose.text_key=body"], job) == 0
    assert list(found[0]) == ["data.mixture.code", "data.mixture.prose"]
    prose = found[0]["data.mixture.prose"]
    assert (prose.files, prose.text_key, prose.weight) == (["a.txt"], "body", 1.0)
    assert found[0]["data.mixture.code"].weight == 3
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "mine.yaml"
    file.write_text("mixture:\n  a: {weight: 1}\n  b: {files: [x]}\n")
    arguments = ["--config-dir", str(tmp_path), "data=mine", "data.mixture.a.weight=5"]
    assert run_jobs(arguments, job) == 0
    assert found[1]["data.mixture.a"].weight == 5
    file.write_text("mixture:\n  a: {weight: 1}\n  a: {weight: 2}\n")
    with pytest.raises(ConfigError, match="found duplicate key a"):
        run_jobs(arguments, job)
