"""Nothing is written but parameter storage, gradient shards and staging."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.tide import seam
from tests.parallel.tide.training import Case, batch, build, loss_of
from tests.ranks import run_ranks

VIEWS = ("view", "slice", "select", "expand", "as_strided", "detach", "empty", "split", "alias")


class Writes(TorchDispatchMode):
    """Notes the memory that every operation inside writes to."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if not any(word in name for word in VIEWS):
            targets = args[0] if name.split(".")[1].endswith("_") else result
            for tensor in tree_leaves(targets):
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    self.seen.append((name, tensor.data_ptr(), tensor.nbytes, tensor.dtype))
        return result


def check_writes(case):
    """Of two steps, after a first one that allocates; returns strays and the number of writes."""
    model = build(case, "tide")
    [pool] = model.tide.pools
    writes, shards = Writes(), []

    def watched(function):
        def call(*args):
            with writes:
                result = function(*args)
            for param in args[0] if function is reduce else ():
                storage = param.sharded_param.grad._local_tensor.untyped_storage()
                shards.append((storage.data_ptr(), storage.nbytes()))
            return result

        return call

    reduce = _fsdp_param_group.foreach_reduce
    names = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        if step == 1:
            for name in names:
                setattr(_fsdp_param_group, name, watched(getattr(_fsdp_param_group, name)))
        for _ in range(case.accumulation):
            loss_of(case, model, batch(case, generator), step).backward()
    allowed = [*shards, (pool.reduce.scratch.data_ptr(), pool.reduce.scratch.nbytes)]
    memories = [slot.memory for slot in pool.slots] + [pool.reduce.staging]
    if pool.reduce.crossing is not None:
        memories.append(pool.reduce.crossing.memory)
        allowed.append((pool.reduce.total.data_ptr(), pool.reduce.total.nbytes))
    for memory in memories:
        for rank in range(pool.fabric.topology.node_size):
            whole = memory.local.tensor(rank, 0, memory.nbytes, torch.uint8)
            allowed.append((whole.data_ptr(), memory.nbytes))
    strays = [
        (name, nbytes)
        for name, pointer, nbytes, dtype in writes.seen
        if not any(begin <= pointer and pointer + nbytes <= begin + size for begin, size in allowed)
        and dtype != torch.int64  # the numbers in front of a message between nodes
    ]
    dist.barrier()
    return strays, len(writes.seen)


BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
CASES = {
    "fp32": Case(),
    "bf16": Case(parallel=BF16),
    "slot reuse": Case(parallel=BF16, tide={"slot_reuse": True}),
    "columns": Case("toy", placement=1),
    "added to shards": Case(accumulation=2),
    "two nodes": Case(node_size=1),
    "two nodes, bf16": Case(node_size=1, parallel=BF16),
}


@pytest.mark.parametrize("case", list(CASES))
def test_nothing_is_written_but_parameters_shards_and_staging(case):
    for strays, count in run_ranks(2, check_writes, CASES[case]):
        assert strays == []
        assert count > 100


def check_addresses():
    """The gathered bytes are the parameters: same address, each on a storage of its own."""
    model = build(Case(), "tide")
    loss_of(Case(), model, torch.zeros(1, 4, dtype=torch.long), 0)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        [group] = seam._param_groups(module._get_fsdp_state())
        module.unshard()
        for param, whole in zip(
            group.fsdp_params, group._all_gather_comm.gather.tensors, strict=True
        ):
            assert param._unsharded_param.data_ptr() == whole.data_ptr()
            assert param._unsharded_param.storage_offset() == 0
        module.reshard()
    dist.barrier()


def test_parameters_live_in_the_slots():
    run_ranks(2, check_addresses)
