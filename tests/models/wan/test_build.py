"""The transformer of diffusers: sizes, cost, folders, and what is refused."""

import json
from argparse import Namespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("diffusers")

from diffusers import WanTransformer3DModel

from models.wan.build import build_wan, training_flops, write_folder
from models.wan.config import A14B, BOUNDARY, WanConfig, boundary_of
from tests.models.wan.small import shape, whole


def test_the_preset_has_the_published_size():
    model = build_wan(WanConfig().shape("high_noise"))
    assert model.training
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(14.29, abs=0.01)
    import yaml

    with open("configs/model/wan22_a14b.yaml") as file:
        assert WanConfig(**yaml.safe_load(file)).shape("high_noise") == A14B


def test_flops_agree_with_torchs_counter():
    model = whole(num_layers=3)
    latents, words = torch.randn(2, 3, 3, 8, 8), torch.randn(2, 7, 10)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(latents, torch.tensor([5, 9]), words, return_dict=False)[0].sum().backward()
    expected = training_flops(shape(num_layers=3), tokens=48, words=7, videos=2)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("max_file_gib", [5.0, 1e-5])
def test_diffusers_loads_what_was_written_to_equal_velocities(max_file_gib, tmp_path):
    model, meta = whole(), build_wan(shape())
    state = model.state_dict()
    options = Namespace(dtype="float32", max_file_gib=max_file_gib)
    size = write_folder(meta, lambda names: {n: state[n].clone() for n in names}, tmp_path, options)
    assert size == sum(4 * tensor.numel() for tensor in state.values())
    loaded = WanTransformer3DModel.from_pretrained(tmp_path)
    for parameter in loaded.parameters():  # in a file, where products end in other bits
        parameter.data = parameter.data.clone()
    inputs = (torch.randn(1, 3, 2, 4, 4), torch.tensor([700]), torch.randn(1, 4, 10))
    with torch.no_grad():
        assert torch.equal(loaded(*inputs).sample, model.eval()(*inputs).sample)
    assert WanConfig(path=str(tmp_path)).shape("all") == shape()
    assert len(list(tmp_path.glob("diffusion_pytorch_model*.safetensors"))) == (
        1 if max_file_gib > 1 else 6
    )


def test_what_is_never_rounded_stays_in_fp32(tmp_path):
    from safetensors.torch import load_file

    state = whole().state_dict()
    options = Namespace(dtype="bfloat16", max_file_gib=5.0)
    write_folder(build_wan(shape()), lambda names: {n: state[n] for n in names}, tmp_path, options)
    stored = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert stored["blocks.0.scale_shift_table"].dtype == torch.float32
    assert stored["condition_embedder.time_embedder.linear_1.weight"].dtype == torch.float32
    assert stored["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16


def test_a_pipelines_folder_has_both_experts_and_their_boundary(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.9}))
    for name, layers in (("transformer", 3), ("transformer_2", 4)):
        build_wan(shape(num_layers=layers)).save_config(tmp_path / name)
    config = WanConfig(path=str(tmp_path))
    assert config.shape("high_noise")["num_layers"] == config.shape("all")["num_layers"] == 3
    assert config.shape("low_noise")["num_layers"] == 4
    assert WanConfig(path=str(tmp_path), num_layers=1).shape("low_noise")["num_layers"] == 1
    assert boundary_of(str(tmp_path)) == 0.9
    assert boundary_of(None) == boundary_of(str(tmp_path / "transformer")) == BOUNDARY


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"_class_name": "UNet2DModel"}, "is of a UNet2DModel, not a WanTransformer3DModel"),
        ({"image_dim": 1280}, "has image_dim, for images; text to video only"),
        ({"in_channels": 36}, "reads 36 channels and gives 16"),
        (None, "holds no config.json: set model.path, or task.expert"),
    ],
)
def test_folders_of_something_else_are_refused(about, words, tmp_path):
    if about is not None:
        text = json.dumps({"_class_name": "WanTransformer3DModel", "out_channels": 16, **about})
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="set model.path") as error:
        WanConfig(path=str(tmp_path)).shape("high_noise")
    assert words in str(error.value)


def test_sizes_that_cannot_be_are_refused():
    for config, words in (({"head_dim": 7}, "model.head_dim=7: set model.head_dim to 6, 8"),
                          ({"num_layers": 0}, "model.num_layers=0 is too small"),
                          ({"load_weights": True}, "model.load_weights=true needs a folder")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            WanConfig(**config)
