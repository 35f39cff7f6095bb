"""Tasks on streams that share a GPU: what begins when, and how long it takes beside the others.

A stream does its tasks in their order. A task begins when the one before it on its stream and all that
it needs have ended, and goes on at a speed that depends on what else is going on (`speeds`). Between two
events nothing changes, so the time to the next one can be worked out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

EPSILON = 1e-12


@dataclass(eq=False)
class Task:
    """Something that a stream does."""

    name: str
    stream: str
    kind: str
    """For `speeds`."""
    seconds: float
    """By itself."""
    needs: Sequence["Task"] = ()
    begin: float = field(default=-1.0, init=False)
    end: float = field(default=-1.0, init=False)


Speeds = Callable[[Sequence[str]], Sequence[float]]
"""From the kinds of all tasks that are going on, to how fast each is: 1 is its speed by itself."""


def run(tasks: Sequence[Task], speeds: Speeds) -> float:
    """Give each task its begin and end; returns when all is over. Tasks are in the host's order.

    Raises `ValueError` if some can never begin.
    """
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        queues.setdefault(task.stream, []).append(task)
    left = {task: task.seconds for task in tasks}
    going: list[Task] = []
    now, ended = 0.0, 0
    while ended < len(tasks):
        for queue in queues.values():
            if queue and queue[0].begin < 0 and all(need.end >= 0 for need in queue[0].needs):
                queue[0].begin = now
                going.append(queue[0])
        if not going:
            waiting = [queue[0].name for queue in queues.values() if queue]
            raise ValueError(f"these wait for each other: {', '.join(waiting)}")
        rates = speeds([task.kind for task in going])
        step = min(left[task] / rate for task, rate in zip(going, rates, strict=True))
        now += step
        for task, rate in zip(going, rates, strict=True):
            left[task] -= step * rate
        for task in [task for task in going if left[task] <= EPSILON]:
            task.end = now
            going.remove(task)
            queues[task.stream].pop(0)
            ended += 1
    return now
