import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from tests.runs.helpers import SMALL, metrics, program, train
from trainer.replicas import ReplicaError, check_replicas, odd_ranks


def check_flipped_bit(shape, rank, bit):
    """Two copies, each on two ranks: they agree, until one bit of one of them changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    check_replicas(model, 1)
    if dist.get_rank() == rank:
        local = model[1].weight.to_local()
        local.view(torch.int32)[0, 1] ^= 1 << bit
    with pytest.raises(ReplicaError, match=rf"after step 2 the copies of 1\.weight.*rank {rank},"):
        check_replicas(model, 2)


@pytest.mark.parametrize(("shape", "rank", "bit"), [((4, 1), 3, 0), ((4, 1), 0, 30)])
def test_one_bit_is_noticed_and_the_odd_rank_named(shape, rank, bit):
    run_ranks(4, check_flipped_bit, shape, rank, bit)


def test_the_majority_is_right():
    assert odd_ranks([((0,), 5), ((1,), 7), ((0,), 5), ((1,), 7)]) == []
    assert odd_ranks([((), 5), ((), 5), ((), 6)]) == [2]
    assert odd_ranks([((0,), 5), ((1,), 7), ((0,), 6), ((1,), 7), ((0,), 6)]) == [0]


@pytest.mark.slow
def test_copies_of_a_run_agree_and_one_copy_has_none_to_agree_with(tmp_path):
    words = [*SMALL, "trainer.check_replicas=1", "trainer.steps=3", "run.dir=r"]
    code, output = program(*words, cwd=tmp_path)
    assert code == 2, output
    assert "there is one copy of the weights: set trainer.check_replicas=0" in output
    code, output = train(*words, "parallel.replicate=2", cwd=tmp_path)
    assert code == 0, output
    assert len(metrics(tmp_path / "r")) == 3
