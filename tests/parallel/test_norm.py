import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallel.norm import clip, global_norm
from tests.ranks import run_ranks


def whole_grads():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in ((6, 5), (3,), (1, 4), (8, 2))]


def check_norm():
    """Gradients on two meshes, sharded, replicated, plain and with empty shards."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    a, b, c, d = whole_grads()
    grads = [
        distribute_tensor(a, flat, [Shard(0)]),
        distribute_tensor(b, grid, [Replicate(), Shard(0)]),
        distribute_tensor(c, flat, [Shard(0)]),  # one row on four ranks
        d.clone(),
    ]
    norm, sums = global_norm(grads, extra=torch.tensor([1.0, float(dist.get_rank())]))
    clip(grads, norm, 1.0)
    after, _ = global_norm(grads, extra=torch.zeros(1))
    return norm.item(), sums.tolist(), after.item(), grads[0].full_tensor().tolist()


def test_norm_on_mixed_meshes_equals_that_of_one_process():
    reference = nn.utils.get_total_norm([g.double() for g in whole_grads()]).item()
    for norm, sums, after, clipped in run_ranks(4, check_norm):
        assert norm == pytest.approx(reference, rel=1e-6)
        assert sums == [4.0, 6.0]
        assert after == pytest.approx(1.0, rel=1e-5)
        torch.testing.assert_close(torch.tensor(clipped), whole_grads()[0] / reference)


def check_infinite():
    grads = [torch.full((2,), float("inf") if dist.get_rank() == 1 else 1.0)]
    norm, sums = global_norm(grads, extra=torch.tensor([float("nan") if dist.get_rank() else 0.0]))
    return norm.isfinite().item(), sums.isfinite().all().item()


def test_an_infinity_on_one_rank_reaches_all():
    assert run_ranks(2, check_infinite) == [(False, False)] * 2


def check_no_gradients():
    return global_norm([], extra=torch.ones(1))[0].item()


def test_no_gradients_have_norm_zero():
    assert run_ranks(2, check_no_gradients) == [0.0, 0.0]
