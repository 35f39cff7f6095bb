"""How the ranks are arranged: one named axis for each kind of parallelism in use.

    replicate x shard x sequence = world size

Ranks that are neighbours in the last axis are neighbours on a node, so the axes that talk most
come last. `shard` always exists; the others only where their size is above 1. Ranks that share samples
(`sequence`) share weights, too: FSDP2 shards over both axes as one. Blocks of these ranks may divide the
experts of a layer (`parallel.experts`), which makes no axis of its own.
"""

import math
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.values import at_least, one_of
from parallel.repacking.config import RepackingConfig
from parallel.tables.choice import WAYS

AXES = ("replicate", "shard", "sequence")
DTYPES = ("float32", "bfloat16", "float16")


SLIDING_WINDOW = ("exchange", "halo")


@dataclass(kw_only=True)
class SequenceConfig:
    """Sequence parallelism: one sample on several ranks."""

    size: int = 1
    """Ranks that share the tokens of a micro-batch, and the attention heads of each layer: Ulysses."""
    sliding_window: str = "exchange"
    """Layers with a sliding window. exchange: like all others; halo: tokens stay where they are, and
    only keys and values of the window before them are fetched."""
    max_parent: int | None = None
    """Instead of `size`: all ranks have the samples of a micro-batch together, in groups of up to so
    many, a power of two; which samples each group has, a planner decides anew for every micro-batch
    (`parallel.repacking`). Fewer where the number of ranks has no such divisor."""

    def __post_init__(self) -> None:
        at_least("parallel.sequence.size", self.size, 1)
        if self.max_parent is not None:
            at_least("parallel.sequence.max_parent", self.max_parent, 1)
            if self.max_parent & (self.max_parent - 1):
                raise ValueError(
                    f"parallel.sequence.max_parent={self.max_parent} is no power of two: set "
                    f"parallel.sequence.max_parent={1 << (self.max_parent.bit_length() - 1)}"
                )
            if self.size > 1:
                raise ValueError(
                    f"parallel.sequence.size={self.size} and parallel.sequence.max_parent="
                    f"{self.max_parent} are both set: set parallel.sequence.size=1, or "
                    "parallel.sequence.max_parent=null"
                )
        one_of("parallel.sequence.sliding_window", self.sliding_window, SLIDING_WINDOW)


@dataclass(kw_only=True)
class ParallelConfig:
    """The `parallel` node."""

    replicate: int = 1
    """Copies of the model (HSDP): gradients are averaged over them."""
    shard: int | None = None
    """Ranks that share one copy of the weights and see different samples; null: all that the other axes
    leave. With `sequence.size`, so many times as many share a copy."""
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    repacking: RepackingConfig = field(default_factory=RepackingConfig)
    experts: int = 1
    """Consecutive ranks of a node that divide the experts of every mixture-of-experts layer among them:
    rows travel to the ranks of their experts. 1: off, every rank gathers all experts. Must divide the
    experts and the ranks of a node."""
    tables: str = "auto"
    """Embedding tables, of tasks that have any. fsdp: gathered whole, like all weights; rows: all ranks
    divide their rows, and fetch those that a batch needs by torchrec; auto: rows for tables of 256 MiB
    in fp32 and more, where torchrec is installed and there are several ranks."""
    param_dtype: str = "float32"
    """Type that layers are gathered and computed in; the optimizer always keeps fp32. float16 comes
    without loss scaling."""
    reduce_dtype: str = "float32"
    """Type that gradients are summed in."""
    reshard_after_forward: bool | int = True
    """Give gathered layers back after the forward pass and gather them again in the backward; a number:
    keep them sharded over so many ranks in between."""
    prefetch: int | None = None
    """Layers gathered ahead of the one in use; 0: none forwards and one backwards, FSDP2's way; null:
    one on TIDE, which has the memory for it anyway, and FSDP2's way elsewhere."""
    node_size: int | None = None
    """Ranks on a node, counted in order; null: as the launcher says."""
    reduce_every_micro_batch: bool = False
    """Accumulate sharded gradients (less memory, more traffic) instead of whole ones."""
    activation_checkpointing: str = "none"
    """none; block: keep each block's input only; selective: keep matrix products and attention."""
    compile: bool = False
    """torch.compile every block."""

    def __post_init__(self) -> None:
        for name in ("replicate", "experts"):
            at_least(f"parallel.{name}", getattr(self, name), 1)
        if self.shard is not None:
            at_least("parallel.shard", self.shard, 1)
        if self.prefetch is not None:
            at_least("parallel.prefetch", self.prefetch, 0)
        if not isinstance(self.reshard_after_forward, bool):
            at_least("parallel.reshard_after_forward", self.reshard_after_forward, 2)
            if self.experts > 1:
                raise ValueError(
                    f"parallel.reshard_after_forward={self.reshard_after_forward} and "
                    f"parallel.experts={self.experts}: experts are not sharded over so many ranks: set "
                    "parallel.reshard_after_forward to true or false"
                )
        if self.node_size is not None:
            at_least("parallel.node_size", self.node_size, 1)
        one_of("parallel.tables", self.tables, WAYS)
        one_of("parallel.param_dtype", self.param_dtype, DTYPES)
        one_of("parallel.reduce_dtype", self.reduce_dtype, DTYPES)
        one_of(
            "parallel.activation_checkpointing",
            self.activation_checkpointing,
            ("none", "block", "selective"),
        )


def mesh_shape(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """Sizes of the axes in use, outermost first; pure arithmetic, no process group.

    Raises `ValueError` if they cannot make up `world_size`.
    """
    sequence = _sharing_ranks(config, world_size)
    sizes = {
        "replicate": config.replicate,
        "shard": config.shard,
        "sequence": sequence,
    }
    others = config.replicate * sequence
    keys = {axis: f"parallel.{axis}" for axis in sizes} | {"sequence": "parallel.sequence.size"}
    shape = " x ".join(
        f"{keys[axis]}={size}" for axis, size in sizes.items() if size not in (1, None)
    )
    if config.shard is None:
        if world_size % others:
            raise ValueError(
                f"{world_size} ranks cannot be split by {shape}: set them to "
                f"divisors of {world_size}, or launch.nproc to a multiple of {others}"
            )
        sizes["shard"] = world_size // others
    elif config.shard * others != world_size:
        raise ValueError(
            f"{shape or 'parallel.shard=1'} needs {config.shard * others} ranks, but there are "
            f"{world_size}: set parallel.shard={max(world_size // others, 1)}, or null for the rest"
        )
    few, shard = config.reshard_after_forward, (sizes["shard"] or 1) * sequence
    if not isinstance(few, bool) and shard % few:
        raise ValueError(
            f"parallel.reshard_after_forward={few} does not divide the {shard} ranks that weights are "
            "sharded over: set it to a divisor, true or false"
        )
    return {axis: n for axis, n in sizes.items() if n is not None and (n > 1 or axis == "shard")}


def _sharing_ranks(config: ParallelConfig, world_size: int) -> int:
    """Ranks that have the same samples. Raises `ValueError` for axes beside planned samples."""
    if config.sequence.max_parent is None:
        return config.sequence.size
    for axis in ("replicate", "shard"):
        if getattr(config, axis) not in (1, None):
            raise ValueError(
                f"parallel.{axis}={getattr(config, axis)}: with parallel.sequence.max_parent all ranks "
                f"have the samples of a micro-batch together: set parallel.{axis}=1"
            )
    return world_size


def widest_parent(max_parent: int, num_ranks: int) -> int:
    """The widest group that planned samples can have: a power of two that divides the ranks."""
    return math.gcd(max_parent, num_ranks)


def data_parallel_size(shape: dict[str, int]) -> int:
    """Ranks that see different samples."""
    return shape.get("replicate", 1) * shape["shard"]


def weight_shards(shape: dict[str, int]) -> int:
    """Ranks that share one copy of the weights."""
    return shape["shard"] * shape.get("sequence", 1)


def averaging_ranks(shape: dict[str, int]) -> int:
    """Ranks over which FSDP2 averages gradients."""
    return shape.get("replicate", 1) * weight_shards(shape)


def build_mesh(shape: dict[str, int], device_type: str) -> DeviceMesh:
    """The device mesh of `shape`; needs the default process group."""
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape.keys()))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP2 shards over: `shard` and `sequence` as one axis, with `replicate` before it for HSDP.

    Every rank calls it, at the same place.
    """
    names = mesh.mesh_dim_names or ()
    if "sequence" in names:
        at = names.index("shard")
        names = names[: at + 1] + names[at + 2 :]
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.flatten(at, at + 1), mesh_dim_names=names)
    return mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
