"""A profile of a few steps: a timeline of every rank, and on GPUs what its memory was used for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel.torch_private import keep_memory_history, write_memory_history

TIMELINES = "open it at https://ui.perfetto.dev or chrome://tracing"
MEMORY = "open it at https://pytorch.org/memory_viz"


@dataclass(kw_only=True)
class ProfileConfig:
    """The `trainer.profile` node."""

    steps: list[int] | None = None
    """First and last step of a profile, such as [10,12]; null: none."""
    memory: bool = False
    """Also write what each rank's GPU memory was used for in these steps."""

    def __post_init__(self) -> None:
        if self.steps is not None and not (
            len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]
        ):
            raise ValueError(
                f"trainer.profile.steps={self.steps}: set trainer.profile.steps to the first and last "
                "step of the profile, such as [10,12], or to null"
            )


class Profile:
    """The window of steps that is profiled on this rank."""

    def __init__(
        self,
        config: ProfileConfig,
        folder: Path,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.folder, self.rank = config, folder, rank
        self.device, self._say = device, say
        self._profiler: Any = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`: begin before the first of the window, write after the last."""
        first, last = self.config.steps or (0, 0)
        if not first <= number <= last or not first:
            yield
            return
        if self._profiler is None:
            self._begin()
        with record_function(f"step {number}"):
            yield
        if number == last:
            self.close()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if self.config.memory:
                keep_memory_history(True)
        elif self.config.memory:
            self._say("no memory profile: that needs a GPU")
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def close(self) -> None:
        """Write what there is of a window that has begun; a run may end inside it."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"rank{self.rank}.json.gz"
        profiler.export_chrome_trace(str(file))
        self._say(f"profile of each rank in {self.folder}: {TIMELINES}")
        if self.config.memory and self.device.type == "cuda":
            write_memory_history(self.folder / f"rank{self.rank}-memory.pickle")
            keep_memory_history(False)
            self._say(f"and of its memory (*-memory.pickle): {MEMORY}")
