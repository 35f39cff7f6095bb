"""The header of a run: one screen that says what will happen, before it does."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from collectives.nccl import running_version, version_text
from parallel.mesh import SequenceConfig
from trainer.config import Config
from trainer.launch import Invocation
from trainer.plan import Plan
from trainer.watch import tracker
from trainer.watch.redact import redact_override


def header_lines(
    config: Config,
    invocation: Invocation,
    plan: Plan,
    task_lines: Mapping[str, str],
    *,
    device: str,
    run_dir: Path | None,
) -> dict[str, str]:
    """The lines that are known without a process group or weights."""
    trainer, parallel = config.trainer, config.parallel
    shown = [o for o in invocation.overrides if not o.startswith("+recipe=")]
    overrides = " ".join(redact_override(override) for override in shown)
    precision = parallel.param_dtype
    if parallel.param_dtype != parallel.reduce_dtype:
        precision += f", gradients summed in {parallel.reduce_dtype}"
    extras = [f"activation checkpointing {parallel.activation_checkpointing}"]
    extras += ["compiled blocks"] if parallel.compile else []
    optim = config.optim
    nodes = f"{plan.world_size} x {device}" if plan.world_size > 1 else device
    lines = {
        "recipe": f"{config.recipe}  {overrides}".rstrip(),
        "ranks": f"{nodes}, {invocation.kind}; "
        + " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
        + (f"; experts divided by {parallel.experts}" if parallel.experts > 1 else ""),
        **task_lines,
        "batch": f"{trainer.batch_size} samples = {plan.data_parallel} "
        f"{'groups' if 'sequence' in plan.mesh else 'ranks'} x "
        f"{plan.micro_batch_size} x {plan.accumulation} micro-batches"
        + _shared(config.parallel.sequence, plan),
        "steps": f"{plan.steps:,}; evaluation "
        + (f"every {trainer.eval_every}" if trainer.eval_every else "never")
        + (f", {trainer.eval_samples:,} samples" if trainer.eval_samples else ""),
        "optimizer": f"AdamW, lr {optim.lr:g} {optim.schedule}, warmup {optim.warmup}, "
        f"decay {optim.weight_decay:g}, clip {optim.max_norm:g}",
        "precision": f"{precision}; {', '.join(extras)}",
        "collectives": config.collectives.name,
        "safety": f"seed {trainer.seed}"
        + (", deterministic" if trainer.deterministic else "")
        + f"; up to {trainer.nonfinite_limit} non-finite steps in a row are skipped",
    }
    if run_dir is not None:
        lines["run folder"] = f"{short_path(run_dir)} ({free_gib(run_dir):,.0f} GiB free)"
    every = config.checkpoint.every
    lines["checkpoints"] = (
        f"every {every} steps" if every else "at the end only"
    ) + f", {config.checkpoint.keep} kept"
    if config.checkpoint.best_by is not None:
        way = "highest" if config.checkpoint.highest else "lowest"
        lines["checkpoints"] += f", and that of the {way} {config.checkpoint.best_by}"
    wandb_mode = tracker.mode(config.logging.wandb)
    lines["wandb"] = {
        "offline": "offline; `wandb sync` in the run folder uploads it",
        "online": f"online, project {config.logging.wandb.project}",
        "disabled": "off",
    }[wandb_mode]
    if config.logging.wandb.mode == "online" and wandb_mode == "offline":
        lines["wandb"] += " (online was asked for, but there is no API key)"
    if config.logging.tensorboard:
        lines["tensorboard"] = "in the run folder"
    if trainer.profile.steps is not None:
        first, last = trainer.profile.steps
        lines["profile"] = f"of steps {first} to {last}"
    return lines


def _shared(sequence: SequenceConfig, plan: Plan) -> str:
    """How a micro-batch is shared, if it is."""
    if "sequence" not in plan.mesh:
        return ""
    if sequence.max_parent is not None:
        return ", each spread over all ranks by plan"
    windows = ", windows by halo" if sequence.sliding_window == "halo" else ""
    return f", each shared by {sequence.size} ranks (Ulysses{windows})"


def print_header(console: Console, lines: Mapping[str, str]) -> None:
    """Print the lines as a table with one column of names."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in lines.items():
        table.add_row(name, line)
    console.print(table, highlight=False, markup=False)
    console.print()


def free_gib(path: Path) -> float:
    """Free space where `path` is or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 2**30


def short_path(path: Path) -> str:
    """The path as seen from where the command was given, if that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def versions() -> str:
    """The versions that matter when a figure is to be understood later."""
    nccl = ""
    if torch.cuda.is_available():
        nccl = ", " + version_text(running_version())
    return f"torch {torch.__version__}{nccl}"
