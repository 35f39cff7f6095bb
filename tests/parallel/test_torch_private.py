"""Fails loudly when a new torch changes what `parallel.torch_private` relies on."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallel.torch_private import check_private_apis, dtensor_with, limit_waits, local_slices
from tests.ranks import run_ranks


def test_private_functions_look_as_they_did():
    check_private_apis()


def check_slices(shape, dims):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    sharded = distribute_tensor(whole, grid, placements)
    torch.testing.assert_close(whole[local_slices(sharded)], sharded.to_local())


def test_slices_are_what_torch_shards():
    for shape, dims in [
        ((5, 3), (None, 0)),
        ((1, 3), (None, 0)),
        ((5, 3), (1, 0)),
        ((7,), (0, 0)),
    ]:
        run_ranks(4, check_slices, shape, dims)
    assert local_slices(torch.zeros(2, 3)) == (slice(0, 2), slice(0, 3))


def check_other_values():
    grid = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.zeros(5, 3), grid, [Shard(0)])
    other = dtensor_with(sharded, torch.ones_like(sharded.to_local()))
    assert (other.shape, other.placements, other.requires_grad) == ((5, 3), (Shard(0),), False)
    torch.testing.assert_close(other.full_tensor(), torch.ones(5, 3))


def test_a_sharded_tensor_with_other_values():
    run_ranks(2, check_other_values)


def check_silence():
    """Even ranks of a mesh wait for odd ones, which do not come."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    limit_waits(1.0)
    begin = time.monotonic()
    if dist.get_rank() % 2 == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=mesh["shard"].get_group())
        assert time.monotonic() - begin < 30
    else:
        time.sleep(3)


def test_groups_of_a_mesh_wait_no_longer_than_they_were_told():
    run_ranks(4, check_silence)


def test_fsdp2_is_one_that_tide_knows():
    """Signatures, and the attributes of groups and parameters that the seam reads or replaces."""
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
    )

    from parallel.tide.seam import _dispatch, _return_types

    foreach_reduce = _fsdp_collectives.foreach_reduce
    assert len(_return_types(foreach_reduce)) in (6, 7)
    _dispatch()
    group, param = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    for name in (
        "_all_gather_process_group",
        "_reduce_scatter_process_group",
        "_use_post_forward_mesh",
    ):
        assert isinstance(getattr(group, name), property), name
    for name in ("alloc_all_gather_outputs", "free_unsharded_param", "init_unsharded_param"):
        assert callable(getattr(param, name)), name
    assert list(_fsdp_param_group.AllGatherResult._fields) == [
        "all_gather_output",
        "all_gather_event",
        "all_gather_work",
        "param_all_gather_input_dtypes",
        "param_all_gather_input_numels",
        "all_gather_input_split_sizes",
    ]
