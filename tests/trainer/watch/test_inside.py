"""Gradients and activations of a model, by name, against one process that has all of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from trainer.watch.inside import Inside, blocks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(3, 7)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.outlet = nn.Linear(7, 1, bias=False)

    def forward(self, x_B3):
        x = self.inlet(x_B3)
        for layer in self.layers:
            x = layer(x)
        return self.outlet(x)


def made():
    torch.manual_seed(0)
    return Model(), torch.randn(8, 3)


def look(model, x_B3):
    """What is said about one step of a loss that is a mean over all ranks."""
    inside = Inside(2)
    with inside.step(2, model):
        for micro in x_B3.chunk(2):
            (model(micro).square().sum() / 8 * dist.get_world_size()).backward()
        inside.gradients(model)
    return inside.read()


def on_ranks(shape):
    model, x_B3 = made()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    return look(model, x_B3.chunk(dist.get_world_size())[dist.get_rank()])


def expected():
    """In fp64, without any of it."""
    model, x_B3 = made()
    model, x_B3 = model.double(), x_B3.double()
    (model(x_B3).square().sum() / 8).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    hidden = model.inlet(x_B3)
    passed = {"inlet": hidden}
    for number, layer in enumerate(model.layers):
        passed[f"layers.{number}"] = hidden = layer(hidden)
    return gradients, dict(model.named_parameters()), {**passed, "outlet": model.outlet(hidden)}


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2)])
def test_the_figures_are_those_of_the_whole_model(shape):
    gradients, weights, passed = expected()
    ranks = shape[0] * shape[1]
    for row in run_ranks(ranks, on_ranks, shape):
        assert (row["kind"], row["step"]) == ("statistics", 2)
        for found, all_of in ((row["gradients"], gradients), (row["weights"], weights)):
            assert list(found) == list(all_of)
            for name, tensor in all_of.items():
                assert found[name]["norm"] == pytest.approx(tensor.norm().item(), rel=1e-4)
                assert found[name]["max"] == pytest.approx(tensor.abs().max().item(), rel=1e-4)
                assert found[name]["broken"] == 0
        assert list(row["activations"]) == list(passed)
        for name, tensor in passed.items():
            rms = tensor.square().mean().sqrt().item()
            assert row["activations"][name]["rms"] == pytest.approx(rms, rel=1e-4)
            most = tensor.abs().max().item()
            assert row["activations"][name]["max"] == pytest.approx(most, rel=1e-4)


def check_broken():
    model, x_B3 = made()
    x_B3[0, 0] = float("nan")
    row = look(model, x_B3)
    assert row["activations"]["inlet"]["broken"] == pytest.approx(1 / 8)
    assert 0 < row["activations"]["inlet"]["rms"] < 10  # of the others
    assert row["gradients"]["inlet.weight"]["broken"] == 21
    inside = Inside(2)
    with inside.step(3, model):
        model(x_B3)
        assert not any(module._forward_hooks for module in model.modules())
    assert inside.read() == {}


def test_broken_elements_are_counted_and_other_steps_left_alone():
    run_ranks(1, check_broken)


def test_blocks_are_elements_of_lists_and_what_has_parameters_outside_of_them():
    assert list(blocks(Model())) == ["inlet", "layers.0", "layers.1", "outlet"]
