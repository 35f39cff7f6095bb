"""A forecast in words, for the header of a dry run."""

from collections.abc import Iterator, Sequence

import numpy as np

from trainer.config import Config
from trainer.devices import Device
from trainer.dry_run.forecast import Forecast
from trainer.dry_run.remedy import GIB, room
from trainer.plan import Plan
from trainer.sharing import node_size
from trainer.watch.progress import short

PARTS = {
    "weights": "fp32, sharded", "optimizer": "two fp32 moments, sharded",
    "gradients": "at the worst moment", "activations": "and gradients not reduced yet",
    "gathered": "layers in use and on their way", "staging": "what reductions go through",
    "cast": "shards cast ahead",
}  # fmt: skip


def forecast_lines(
    config: Config, plan: Plan, found: Forecast, device: Device | None, remedies: Sequence[str]
) -> dict[str, str]:
    """Lines by name; a line may have breaks in it."""
    lines = {
        "layout": "\n".join(
            layout(plan, node_size(config, plan.world_size), config.parallel.experts)
        ),
        "parameters": f"{short(found.parameters)}, {short(found.owned)} on a rank"
        + (f"; tables of {short(found.rows)} by rows" if found.rows else ""),
        "memory a rank": "\n".join(_memory(config, found, device)),
    }
    if remedies or not _fits(found, device):
        lines["does not fit"] = (
            "set " + ", or ".join(remedies)
            if remedies
            else "no single key helps: use more ranks, shorter sequences or a smaller model"
        )
    lines |= found.lines
    lines["wire a step"] = "\n".join(_wire(config, plan, found))
    lines |= _time(plan, found, device)
    return lines


def _fits(found: Forecast, device: Device | None) -> bool:
    return device is None or found.memory is None or found.memory.total <= room(device)


def layout(plan: Plan, node: int, experts: int = 1) -> Iterator[str]:
    """Which ranks are together along each axis: the first groups of each."""
    nodes = -(-plan.world_size // node)
    yield f"{nodes} {'nodes' if nodes > 1 else 'node'} of {min(node, plan.world_size)}"
    ranks = np.arange(plan.world_size).reshape(tuple(plan.mesh.values()))
    for number, (axis, size) in enumerate(plan.mesh.items()):
        groups = np.moveaxis(ranks, number, -1).reshape(-1, size)
        shown = "  ".join(_span(group.tolist()) for group in groups[:3])
        more = f"  ... {len(groups)} in all" if len(groups) > 3 else ""
        yield f"{axis} {size}: ranks {shown}{more}"
    if "sequence" in plan.mesh:
        yield f"weights are sharded over shard and sequence: {plan.weight_shards} ranks"
    if experts > 1:
        blocks = ranks.reshape(-1, experts)
        shown = "  ".join(_span(block.tolist()) for block in blocks[:3])
        more = f"  ... {len(blocks)} in all" if len(blocks) > 3 else ""
        yield (
            f"experts divided by {experts}: ranks {shown}{more}; each sharded over "
            f"{plan.weight_shards // experts}"
        )


def _span(ranks: Sequence[int]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 3 and step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return ",".join(map(str, ranks))


def _memory(config: Config, found: Forecast, device: Device | None) -> Iterator[str]:
    if found.memory is None:
        yield f"not known: the model cannot run without data ({found.problem})"
        return
    capacity = f", {room(device) / GIB:.1f} usable on {device.name}" if device else ""
    yield f"{found.memory.total / GIB:.2f} GiB of tensors at most{capacity}"
    for name, what in PARTS.items():
        nbytes = getattr(found.memory, name)
        if name == "activations":
            what += f", checkpointing {config.parallel.activation_checkpointing}"
        if nbytes > GIB / 200:  # else it would be shown as 0.00
            yield f"  {nbytes / GIB:8.2f} {name}: {what}"
    if config.parallel.compile:
        yield "  compiled blocks may keep less"


def _wire(config: Config, plan: Plan, found: Forecast) -> Iterator[str]:
    wire = found.wire
    if "sequence" in plan.mesh and not found.lines:
        yield "what ranks exchange to share sequences is not in this plan, nor in its times"
    if not wire.total:
        yield "nothing"
        return
    yield (
        f"{_gb(wire.total)} from each rank: all-gather {_gb(wire.gather_forward)} forward and "
        f"{_gb(wire.gather_backward)} backward, reduce-scatter {_gb(wire.reduce_scatter)}"
        + (f", all-reduce {_gb(wire.all_reduce)}" if wire.all_reduce else "")
        + (f", rows of tables up to {_gb(wire.tables)}" if wire.tables else "")
        + f" ({config.collectives.name})"
    )
    if wire.across:
        yield f"{_gb(wire.across)} of it between nodes"
    if wire.rows:
        yield f"{_gb(wire.rows)} of rows to experts and back, inside nodes, if they are visited evenly"


def _time(plan: Plan, found: Forecast, device: Device | None) -> dict[str, str]:
    step = f"{short(found.labels)} labels, {found.flops / 1e12:,.1f} TFLOP in all"
    run = f"{plan.steps:,} steps, {short(found.labels * plan.steps)} labels, "
    run += f"{found.flops * plan.steps / 1e18:,.2f} EFLOP"
    took = found.duration
    if took is None or device is None:
        return {"a step": step, "the run": run}
    mfu = found.flops / took.total / (device.flops * plan.world_size)
    seconds = took.total
    return {
        "a step": f"{step}; about {1000 * seconds:,.0f} ms (forward {1000 * took.forward:,.0f}, "
        f"backward {1000 * took.backward:,.0f}, optimizer {1000 * took.optimizer:,.0f}, exposed "
        f"communication {1000 * took.exposed:,.0f}), {found.labels / seconds:,.0f} labels/s, "
        f"mfu {100 * mfu:.0f} %",
        "the run": f"{run}; about {_hours(plan.steps * seconds)}",
    }


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"


def _hours(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
