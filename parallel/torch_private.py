"""The only place that calls private functions of torch, with the check that they are still there.

`tests/parallel/test_torch_private.py` fails loudly when a new torch changes one of them.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import memory as cuda_memory
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

OLDEST = (2, 11)
TESTED = ("2.11", "2.13")
"""Oldest and newest torch that the tests have run on."""


def check_private_apis() -> None:
    """Raise `RuntimeError` if torch is too old, or a private function is not as it was tested."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        raise RuntimeError(f"torch {torch.__version__} is too old: install torch>=2.11")
    names = list(inspect.signature(compute_local_shape_and_global_offset).parameters)
    if names[:3] != ["global_shape", "mesh", "placements"]:
        raise RuntimeError(
            f"torch changed compute_local_shape_and_global_offset to {names}: springtide supports "
            f"torch {TESTED[0]} to {TESTED[1]}"
        )
    names = list(inspect.signature(FSDPState._pre_backward).parameters)
    if names != ["self", "grad"]:
        raise RuntimeError(
            f"torch changed FSDPState._pre_backward to {names}: springtide supports torch {TESTED[0]} "
            f"to {TESTED[1]}"
        )


def before_backward(module: Any) -> Callable[[Tensor], Tensor]:
    """The hook on the gradient of a module's output by which FSDP2 gathers the module's parameters."""
    hook: Callable[[Tensor], Tensor] = module._get_fsdp_state()._pre_backward
    return hook


def limit_waits(seconds: float) -> None:
    """Have collectives of every process group of this rank end after so long, like the default one's.

    Groups of a mesh take torch's own default instead, half an hour on the CPU.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def keep_memory_history(on: bool) -> None:
    """Have the allocator of this process's GPU remember what it gives to whom; False: no longer."""
    cuda_memory._record_memory_history(enabled="all" if on else None)


def write_memory_history(path: Path) -> None:
    """Write what the allocator remembers, for torch's memory viewer."""
    cuda_memory._dump_snapshot(str(path))


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds: one slice per dimension, maybe empty."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def dtensor_with(tensor: DTensor, local: Tensor) -> DTensor:
    """The same sharded tensor with other local values, which may be on another device.

    `DTensor.from_local` would move them to the mesh's device.
    """
    return DTensor(local, tensor._spec, requires_grad=False)
