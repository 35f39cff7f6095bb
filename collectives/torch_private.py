"""The only place in `collectives` that calls private functions of torch.

`tests/collectives/test_torch_private.py` fails loudly when a new torch changes one of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor, with a storage of its own, on memory that somebody else keeps."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device=device)
    nbytes = numel * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


def current_raw_stream(device: int) -> int:
    """The driver's handle of the current stream; `torch.cuda.current_stream` takes 50 times longer."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def current_stream_numbers(device: int) -> tuple[int, int, int]:
    """What `set_stream` takes to come back to the current stream."""
    numbers: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device)
    return numbers


def stream_numbers(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """What `set_stream` takes to go to `stream`."""
    return stream.stream_id, stream.device_index, stream.device_type


def set_stream(numbers: tuple[int, int, int]) -> None:
    """Make a stream of the present device the current one; `torch.cuda.stream` takes far longer."""
    torch._C._cuda_setStream(*numbers)


def allocate_symmetric(
    nbytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Zeroed memory that every rank of `group` has mapped: this rank's, and the addresses of all.

    All ranks call it, in the same order; it waits for them and for the device.
    """
    import torch.distributed._symmetric_memory as symm_mem  # only where there is a GPU

    memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle: Any = symm_mem.rendezvous(memory, group)
    # The memory may begin inside the region that was mapped.
    shift = memory.data_ptr() - handle.buffer_ptrs[group.rank()]
    handle.barrier()
    torch.cuda.synchronize(device)
    return memory, [address + shift for address in handle.buffer_ptrs]
