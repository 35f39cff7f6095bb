"""One object through which the loop reports; only rank 0's has anything to say."""

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rich.console import Console
from torch import Tensor, nn

from recipes.task import Task
from trainer.config import Config
from trainer.data import Step
from trainer.errors import DONE, STOPPED
from trainer.guard import Guard
from trainer.launch import Invocation
from trainer.optim import learning_rate
from trainer.plan import Plan
from trainer.watch.header import header_lines, print_header, short_path, versions
from trainer.watch.metrics import Metrics
from trainer.watch.peak import device_name, memory_gib, peak_flops
from trainer.watch.progress import ProgressLine, short
from trainer.watch.redact import redact, redact_override
from trainer.watch.tracker import Tracker


@dataclass
class Interval:
    """What has happened since the last report."""

    since: float
    losses: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None
    tokens: float = 0.0
    flops: float = 0.0
    paused: float = 0.0


class Watch:
    """Header, progress line, metrics file and tracker of a run."""

    def __init__(
        self,
        config: Config,
        invocation: Invocation,
        plan: Plan,
        run_dir: Path,
        device: torch.device,
    ) -> None:
        self.config, self.invocation, self.plan = config, invocation, plan
        self.run_dir, self.device = run_dir, device
        self.speaks = dist.get_rank() == 0
        self.tracker_id: str | None = None
        self.tokens = 0.0
        self._peak = peak_flops(device)
        self._metrics = Metrics(run_dir / "metrics.jsonl")
        self._progress = ProgressLine(Console(), plan.steps)
        self._tracker: Tracker | None = None

    def open(
        self, task: Task, model: nn.Module, step: int, resumed: Path | None, notes: list[str]
    ) -> None:
        """Print the header and open the files, at the start or after a resume at `step`."""
        if self.speaks:
            plain = redact(asdict(self.config))
            OmegaConf.save(plain, self.run_dir / "config.yaml")
            self._tracker = Tracker(self.config.logging.wandb, self.run_dir, self.tracker_id)
            self.tracker_id = self._tracker.id
            self._print_header(task, model, step, resumed, notes)
            self._tracker.open(plain, self._progress.say)
            self._metrics.open(step)
            self._progress.open(step)
        self._first_step, self._started = step, time.monotonic()
        self._interval = Interval(since=self._started)

    def _print_header(
        self, task: Task, model: nn.Module, step: int, resumed: Path | None, notes: list[str]
    ) -> None:
        lines = header_lines(
            self.config,
            self.invocation,
            self.plan,
            task.describe(),
            device=device_name(self.device),
            run_dir=self.run_dir,
        )
        total = sum(p.numel() for p in model.parameters())
        shards = self.plan.mesh["shard"]
        # fp32 weights, gradients and two AdamW moments
        kept = f"{total * 16 / shards / 2**30:.2f} GiB a rank for weights, gradients and optimizer"
        if self.device.type == "cuda":
            kept += f", of {torch.cuda.mem_get_info(self.device)[1] / 2**30:.0f}"
        lines["parameters"] = f"{short(total)}; {kept}"
        lines["checkpoints"] += f", {total * 12 / 2**30:.2f} GiB each"
        if notes:
            lines["collectives"] = "; ".join([lines["collectives"], *notes])
        lines["versions"] = versions()
        lines["start"] = f"step {step}, from {resumed}" if resumed else "step 0, random weights"
        if self.config.trainer.resume == "auto" and not resumed:
            lines["start"] += "; the run folder has no checkpoint yet"
        if task.weights_folder() and not resumed:
            lines["start"] = f"step 0, weights of {task.weights_folder()}"
        print_header(self._progress.console, lines)

    def step(self, number: int, step: Step, loss: Tensor, norm: Tensor, guard: Guard) -> None:
        """Note a step; report when it is time, which is when the host waits for the device."""
        interval = self._interval
        interval.losses.append(loss)
        interval.norm = norm
        interval.tokens += step.count
        self.tokens += step.count
        interval.flops += step.flops
        if number % self.config.logging.every == 0 or number == self.plan.steps:
            self._report(number, guard)

    def _report(self, number: int, guard: Guard) -> None:
        interval = self._interval
        guard.read()
        assert interval.norm is not None
        loss = torch.stack(interval.losses).double().nanmean().item()
        norm = interval.norm.item()
        now = time.monotonic()
        seconds = now - interval.since - interval.paused
        row: dict[str, Any] = {
            "kind": "train",
            "step": number,
            "loss": loss,
            "grad_norm": norm,
            "lr": learning_rate(self.config.optim, number, self.plan.steps),
            "tokens": self.tokens,
            "tokens_per_second": interval.tokens / seconds,
            "step_seconds": seconds / len(interval.losses),
            "mfu": None,
            "memory_gib": memory_gib(self.device),
            "skipped": guard.skipped,
            "seconds": now - self._started,
        }
        if self._peak is not None:
            row["mfu"] = interval.flops / seconds / (self._peak * self.plan.world_size)
        self._interval = Interval(since=now)
        if self.speaks:
            pace = (now - self._started) / max(number - self._first_step, 1)
            self._progress.update(row, pace * (self.plan.steps - number))
            self._write(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        self._metrics.write(row)
        if self._tracker is not None:
            self._tracker.log(row)

    def flush(self, guard: Guard) -> None:
        """Count skipped steps that no report has covered yet."""
        guard.read()

    def evaluation(self, number: int, figures: Mapping[str, float]) -> None:
        """Report an evaluation."""
        if self.speaks and figures:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            self._progress.say(f"eval at step {number}  {shown}")
            self._write({"kind": "eval", "step": number, **figures})

    def saved(self, number: int, path: Path) -> None:
        """Report a checkpoint."""
        if self.speaks:
            self._progress.say(f"saved step {number} in {short_path(path)}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here (evaluating, saving) is not training time."""
        if self.device.type == "cuda":  # what is queued is training, and counts
            torch.cuda.synchronize(self.device)
        begin = time.monotonic()
        yield
        self._interval.paused += time.monotonic() - begin

    def close(self, number: int, code: int, newest: Path | None) -> None:
        """Print the last lines: what was written where, and what to try next."""
        if not self.speaks:
            return
        self._progress.close()
        if self._tracker is not None:
            self._tracker.close(code)
        self._metrics.close()
        say = self._progress.say
        run_dir = self.run_dir
        if code == STOPPED and newest is None:
            say("stopped before the first step; nothing to save: start again with the same command")
        elif code == STOPPED and newest is not None:
            say(f"stopped after step {number}, saved in {short_path(newest)}")
            say(f"resume with: {resume_command(self.invocation, run_dir)}")
        elif code == DONE:
            seconds = time.monotonic() - self._started
            say(f"done: {number} steps in {seconds:.0f} s; everything is in {short_path(run_dir)}")
            say("  metrics.jsonl  every figure        config.yaml  what ran")
            if newest is not None:
                say(
                    f"  checkpoints/{newest.name}    go on with a larger trainer.steps and "
                    "trainer.resume=auto"
                )
            say(
                "try next: python -m trainer model.num_layers=8 optim.lr=1e-3, or "
                "python -m trainer --help for all recipes"
            )

    def abandon(self) -> None:
        """Close files after a failure, without a word."""
        self._progress.close()
        if self._tracker is not None:
            self._tracker.close(1)
        self._metrics.close()


def resume_command(invocation: Invocation, run_dir: Path) -> str:
    """The command line that goes on with a run."""
    given = [redact_override(override) for override in invocation.overrides]
    kept = [o for o in given if not o.lstrip("+").startswith(("run.dir=", "trainer.resume="))]
    if invocation.kind != "local":
        return f"the same command with run.dir={short_path(run_dir)} trainer.resume=auto"
    words = [*kept, f"run.dir={short_path(run_dir)}", "trainer.resume=auto"]
    return "python -m trainer " + " ".join(shlex.quote(word) for word in words)
