"""The `collectives` node: how gathered weights and reduced gradients travel."""

from dataclasses import dataclass

from configs.values import at_least, one_of

KINDS = ("stock", "tide")
TRANSPORTS = ("auto", "shm", "nccl", "symm_mem")


@dataclass(kw_only=True)
class CollectivesConfig:
    """Which collectives FSDP2 uses."""

    name: str = "tide"
    """stock: those of torch; tide: shards straight into parameters, gradients summed in place."""
    transport: str = "auto"
    """tide: how bytes travel. shm: shared memory of CPU ranks; nccl: between GPUs, memory from NCCL
    2.31 or newer, and its puts between nodes; symm_mem: between GPUs of one machine, memory from torch;
    auto: the first of them that works, on one machine."""
    multicast: bool = False
    """tide: between GPUs over nccl, write to all of a node at once where its switch can."""
    smallest: int | None = None
    """tide: bytes of gathered weights below which a group stays on torch's collectives, as does one
    whose tensors have less than a thirty-second of it on average; null: 64 MiB on GPUs, 0 elsewhere."""
    slots: int | None = None
    """tide: layers that may be gathered at the same time; null: one more than are prefetched."""
    slot_reuse: bool | None = None
    """tide: stage gradients in the slots of layers that are done; null: on GPUs."""
    cast_ahead: bool | None = None
    """tide: cast all shards when a forward pass begins, and keep them for the backward pass, for two
    bytes of memory for each parameter of a rank's shards in bf16; null: on GPUs."""
    chunk: int = 1048576
    """tide: elements that a staging buffer of the reduce-scatter holds."""
    pacing: int = 4
    """tide: writes to one rank of another node that may be under way at the same time."""
    timeout: float | None = None
    """tide: seconds after which a silent peer is named and the run ends; null: launch.timeout."""
    poison: bool = False
    """tide: fill memory that is given back with NaN, to find code that still reads it."""

    def __post_init__(self) -> None:
        one_of("collectives", self.name, KINDS)
        one_of("collectives.transport", self.transport, TRANSPORTS)
        if self.smallest is not None:
            at_least("collectives.smallest", self.smallest, 0)
        if self.slots is not None:
            at_least("collectives.slots", self.slots, 1)
        at_least("collectives.chunk", self.chunk, 1)
        at_least("collectives.pacing", self.pacing, 1)
        if self.timeout is not None:
            at_least("collectives.timeout", self.timeout, 0.1)
