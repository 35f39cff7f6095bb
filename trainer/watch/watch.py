"""One object through which the loop reports; only rank 0 writes and speaks."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rich.console import Console
from torch import nn

from collectives.host import all_gather, broadcast
from parallel.fsdp import Chosen
from parallel.waits import report_waits
from recipes.abilities import HasFigures, HasPanels
from recipes.task import Task
from trainer.config import Config
from trainer.data import Step
from trainer.errors import DONE, FAILED, STOPPED
from trainer.guard import Guard
from trainer.launch import CHAIN, EXCHANGE, Invocation
from trainer.optim import learning_rate
from trainer.plan import Plan
from trainer.process import console
from trainer.watch.clock import make_clock
from trainer.watch.goodput import first_start, goodput, productive_seconds
from trainer.watch.header import header_lines, print_header, short_path, versions
from trainer.watch.inside import Inside
from trainer.watch.interval import Interval, Outcome, compute_seconds, measured, summarize
from trainer.watch.metrics import append
from trainer.watch.peak import device_name, memory, peak_flops
from trainer.watch.profile import Profile
from trainer.watch.progress import ProgressLine, short
from trainer.watch.record import Record
from trainer.watch.redact import redact, redact_override
from trainer.watch.spikes import Spikes, origins
from trainer.watch.spikes import in_words as spike_in_words
from trainer.watch.stall import Stalls

_STARTED, _BEGAN = time.time(), time.monotonic()
"""Of this process, nearly: before the ranks meet and the model is built. The second cannot be set."""


class Watch:
    """Header, progress line, clock and record of a run."""

    def __init__(
        self,
        config: Config,
        invocation: Invocation,
        plan: Plan,
        run_dir: Path,
        device: torch.device,
        collectives: Chosen,
    ) -> None:
        self.config, self.invocation, self.plan = config, invocation, plan
        self.run_dir, self.device, self.collectives = run_dir, device, collectives
        self.tracker_id: str | None = None
        self.tokens, self.skipped = 0.0, 0
        self.clock = make_clock(device)
        self._waits_known = report_waits(self.clock.communication)
        self._peak = peak_flops(device)
        self._progress = ProgressLine(Console(), plan.steps)
        self._record: Record | None = None
        self.profile = Profile(
            config.trainer.profile, run_dir / "profile", dist.get_rank(), device, self._say
        )
        self._stalls = Stalls(
            config.logging.stall, run_dir / "stalls", dist.get_rank(), plan.world_size,
            lambda: self.clock.inside, self._speak, self._append,
        )  # fmt: skip
        self.inside = Inside(config.logging.statistics)
        self._spikes = Spikes(config.logging.spike)
        self._productive = 0.0
        self._before = 0.0
        self._last_step = 0

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            self._progress.say(text)

    def _speak(self, text: str) -> None:
        """From whichever rank: the first one may be what hangs."""
        if dist.get_rank() == 0:
            self._progress.say(text)
        else:
            print(text, file=console(), flush=True)

    def _append(self, row: Mapping[str, Any]) -> None:
        """Likewise."""
        append(self.run_dir / "metrics.jsonl", {**row, "time": time.time()})

    def open(self, task: Task, model: nn.Module, step: int, resumed: Path | None) -> None:
        """Print the header and open the files, at the start or after a resume at `step`."""
        self._task = task
        if dist.get_rank() == 0:
            plain = redact(asdict(self.config))
            OmegaConf.save(plain, self.run_dir / "config.yaml")
            record = Record(self.config.logging, self.run_dir, self._say, self.tracker_id)
            self.tracker_id = record.tracker.id
            self._print_header(task, model, step, resumed)
            kept = record.open(plain, step)
            self._productive = productive_seconds(kept)
            self._before = _STARTED - first_start(kept, _STARTED)
            self._record = record
            self._write(
                {
                    "kind": "start", "step": step, "started": _STARTED, "ranks": self.plan.world_size,
                    "device": device_name(self.device), "steps": self.plan.steps,
                    "skipped": self.skipped, "resumed": resumed.name if resumed else None,
                }
            )  # fmt: skip
            self._progress.open(step)
        broadcast(None)  # all ranks begin when rank 0 is ready
        self._first_step, self._begun = step, time.monotonic()
        self._last_step = step
        self._interval = Interval()

    def _print_header(self, task: Task, model: nn.Module, step: int, resumed: Path | None) -> None:
        lines = header_lines(
            self.config,
            self.invocation,
            self.plan,
            task.describe(),
            device=device_name(self.device),
            run_dir=self.run_dir,
        )
        total = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        shards = self.plan.weight_shards
        # fp32 weights, and of those that train gradients and two AdamW moments
        nbytes = (4 * total + 12 * trained) / shards
        kept = f"{nbytes / 2**30:.2f} GiB a rank for weights, gradients and optimizer"
        if self.device.type == "cuda":
            kept += f", of {torch.cuda.mem_get_info(self.device)[1] / 2**30:.0f}"
        part = f", of which {short(trained)} train" if trained < total else ""
        lines["parameters"] = f"{short(total)}{part}; {kept}"
        lines["checkpoints"] += f", {trained * 12 / 2**30:.2f} GiB each"
        lines["collectives"] = "; ".join([lines["collectives"], *self.collectives.notes])
        lines["versions"] = versions()
        lines["start"] = f"step {step}, from {resumed}" if resumed else "step 0, random weights"
        if self.config.trainer.resume == "auto" and not resumed:
            lines["start"] += "; the run folder has no checkpoint yet"
        if task.weights_folder() and not resumed:
            lines["start"] = f"step 0, weights of {task.weights_folder()}"
        print_header(self._progress.console, lines)

    def step(self, number: int, step: Step, outcome: Outcome, guard: Guard) -> None:
        """Note a step; report when it is time, which is when the host waits for the device."""
        self._stalls.step(number)
        self._spikes.note(number, step)
        if looked_at := self.inside.read():
            self._write(looked_at)
        interval = self._interval
        interval.outcomes.append(outcome)
        interval.tokens += step.count
        self.tokens += step.count
        interval.flops += step.flops
        self._last_step = number
        if number % self.config.logging.every == 0 or number == self.plan.steps:
            self.flush(guard)

    def flush(self, guard: Guard) -> None:
        """Count skipped steps, and report the steps that no report has covered yet, if any."""
        guard.read()
        if self._interval.steps:
            self._report(self._last_step, guard)

    def _report(self, number: int, guard: Guard) -> None:
        interval = self._interval
        loss, norm = interval.mean_loss(), interval.outcomes[-1].norm.item()
        phases = self.clock.read()
        now = time.monotonic()
        seconds = now - interval.since - sum(interval.pauses.values())
        by_rank = all_gather(
            measured(interval, phases, memory(self.device, self.collectives.symmetric_nbytes()))
        )
        self._report_spikes(interval.outcomes)
        skipped, self.skipped = guard.skipped - self.skipped, guard.skipped
        self._productive += seconds * (interval.steps - skipped) / interval.steps
        row: dict[str, Any] = {
            "kind": "train",
            "step": number,
            "loss": loss,
            "grad_norm": norm,
            "lr": learning_rate(self.config.optim, number, self.plan.steps),
            "tokens": self.tokens,
            "tokens_per_second": interval.tokens / seconds,
            "tokens_per_second_per_device": interval.tokens / seconds / self.plan.world_size,
            "mfu": None,
            "step_seconds": seconds / interval.steps,
            **summarize(by_rank),
            "skipped": guard.skipped,
            "goodput": goodput(self._productive, self._before, now - _BEGAN),
            "seconds": now - self._begun,
        }
        if self._peak is not None:
            row["mfu"] = interval.flops / seconds / (self._peak * self.plan.world_size)
        if not self._waits_known:
            row["communication_seconds"] = None
        self._interval = Interval(since=now)
        self._stalls.report(seconds / interval.steps)
        if self._record is not None:
            pace = (now - self._begun) / max(number - self._first_step, 1)
            self._progress.update(row, pace * (self.plan.steps - number))
            own = self._figures(number, interval.steps, compute_seconds(by_rank))
            for name, words in own.items():
                if isinstance(words, str):
                    self._progress.say(f"  {name}: {words}")
            row |= own
            self._write(row)

    def _report_spikes(self, outcomes: Sequence[Outcome]) -> None:
        for row in self._spikes.read(outcomes):
            if self._record is not None:
                self._progress.say(spike_in_words(row))
                self._write({**row, "where": origins(self._task, row["rank_samples"])})

    def _figures(self, number: int, steps: int, seconds: Sequence[float]) -> Mapping[str, Any]:
        """What the task has to add to a report."""
        if not isinstance(self._task, HasFigures):
            return {}
        return self._task.figures(number, steps, seconds)

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._record is not None:
            self._record.write(row)

    def evaluation(self, number: int, figures: Mapping[str, float], best: bool = False) -> None:
        """Report an evaluation, and whether it is the best so far."""
        if self._record is not None and figures:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            self._progress.say(f"eval at step {number}  {shown}" + "  (the best)" * best)
            self._panels()
            self._write({"kind": "eval", "step": number, **figures})

    def _panels(self) -> None:
        if self._record is not None and isinstance(self._task, HasPanels):
            self._record.panels(self._task.panels)

    def saved(self, number: int, path: Path, seconds: float) -> None:
        """Report a checkpoint that is on the disk, so long after it was begun."""
        if self._record is not None:
            self._progress.say(f"saved step {number} in {short_path(path)}")
            row = {"kind": "save", "step": number, "name": path.name, "write_seconds": seconds}
            self._write(row)

    @contextmanager
    def paused(self, pause: str = "saving") -> Iterator[None]:
        """Time in here (`saving`, `evaluation`) is not training time."""
        self._stalls.pause()
        if self.device.type == "cuda":  # what is queued is training, and counts
            torch.cuda.synchronize(self.device)
        begin = time.monotonic()
        yield
        self._interval.pauses[pause] += time.monotonic() - begin

    def close(self, number: int, code: int, newest: Path | None) -> None:
        """Print the last lines: what was written where, and what to try next."""
        self._panels()
        self._end(number, code)
        if dist.get_rank() != 0:
            return
        say = self._progress.say
        run_dir = self.run_dir
        if code == STOPPED and newest is None:
            say("stopped before the first step; nothing to save: start again with the same command")
        elif code == STOPPED and newest is not None:
            say(f"stopped after step {number}, saved in {short_path(newest)}")
            say(f"resume with: {resume_command(self.invocation, run_dir)}")
        elif code == DONE:
            seconds = time.monotonic() - self._begun
            say(f"done: {number} steps in {seconds:.0f} s; everything is in {short_path(run_dir)}")
            say("  report.html    look at it          metrics.jsonl  every figure")
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
        """Close files after a failure, without a word; a launcher of ours writes the page."""
        error = sys.exc_info()[1]
        why = f"{type(error).__name__}: {error}" if error is not None else None
        with suppress(OSError):  # a full disk may be the failure, and is not to hide another
            self._end(
                self._last_step, getattr(error, "code", FAILED), why, EXCHANGE not in os.environ
            )

    def _end(self, number: int, code: int, why: str | None = None, page: bool = True) -> None:
        report_waits(None)
        self._stalls.close()
        self._progress.close()
        self.profile.close()
        if self._record is not None:
            self._write({"kind": "end", "step": number, "code": code, "why": why})
            self._record.close(code, page)
            self._record = None


def resume_command(invocation: Invocation, run_dir: Path) -> str:
    """The command line that goes on with a run."""
    given = [redact_override(override) for override in invocation.overrides]
    kept = [o for o in given if not o.lstrip("+").startswith(("run.dir=", "trainer.resume="))]
    if invocation.kind == CHAIN:
        run_dir = run_dir.parent
    elif invocation.kind != "local":
        return f"the same command with run.dir={short_path(run_dir)} trainer.resume=auto"
    words = [*kept, f"run.dir={short_path(run_dir)}", "trainer.resume=auto"]
    return "python -m trainer " + " ".join(shlex.quote(word) for word in words)
