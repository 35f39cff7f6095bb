"""Bytes that FSDP2's collectives read and write in a step, by cause.

Every operation is seen on its way to the device, and FSDP2 names the parts of its work for profilers,
so nothing of torch or of ours has to be changed to count.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ENTER, EXIT = "profiler::_record_function_enter_new", "profiler::_record_function_exit"
PUT, KEPT = "put to a peer", "put to itself"
"""What a transport does, beside the names of operations."""

MOVED_GATHER, MOVED_REDUCE = "moved by the all-gather", "moved by the reduce-scatter"
SUMMED = "gradients summed, scaled, added to (torch: in part inside the collective, unseen)"
CAUSES = {
    ("FSDP::all_gather", "aten::_foreach_copy_"): "own shards cast",
    ("FSDP::all_gather", "fsdp::all_gather_copy_in"): "own shards packed for the all-gather",
    ("FSDP::all_gather", "c10d::_allgather_base_"): MOVED_GATHER,
    ("FSDP::all_gather", PUT): MOVED_GATHER,
    ("FSDP::all_gather_copy_out", "fsdp::split_with_sizes_copy"): "gathered, copied to parameters",
    ("FSDP::all_gather_copy_out", "aten::cat"): "gathered, copied to parameters",
    ("FSDP::post_backward_reduce", "fsdp::chunk_cat"): "gradients packed and cast",
    ("FSDP::post_backward_reduce", "aten::cat"): "gradients packed and cast",
    ("FSDP::post_backward_reduce", "c10d::_reduce_scatter_base_"): MOVED_REDUCE,
    ("FSDP::post_backward_reduce", PUT): MOVED_REDUCE,
    ("FSDP::post_backward_reduce", KEPT): "own gradients staged",
    ("FSDP::post_backward_reduce", ""): SUMMED,
}
"""By part of FSDP2's work and operation; an empty one stands for all others."""
ORDER = list(dict.fromkeys(CAUSES.values()))
LAYOUT = [cause for cause in ORDER if "packed" in cause or "copied" in cause or "staged" in cause]
"""Causes that only change where bytes lie."""
VIEWS = {
    "view",
    "slice",
    "select",
    "expand",
    "as_strided",
    "detach",
    "empty",
    "split",
    "alias",
    "split_with_sizes",
    "chunk",
    "set_",
    "_unsafe_view",
    "narrow",
    "unbind",
    "t",
    "transpose",
}


class Copies(TorchDispatchMode):
    """Counts while it is active; `bytes` by cause, what is moved counted once."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size, self.bytes = world_size, Counter[str]()
        self._parts: list[str] = []
        self._putting = False

    def watch(self, put: Callable[..., None]) -> Callable[..., None]:
        """A transport's `put` that is counted by what it moves, however it does so."""

        def watched(
            link: Any, source: Tensor, region: Any, offset: int, peer: int, *rest: Any
        ) -> None:
            cause = CAUSES.get((self._part, KEPT if peer == link.rank else PUT))
            if cause is not None:
                self.bytes[cause] += source.nbytes * (2 if peer == link.rank else 1)
            self._putting = True
            put(link, source, region, offset, peer, *rest)
            self._putting = False

        return watched

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.name().partition(".")[0]
        if name == ENTER:
            self._parts.append(args[0].partition(" (")[0])
        elif name == EXIT:
            self._parts.pop()
        elif self._part and not self._putting and name.partition("::")[2] not in VIEWS:
            self._count(name, args, kwargs, result)
        return result

    @property
    def _part(self) -> str:
        """The part of FSDP2's work that is under way."""
        return next((p for p in reversed(self._parts) if p.startswith("FSDP::")), "")

    def _count(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        cause = CAUSES.get((self._part, name)) or CAUSES.get((self._part, ""))
        if cause is None:
            return
        if name == "c10d::_allgather_base_":
            self.bytes[cause] += args[1].nbytes * (self.world_size - 1)
        elif name == "c10d::_reduce_scatter_base_":
            self.bytes[cause] += args[1].nbytes * (self.world_size - 1) // self.world_size
        else:
            self.bytes[cause] += _read_and_written(name, args, kwargs, result)


def _read_and_written(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Of one operation: arguments are read, results written; a mere copy only writes its target."""
    if name == "fsdp::all_gather_copy_in":  # writes this rank's part of its output only
        return 2 * sum(t.nbytes for t in args[0])
    given = [t.nbytes for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if "copy_" in name or "out" in kwargs or name.startswith("fsdp::"):
        return sum(given)
    return sum(given) + sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
