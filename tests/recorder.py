"""`with Recorder() as log: ...`: every collective of torch that this rank starts, in order.

    log.calls                       [Call("alltoall_base_", (0, 1, 2, 3), 1024, [...], [...]), ...]
    log.bytes(ranks=(0, 1, 2, 3))   sent by all-to-alls over these ranks

It sees what goes through torch's dispatcher, in the backward pass as well.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Call:
    """One collective."""

    name: str
    ranks: tuple[int, ...]
    """Of its group."""
    numel: int
    """Elements of its tensors."""
    sends: tuple[int, ...] = ()
    """Bytes to each rank of the group, where it is an all-to-all."""


@dataclass
class Recorder(TorchDispatchMode):
    """See above."""

    calls: list[Call] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append(_call(func, args))
        return func(*args, **(kwargs or {}))

    def all_to_alls(self, ranks=None):
        """Those over exactly these ranks; None: all."""
        found = [call for call in self.calls if call.name.startswith("alltoall")]
        return [call for call in found if ranks in (None, call.ranks)]

    def bytes(self, ranks=None):
        """What all-to-alls send from this rank, to itself included."""
        return sum(sum(call.sends) for call in self.all_to_alls(ranks))


def _call(func, args):
    name, numel, ranks, sends = func._schema.name.removeprefix("c10d::"), 0, (), ()
    lists = []
    for arg in args:
        for each in arg if isinstance(arg, (list, tuple)) else [arg]:
            if isinstance(each, torch.Tensor):
                numel += each.numel()
            elif isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                group = dist.ProcessGroup.unbox(each)
                ranks = tuple(dist.get_process_group_ranks(group))
        if isinstance(arg, list) and all(isinstance(n, int) for n in arg):
            lists.append(arg)
    if name == "alltoall_base_":
        row = args[1].element_size() * math.prod(args[1].shape[1:])
        sends = tuple(n * row for n in lists[1] or [len(args[1]) // len(ranks)] * len(ranks))
    return Call(name, ranks, numel, sends)
