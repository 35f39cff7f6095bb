import json
from argparse import Namespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import experts
from models.causal_lm import CausalLMConfig, build_causal_lm, init_weights, transformers_config
from models.hf_folder import layers, own_names, write_hf_folder
from tests.parallel.test_weights import MODELS, SIZES


def trained(name):
    """A model on meta, and one with weights."""
    config = CausalLMConfig(**(SIZES | MODELS[name]), attention="eager")
    model = build_causal_lm(config, transformers_config(config, 0))
    whole = build_causal_lm(config, transformers_config(config, 0)).to_empty(device="cpu")
    whole.tie_weights()
    torch.manual_seed(0)
    for module in whole.modules():
        init_weights(whole, module)
    return model, whole.eval()


def write(name, out, **options):
    model, whole = trained(name)
    state = whole.state_dict()
    reads = []

    def read(names):
        reads.append(list(names))
        return {key: state[key].clone() for key in names}

    options = {"dtype": "float32", "max_file_gib": 5.0} | options
    size = write_hf_folder(model, read, out, Namespace(**options))
    return whole, reads, size


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_file_gib", [5.0, 1e-5])
def test_transformers_loads_what_was_written_to_equal_logits(name, max_file_gib, tmp_path):
    """Tied embeddings, renamed tensors and experts that are stored one by one, in one file or many."""
    whole, _, size = write(name, tmp_path, max_file_gib=max_file_gib)
    loaded, notes = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation=experts.NAME,
        output_loading_info=True,
    )  # fmt: skip
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(loaded(tokens).logits, whole(tokens).logits)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) == pytest.approx(size, rel=0.2)
    if max_file_gib < 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {f.name for f in files}
        assert len(files) >= 4
    else:
        assert [f.name for f in files] == ["model.safetensors"]


def test_weights_may_become_bfloat16(tmp_path):
    whole, _, _ = write("llama", tmp_path, dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name].bfloat16()), name


def test_a_layer_is_read_at_a_time_and_shared_tensors_once(tmp_path):
    model, _ = trained("llama-tied")
    assert "lm_head.weight" not in own_names(model)
    _, reads, _ = write("llama-tied", tmp_path)
    assert len(reads) == 4  # embedding, two layers, norm
    assert {name.split(".")[2] for name in reads[1]} == {"0"}


def test_layers_are_told_apart_by_their_number():
    names = ["a.weight", "h.1.x", "h.1.y.0.z", "h.12.x", "norm"]
    assert list(layers(names)) == [["a.weight"], ["h.1.x", "h.1.y.0.z"], ["h.12.x"], ["norm"]]
