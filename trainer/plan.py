"""What a run will do, worked out before it does anything: pure arithmetic on the configuration."""

from dataclasses import dataclass

from parallel.mesh import averaging_ranks, data_parallel_size, mesh_shape, weight_shards
from recipes.task import DataError
from trainer.config import Config
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from the configuration and the number of ranks."""

    world_size: int
    mesh: dict[str, int]
    """Axes in use and their sizes, outermost first."""
    data_parallel: int
    """Ranks that see different samples."""
    micro_batch_size: int
    accumulation: int
    """Forward passes per optimizer step."""
    eval_batch_size: int
    steps: int
    """Optimizer steps of the whole run."""

    @property
    def weight_shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return weight_shards(self.mesh)

    @property
    def averaging_ranks(self) -> int:
        """Ranks over which gradients are averaged: those that have tokens of their own."""
        return averaging_ranks(self.mesh)


def make_plan(
    config: Config, world_size: int, num_samples: int | None, axes: frozenset[str]
) -> Plan:
    """Work the sizes out. Raises `ConfigError` or `DataError` for what cannot be.

    `num_samples` is the length of an epoch (None: not known yet), `axes` what the task can run on.
    """
    trainer = config.trainer
    try:
        shape = mesh_shape(config.parallel, world_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for axis in set(shape) - axes - {"replicate", "shard"}:
        key = "parallel.sequence.size" if axis == "sequence" else f"parallel.{axis}"
        raise ConfigError(
            f"{key}={shape[axis]}: task {config.task.name} cannot run on the axis {axis}: set {key}=1"
        )
    if trainer.check_replicas and shape.get("replicate", 1) == 1:
        raise ConfigError(
            f"trainer.check_replicas={trainer.check_replicas}, but there is one copy of the weights: "
            "set trainer.check_replicas=0, or parallel.replicate to 2 or more"
        )
    if config.checkpoint.best_by is not None and not trainer.eval_every:
        key = "highest" if config.checkpoint.highest else "lowest"
        raise ConfigError(
            f"checkpoint.{key}={config.checkpoint.best_by}, but trainer.eval_every=0 evaluates nothing: "
            f"set trainer.eval_every to 1 or more, or checkpoint.{key}=null"
        )
    ranks = data_parallel_size(shape)
    if trainer.batch_size % ranks:
        near = max(round(trainer.batch_size / ranks), 1) * ranks
        raise ConfigError(
            f"trainer.batch_size={trainer.batch_size} cannot be split over {ranks} ranks: "
            f"set trainer.batch_size={near}"
        )
    per_rank = trainer.batch_size // ranks
    micro = trainer.micro_batch_size or per_rank
    if per_rank % micro:
        raise ConfigError(
            f"trainer.micro_batch_size={micro} does not divide the {per_rank} samples that each of "
            f"{ranks} ranks has of trainer.batch_size={trainer.batch_size}: set "
            f"trainer.micro_batch_size to a divisor of {per_rank}"
        )
    steps = trainer.steps
    if trainer.epochs is not None and num_samples is not None:
        steps = min(steps, trainer.epochs * num_samples // trainer.batch_size)
        if steps == 0:
            raise DataError(
                f"{trainer.epochs} epochs of {num_samples} samples do not fill one batch of "
                f"{trainer.batch_size}: set trainer.batch_size or trainer.epochs"
            )
    return Plan(
        world_size=world_size,
        mesh=shape,
        data_parallel=ranks,
        micro_batch_size=micro,
        accumulation=per_rank // micro,
        eval_batch_size=trainer.eval_batch_size or micro,
        steps=steps,
    )
