"""Every architecture of transformers, as small as it can be: packed documents do not see each other.

Ours, on two documents in one sequence, is compared with transformers' own attention on each alone.
A new architecture, or a new release of transformers, is tried with

    make test TESTS='-m long tests/models/test_architectures.py'
"""

import re
from argparse import Namespace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from models import experts
from models.architectures import attention_kind, told_apart
from models.causal_lm import CausalLMConfig, build_causal_lm, init_weights
from models.hf_folder import own_names, write_hf_folder
from models.stored_weights import locate, storage_rules
from parallel.weights import check_written, materialize
from tests.models.architectures import NAMES, built, small

LENGTHS = [13, 17]
MERGED = ("hrm_text", "sarvam_moe")
"""Types whose folders keep several of a model's tensors in one: those are not read, which is an error."""
NEED_A_FOLDER = ("apertus", "data2vec-text", "openai-gpt")
"""Types of which initialisation, module by module, leaves something out (a bias that two modules share)."""
PACKED = ["llama", "qwen3", "gpt_neox", "phi3", "deepseek_v3"]
MASKED = ["mistral", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "afmoe", "llama4_text"]


def compare(name, **changes):
    kind = attention_kind("auto", small(name, **changes))
    ours = built(name, attention=kind, **changes)
    theirs = AutoModelForCausalLM.from_config(
        small(name, **changes), attn_implementation="eager" if kind == "eager" else "sdpa"
    )
    theirs.load_state_dict(ours.state_dict())
    buffers = dict(theirs.named_buffers())
    for key, buffer in ours.named_buffers():
        buffer.copy_(buffers[key])
    theirs.eval()  # no dropout
    tokens_BS = torch.randint(2, 97, (2, sum(LENGTHS)))
    positions_BS = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    ends = torch.tensor(2 * LENGTHS).cumsum(0)
    cu_seq_lens = torch.cat([torch.zeros(1), ends]).int()
    with torch.no_grad():
        given = told_apart(kind, ours.config, positions_BS, cu_seq_lens, max(LENGTHS))
        packed = ours(input_ids=tokens_BS, **given).logits
        alone = [
            theirs(input_ids=part, use_cache=False).logits
            for part in tokens_BS.split(LENGTHS, dim=1)
        ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)
    return kind


@pytest.mark.parametrize("name", PACKED + MASKED)
def test_packed_documents_are_as_if_each_were_alone(name):
    """By flash attention's stand-in on the CPU, or by transformers' own attention with masks."""
    assert (compare(name) == "packed") == (name in PACKED)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_keeps_documents_apart_or_is_refused(name):
    changes = decoder(name)
    if (reason := refusal(name, **changes)) is None:
        compare(name, **changes)
    else:
        assert re.match(r"model\.type=\S+ .+: set ", reason)


def decoder(name):
    """What an encoder needs besides to be trained."""
    return {"is_decoder": True} if hasattr(AutoConfig.for_model(name), "is_decoder") else {}


def refusal(name, packed=True, **changes):
    """Why the type is refused, if it is."""
    try:
        attention_kind("auto", AutoConfig.for_model(name, **changes), packed)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_written_and_read(name, tmp_path):
    """transformers gets the weights that were written, and so do we, name by name."""
    if refusal(name, packed=False, **(changes := decoder(name))):
        return  # the test above looks at the reason
    whole = built(name, **changes)
    meta = build_causal_lm(CausalLMConfig(type=name), small(name, **changes), packed=False)
    state = whole.state_dict()
    options = Namespace(dtype="float32", max_file_gib=5.0)
    write_hf_folder(meta, lambda names: {n: state[n].clone() for n in names}, tmp_path, options)
    loaded, notes = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation=experts.NAME, output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    theirs = loaded.state_dict()
    assert state.keys() == theirs.keys()
    stored = load_file(tmp_path / "model.safetensors")
    where = locate(meta, storage_rules(meta), stored)
    for key in own_names(whole):
        torch.testing.assert_close(theirs[key], state[key], rtol=0, atol=0, msg=key)
        if name in MERGED:
            continue
        found = where[key]
        ours = stored[found] if isinstance(found, str) else found(stored.__getitem__)
        torch.testing.assert_close(ours, state[key], rtol=0, atol=0, msg=key)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_its_buffers_once_it_is_materialized(name):
    """Rotations, slopes and the like, which no folder holds: memory that nobody writes is not noticed."""
    if refusal(name, packed=False, **(changes := decoder(name))):
        return
    model = build_causal_lm(CausalLMConfig(type=name), small(name, **changes), packed=False)
    materialize(model, torch.device("cpu"), partial(init_weights, model), seed=1)
    if name in NEED_A_FOLDER:
        with pytest.raises(ValueError, match="nothing gives .* first value"):
            check_written(model)
        return
    check_written(model)
    expected = dict(AutoModelForCausalLM.from_config(small(name, **changes)).named_buffers())
    for key, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[key], msg=key)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpt", "set model.type to"), ("stablelm", "set model.type to"),
        ("bamba", "carries a state"), ("rwkv", "carries a state"), ("bloom", "set model.type to"),
        ("falcon", "set model.type to"), ("xglm", "set model.type to"),
        ("minimax", "has layers of linear_attention, .* set .* or data.packing=none"),
        ("lfm3", "has layers of conv, .* set .* or data.packing=none"),
        ("roberta", "is an encoder"),
        ("doge", "has masks made of values, .* or data.packing=none"),
        ("deepseek_v32", "has layers of indexed_attention, .* or data.packing=none"),
        ("bert", r"is an encoder, .* set \+model.config.is_decoder=true"),
    ],
)  # fmt: skip
def test_architectures_that_cannot_keep_documents_apart_are_refused(name, words):
    with pytest.raises(ValueError, match=rf"model.type={name} .*{words}"):
        attention_kind("auto", AutoConfig.for_model(name))


@pytest.mark.parametrize("name", ["llama4_text", "doge", "deepseek_v32"])
def test_flash_attention_is_not_set_where_it_would_see_more(name):
    with pytest.raises(ValueError, match=rf"packed cannot run model.type={name}: set"):
        attention_kind("packed", AutoConfig.for_model(name), packed=False)
    assert attention_kind("auto", AutoConfig.for_model(name), packed=False) == "sdpa"


def test_an_encoder_becomes_a_decoder():
    assert compare("bert", is_decoder=True) == "sdpa"
