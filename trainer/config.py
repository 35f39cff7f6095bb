"""The configuration of a run: one dataclass per node, each beside what it builds.

Hydra composes the nodes from YAML (`trainer.compose`), ranks receive them as a plain dictionary,
and `build_config` turns that into these objects, which have checked their values.
"""

import dataclasses
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from collectives.config import CollectivesConfig
from configs.values import at_least
from parallel.mesh import ParallelConfig
from trainer.checkpoint.config import CheckpointConfig
from trainer.errors import ConfigError
from trainer.launch import LaunchConfig
from trainer.optim import OptimConfig
from trainer.plugins import node_types, own_nodes, tasks
from trainer.rundir import RunDirConfig
from trainer.watch.config import LoggingConfig
from trainer.watch.profile import ProfileConfig


@dataclass(kw_only=True)
class TrainerConfig:
    """The `trainer` node: how long, how much at a time, and what to do on the way."""

    steps: int = 1000
    """Optimizer steps in the whole run; a finished run goes on with a larger number."""
    epochs: int | None = None
    """End after this many passes over the data, if that comes first."""
    batch_size: int = 32
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Samples of one forward pass on one rank; null: no gradient accumulation."""
    eval_batch_size: int | None = None
    """Samples of one forward pass in evaluation; null: as in training."""
    eval_every: int = 100
    """Evaluate every so many steps and at the end; 0: never."""
    eval_samples: int | None = None
    """Evaluate on the first so many samples; null: all."""
    workers: int = 1
    """Background processes that read data on each rank; 0: read in the training process."""
    seed: int = 0
    """Decides weights and order of the data."""
    deterministic: bool = False
    """Refuse operations whose result depends on timing; slower."""
    nonfinite_limit: int = 5
    """End after so many steps in a row whose loss or gradient is not finite."""
    check_replicas: int = 0
    """Compare the copies of the weights (`parallel.replicate`) every so many steps, and before every
    checkpoint; a difference ends the run. 0: never."""
    resume: str = "never"
    """never; auto: from the run folder's newest checkpoint, if there is one; or a checkpoint folder."""
    change_data: bool = False
    """Allow resuming with another seed or other data, which then begins at its start."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    dry_run: bool = False
    """Print what would run and what it would take, and end."""

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("batch_size", 1), ("eval_every", 0), ("workers", 0)):
            at_least(f"trainer.{name}", getattr(self, name), low)
        for name in ("epochs", "micro_batch_size", "eval_batch_size", "eval_samples"):
            if getattr(self, name) is not None:
                at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.nonfinite_limit", self.nonfinite_limit, 1)
        at_least("trainer.check_replicas", self.check_replicas, 0)
        window = self.profile.steps
        if window is not None and window[0] > self.steps:
            raise ValueError(
                f"trainer.profile.steps={window} begins after the last step, "
                f"trainer.steps={self.steps}: set trainer.profile.steps to steps of the run"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(
                f"trainer.seed={self.seed}: set trainer.seed to 0 or more, below 2**63"
            )


@dataclass(kw_only=True)
class Config:
    """Everything. `task`, `model` and `data` have the types that the chosen task names."""

    recipe: str = "tiny"
    """Name of the recipe, for headers and folders; choose one with +recipe=NAME."""
    task: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunDirConfig = field(default_factory=RunDirConfig)


@cache
def config_type() -> type[Config]:
    """`Config` with the nodes that tasks have of their own: null where another task runs."""
    nodes = {node for task in tasks().values() for node in own_nodes(task)}
    if taken := nodes & {f.name for f in dataclasses.fields(Config)}:
        raise ConfigError(
            f"a task calls a node of its own {sorted(taken)[0]}, which is the trainer's"
        )
    own = [(node, Any, field(default=None)) for node in sorted(nodes)]
    return dataclasses.make_dataclass("Config", own, bases=(Config,), kw_only=True)


def register_schema() -> None:
    """Make it the schema of everything that Hydra composes."""
    ConfigStore.instance().store(name="base", node=config_type())


def build_config(plain: dict[str, Any]) -> Config:
    """The typed, checked configuration of a composed one. Raises `ConfigError`."""
    task = plain.get("task")
    name = task.get("name") if isinstance(task, dict) else None
    if name not in tasks():
        raise ConfigError(f"task {name} is not installed; there are: {', '.join(tasks())}")
    schema = OmegaConf.structured(config_type())
    for node, kind in node_types(tasks()[name]).items():
        schema[node] = OmegaConf.structured(kind)
    if misfit := _misfit(schema, plain, ""):
        raise ConfigError(misfit)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema, plain))
    except OmegaConfBaseException as error:
        key = error.full_key or "a key"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    except ValueError as error:  # raised by a __post_init__
        raise ConfigError(str(error)) from error
    assert isinstance(config, Config)
    return config


def _misfit(schema: Any, plain: dict[str, Any], prefix: str) -> str | None:
    """What is wrong with the first key that has a list for a dictionary, or the other way round.

    Hydra says it better; but a configuration may also come from a run folder, or another program.
    """
    for key, value in plain.items():
        node = schema._get_node(key) if key in schema else None
        for kind, other, words in (
            (DictConfig, list, "keys with"),
            (ListConfig, dict, "a list of"),
        ):
            if isinstance(node, kind) and isinstance(value, other):
                return f"{prefix}{key}={value}: set {prefix}{key} to {words} values"
        inner = isinstance(node, DictConfig) and isinstance(value, dict)
        if inner and (found := _misfit(node, value, f"{prefix}{key}.")):
            return found
    return None


def unknown_keys(config: DictConfig) -> list[str]:
    """Keys that no dataclass declares; `++key=value` puts them in without a word from Hydra."""
    found: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        if not isinstance(node, DictConfig):
            return
        kind = OmegaConf.get_type(node)
        declared = {f.name for f in dataclasses.fields(kind)} if is_dataclass(kind) else None
        for key in map(str, node):
            if declared is not None and key not in declared:
                found.append(f"{prefix}{key}")
            elif not OmegaConf.is_missing(node, key):
                walk(node._get_node(key), f"{prefix}{key}.")

    walk(config, "")
    return found


def known_keys(config: DictConfig) -> list[str]:
    """Every key that may be set, dotted."""
    found: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        kind = OmegaConf.get_type(node)
        declared = {f.name for f in dataclasses.fields(kind)} if is_dataclass(kind) else set(node)
        for key in map(str, filter(declared.__contains__, node)):
            found.append(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
                walk(child, f"{prefix}{key}.")

    walk(config, "")
    return found
