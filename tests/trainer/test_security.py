"""Nothing that a run reads is executed, leads out of its folder, or carries a secret into what it writes.

Beside these: pickles and names in checkpoints (`tests/trainer/checkpoint/test_damage.py`), a pointer that
leads elsewhere (`test_saver.py`), HTML in names and panels (`tests/trainer/watch/test_page.py`), who may
look at temporary files (`tests/faults/test_other_faults.py`).
"""

import json
import os
import re
import socket
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import save_file

from collectives.symmetric.shm import of_this_user
from models.causal_lm import CausalLMConfig, transformers_config
from parallel.weights import safetensors_index
from recipes.task import DataError
from recipes.text.tokenizers import load_tokenizer
from tests.lock import CONSTRAINTS, FREE, LOCK, canonical, pins
from tests.runs.helpers import SMALL, program, train
from trainer import ranks, rundir
from trainer.errors import ConfigError
from trainer.watch.redact import is_secret, redact, redact_override

ROOT = Path(__file__).parents[2]
STRANGER = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PretrainedConfig
class StrangeConfig(PretrainedConfig):
    model_type = "strange"
"""


@pytest.fixture
def stranger(tmp_path):
    """A model's folder whose configuration and tokenizer are Python code that leaves a mark."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "strange.py").write_text(STRANGER.format(mark=str(tmp_path / "it ran")))
    config = {"model_type": "strange", "auto_map": {"AutoConfig": "strange.StrangeConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_code_that_comes_with_a_model_or_a_tokenizer_does_not_run(stranger, tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers_config(CausalLMConfig(path=str(stranger)), 257)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(stranger))
    assert not (tmp_path / "it ran").exists()
    assert CausalLMConfig().trust_remote_code is False


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/hostname", "sub/a.safetensors", "absent.safetensors"]
)
def test_an_index_of_weights_does_not_lead_out_of_its_folder(file, tmp_path):
    for place in (tmp_path / "secret.safetensors", tmp_path / "m" / "sub" / "a.safetensors"):
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": torch.ones(1)}, place)
    index = {"weight_map": {"w": file}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is no file of its folder"):
        safetensors_index(tmp_path / "m")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        safetensors_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64])
def test_weights_that_are_cut_are_named(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        safetensors_index(tmp_path)


RECIPE = """
# @package _global_
defaults:
  - override /task: pretrain
  - override /model: tiny
  - override /data: stdlib
hydra:
  {node}
"""


@pytest.mark.parametrize(
    "node",
    [
        "callbacks: {x: {_target_: pathlib.Path, _args_: [a]}}",
        "launcher: {_target_: shutil.rmtree}",
        "job_logging: {version: 1, handlers: {x: {(): os.mkdir, path: a}}}",
    ],
)
def test_a_recipe_from_elsewhere_names_no_python_to_call(node, tmp_path):
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "odd.yaml").write_text(RECIPE.format(node=node))
    words = ["--config-dir=mine", "+recipe=odd", "trainer.dry_run=true"]
    code, output = program(*words, cwd=tmp_path)
    assert code == 2, output
    assert "a configuration may not name Python to call" in output
    assert output.count("\n") == 1
    assert os.listdir(tmp_path) == ["mine"]


def test_secrets_are_told_from_columns_and_words():
    secret = (
        "key api_key apikey hub_key access-key aws.secret_access_key private_key hf_token "
        "task.hub_token token authToken client_secret password db.passwd credentials"
    )
    innocent = (
        "user_key text_key data.item_key data.attributes_key pad_token eos_token keys tokens "
        "tokenizer num_keys monkey key_size token_budget passing"
    )
    assert [word for word in secret.split() if not is_secret(word)] == []
    assert [word for word in innocent.split() if is_secret(word)] == []


def test_no_key_of_ours_is_taken_for_a_secret():
    """It would be lost from `config.yaml`, which export and reports read."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    keys = re.findall(r"^\| `([\w.]+)` \|", page, re.M)
    assert len(keys) > 200
    assert [key for key in keys if is_secret(key)] == []


def test_a_secret_of_the_environment_is_hidden_under_any_key(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("SHORT_TOKEN", "a")
    assert redact({"note": "use hf_abcdefgh", "list": ["hf_abcdefgh"]}) == {
        "note": "use ***", "list": ["***"],
    }  # fmt: skip
    assert redact_override("data.files=[https://x?t=hf_abcdefgh]") == "data.files=[https://x?t=***]"


@pytest.mark.slow
def test_what_a_run_writes_has_no_secret_in_it(tmp_path):
    secret = "s3cr3t-of-the-environment"
    words = [*SMALL, "trainer.steps=1", f"logging.wandb.project={secret}", "run.dir=r"]
    env = {"HF_TOKEN": secret, "WANDB_MODE": "offline"}
    code, output = train(*words, cwd=tmp_path, ranks=1, env=env)
    assert code == 0, output
    assert secret not in output
    for file in (tmp_path / "r").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_the_ranks_of_one_machine_meet_where_others_cannot_reach_them():
    port, descriptor = ranks._private_port()
    try:
        listening = Path("/proc/net/tcp").read_text().split()
        assert f"0100007F:{port:04X}" in listening  # 127.0.0.1
        assert f"00000000:{port:04X}" not in listening
    finally:
        os.close(descriptor)


def test_a_rank_talks_to_processes_of_its_own_user_only(monkeypatch):
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert of_this_user(one)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert not of_this_user(one)


def test_a_run_folder_that_cannot_be_written_is_an_error_with_a_key(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be written .*: set run.dir"):
        rundir.lock(tmp_path)


def test_versions_are_pinned_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 80
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


def needed(name, extras, found):
    """Packages that one needs here, and those that these need, in `found`."""
    for text in requires(name) or ():
        wanted = Requirement(text)
        marker = wanted.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        key = canonical(wanted.name), frozenset(wanted.extras)
        if key not in found:
            found.add(key)
            needed(wanted.name, wanted.extras, found)


def test_whatever_is_installed_for_us_is_pinned():
    found: set = set()
    needed("springtide", ("dev",), found)
    assert len(found) > 80
    pinned = {canonical(name) for name in pins(CONSTRAINTS.read_text())}
    assert {name for name, _ in found} - pinned - {"springtide"} == set()


def test_hashes_are_pinned_for_the_same_versions():
    """torch has several builds of a version, and which is wanted is for the machine to say."""
    locked, constraints = LOCK.read_text(), pins(CONSTRAINTS.read_text())
    assert pins(locked) == {name: v for name, v in constraints.items() if name not in FREE}
    lines = [line for line in locked.splitlines() if not line.startswith("#")]
    pinned = re.compile(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+")
    assert [line for line in lines if not pinned.fullmatch(line)] == []
    assert "--require-hashes --no-deps -r requirements.lock" in (ROOT / "Makefile").read_text()
