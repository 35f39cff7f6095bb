"""One forward and backward pass on the meta device, watched: what is alive when, and what it computes.

Meta tensors have shapes and no data. Every operation is seen by a dispatch mode, which notes the
storage of each new tensor and when it goes, the floating-point operations of matrix products, and the
bytes that everything else reads and writes. Gradients of a group of parameters (what FSDP2 reduces
together) are dropped when the last of them is there, as FSDP2 does.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

ROUND = 512
"""What the caching allocator rounds small blocks up to."""


@dataclass(frozen=True)
class Moment:
    """The most that was alive while so many gradients had been reduced."""

    activations: int
    """Bytes of all tensors but parameters and reduced gradients."""
    reduced: int
    """Elements of gradients that were reduced before."""


@dataclass
class Probe:
    """What one micro-batch needs."""

    moments: list[Moment] = field(default_factory=list)
    matmul_flops: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of the forward pass and of the backward pass, recomputation included, attention not: how much of
    it there is depends on the documents, which the task knows."""
    moved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Bytes that all other operations read and write, likewise."""
    loss_activations: int = 0
    """Alive when the loss is there: what the backward pass was left."""


class _Watch(TorchDispatchMode):
    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe, self.alive, self.most, self.reduced, self.phase = probe, 0, 0, 0, 0
        self.seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # The program looks at a value; there is none. Masks that select all are the common case.
            return True if args[0].dtype == torch.bool else 1
        out = func(*args, **(kwargs or {}))
        inputs = [a for a in _flat((args, kwargs or {})) if isinstance(a, Tensor)]
        outputs = [a for a in _flat(out) if isinstance(a, Tensor)]
        new = sum(self._note(tensor) for tensor in outputs)
        packet = func._overloadpacket
        if packet in flop_registry and "att" not in packet.__name__:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self.probe.matmul_flops[self.phase] += flops
        elif new or func._schema.is_mutable:
            self.probe.moved[self.phase] += sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
        return out

    def _note(self, tensor: Tensor) -> int:
        """Count a tensor's storage if it is new; returns its bytes then."""
        storage = tensor.untyped_storage()
        if storage in self.seen:
            return 0
        nbytes = -(-storage.nbytes() // ROUND) * ROUND
        self.seen[storage] = None
        self.alive += nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._free, nbytes)
        return nbytes

    def _free(self, nbytes: int) -> None:
        self.alive -= nbytes

    def next_moment(self, reduced: int) -> None:
        """Another group's gradients are reduced."""
        self.probe.moments.append(Moment(self.most, self.reduced))
        self.reduced += reduced
        self.most = self.alive


def probe(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    loss: Callable[[], Tensor],
) -> Probe:
    """Watch `loss()`, a scalar on meta, and its backward pass; `groups` are reduced together."""
    found = Probe()
    watch = _Watch(found)
    for tensor in (*model.parameters(), *model.buffers()):
        watch.seen[tensor.untyped_storage()] = None
    handles = [handle for group in groups for handle in _reduce_together(group, watch.next_moment)]
    try:
        with _kernels_of_gpus(), watch:
            value = loss()
            found.loss_activations, watch.phase = watch.alive, 1
            value.backward()
    finally:
        for handle in handles:
            handle.remove()
    watch.next_moment(0)
    return found


def _reduce_together(
    group: Sequence[nn.Parameter], reduced: Callable[[int], None]
) -> Iterator[Any]:
    """Drop the gradients of a group when all are there."""
    waiting = [p for p in group if p.requires_grad]
    left = {id(p) for p in waiting}

    def arrived(parameter: Tensor) -> None:
        left.discard(id(parameter))
        if not left:
            for p in waiting:
                p.grad = None
            left.update(id(p) for p in waiting)
            reduced(sum(p.numel() for p in waiting))

    for parameter in waiting:
        yield parameter.register_post_accumulate_grad_hook(arrived)


class _Flash(torch.autograd.Function):
    """Stands in for a fused attention kernel: keeps what such a kernel keeps."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        context.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        query, key, value, _, _ = context.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Norm(torch.autograd.Function):
    """Stands in for a GPU's kernel of RMS norms, which keeps its input and a number a row."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        root = x.new_empty(x.shape[:-1], dtype=torch.float32)
        context.save_for_backward(x, root, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        x, _, *weights = context.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights[0]) if weights else None


@contextmanager
def _kernels_of_gpus() -> Iterator[None]:
    """Meta tensors would go slow ways: of attention, which keeps every score, and of norms, in steps."""
    functional: Any = nn.functional
    attention, rms_norm = functional.scaled_dot_product_attention, functional.rms_norm

    def fused(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Flash.apply(query, key, value)

    def norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
        if len(shape) > 1 or (weight is not None and weight.dtype != x.dtype):
            return rms_norm(x, shape, weight, eps)  # as GPUs do, too
        return _Norm.apply(x, weight)

    functional.scaled_dot_product_attention, functional.rms_norm = fused, norm
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.rms_norm = attention, rms_norm


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
