"""Where compute waits for communication, for whoever measures it.

FSDP2 gathers ahead of the compute and reduces behind it, and has it wait in a few functions of its
parameter groups. `report_waits(span)` has each of these run inside `span()`; our own code that waits
says so with `waiting()`. While nobody measures, nothing happens.

On the CPU the host itself gathers and reduces there, with the copies that this takes. On a GPU these
functions only queue: a span that marks the current stream, which is the compute's, sees it wait, and
sees it copy into and out of the buffers of torch's collectives, which TIDE does without. What is under
way on other streams meanwhile is hidden, and no span sees it.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group

Span = Callable[[], AbstractContextManager[None]]

EXPECTED = {
    "unshard": ["self", "async_op"],
    "wait_for_unshard": ["self"],
    "post_backward": ["self", "unused"],
    "finalize_backward": ["self"],
}
"""FSDP2's functions that gather, wait for what was gathered, reduce, and wait for what was reduced,
with what they take in torch 2.11 to 2.13."""

_span: Span | None = None  # autograd calls hooks on its own threads: nothing thread-local would do


def waiting() -> AbstractContextManager[None]:
    """Around code in which compute waits for communication."""
    return _span() if _span is not None else nullcontext()


def report_waits(span: Span | None) -> bool:
    """Have every wait in this process run inside `span()`; None: no longer.

    Returns whether FSDP2's are among them: not if this torch has changed it.
    """
    global _span
    _span = span
    group: Any = _fsdp_param_group.FSDPParamGroup
    if not hasattr(group.unshard, "reports_waits"):
        if changed_names():
            return False
        for name in EXPECTED:
            setattr(group, name, _reporting(getattr(group, name)))
    return True


def changed_names() -> list[str]:
    """Which of FSDP2's functions are not as they were tested."""
    group: Any = _fsdp_param_group.FSDPParamGroup
    found = {
        name: list(inspect.signature(getattr(group, name)).parameters)
        for name in EXPECTED
        if hasattr(group, name)
    }
    return [name for name, parameters in EXPECTED.items() if found.get(name) != parameters]


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    gathers, reduces = function.__name__ == "unshard", function.__name__ == "post_backward"

    @functools.wraps(function)
    def run(group: Any, *args: Any, **named: Any) -> Any:
        only_queued = gathers and group.device.type != "cpu"  # on streams of its own
        keeps = reduces and not group.reduce_grads  # a micro-batch that only adds up gradients
        if _span is None or only_queued or keeps:
            return function(group, *args, **named)
        with _span():
            return function(group, *args, **named)

    run.reports_waits = True  # type: ignore[attr-defined]
    return run
