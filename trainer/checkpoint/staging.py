"""A copy of a rank's state in host memory, which the step does not wait for.

    compute stream    step n | forward, backward of n + 1 ........ | update n + 1
    copying stream            \\ weights and moments to the host / ^ waits for the copies

The copies are queued behind step n on a stream of their own, and the next update, which is the first
to change what they read, is queued behind them. The host waits for neither. Host memory is pinned, and
used again by every save; it is taken in the background after the first update, since pinning takes the
host about a second for every few GiB.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.torch_private import dtensor_with
from trainer.errors import CheckpointError

CHUNK = 1 << 28
"""Bytes of one allocation. Torch rounds each up to a power of two, and while memory is pinned the
driver may keep the training thread waiting: pieces of this size take 0.1 s."""
ALIGN = 512


class Staging:
    """Pinned host memory for the state of one rank; one copy at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._gpu else None
        self._chunks: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None
        self._guarded: torch.optim.Optimizer | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take host memory for tensors of so many bytes each, in any order."""
        for number, size in enumerate(place(sizes)[1]):
            if number == len(self._chunks):
                self._chunks.append(self._allocate(size))
            elif self._chunks[number].numel() < size:
                self._chunks[number] = self._allocate(size)

    def copy(
        self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Queue the copies of a nested state; its twin in host memory is filled when `wait` returns.

        The optimizer's next step waits for them, on the device. Buffers may change before that, in a
        forward pass, so they are cloned first. The copy before this one is overwritten.
        """
        if optimizer is not self._guarded:
            optimizer.register_step_pre_hook(lambda *_: self._hold_update())
            self._guarded = optimizer
        buffers = {buffer.data_ptr() for buffer in model.buffers()}
        sources = [_local(value) for value in _leaves(state)]
        sources = [s.clone() if s.data_ptr() in buffers else s for s in sources]
        sizes = [source.nbytes for source in sources]
        self.reserve(sizes)
        rooms = [
            self._chunks[chunk][offset : offset + source.nbytes]
            .view(source.dtype)
            .view(source.shape)
            for source, (chunk, offset) in zip(sources, place(sizes)[0], strict=True)
        ]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for source, room in zip(sources, rooms, strict=True):
                room.copy_(source, non_blocking=True)
                if self._stream is not None and source.is_cuda:
                    source.record_stream(self._stream)
            if self._stream is not None:
                self._copied = self._stream.record_event()
        return _with_leaves(state, iter(rooms))

    def wait(self) -> None:
        """Wait until the last copy is complete; called in the background."""
        if self._copied is not None:
            self._copied.synchronize()

    def _hold_update(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _allocate(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu)
        except RuntimeError as error:
            held = sum(chunk.numel() for chunk in self._chunks)
            raise CheckpointError(
                f"no host memory for a copy of the state: {size / 2**30:.1f} GiB more than the "
                f"{held / 2**30:.1f} GiB this rank has taken: set checkpoint.background=false"
            ) from error


def place(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Chunk and offset of each tensor, and the bytes of the chunks, which no order of them changes."""
    places, chunks = [(0, 0)] * len(sizes), [0]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = -(-sizes[index] // ALIGN) * ALIGN
        if chunks[-1] and chunks[-1] + size > CHUNK:
            chunks.append(0)
        places[index] = (len(chunks) - 1, chunks[-1])
        chunks[-1] += size
    return places, chunks


def sizes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of each tensor of this rank that a checkpoint will hold, but for random states."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *moments]
    return [_local(value).nbytes for value in tensors if isinstance(value, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _leaves(state: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in state.values():
        found += _leaves(value) if isinstance(value, Mapping) else [value]
    return found


def _with_leaves(state: Mapping[str, Any], leaves: Any) -> dict[str, Any]:
    """The same nesting with other local tensors, taken in the order of `_leaves`."""
    return {
        key: _with_leaves(value, leaves)
        if isinstance(value, Mapping)
        else dtensor_with(value, next(leaves))
        if isinstance(value, DTensor)
        else next(leaves)
        for key, value in state.items()
    }
