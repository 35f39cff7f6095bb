"""Finding tasks: entry points of the group `springtide.tasks`, ours and everybody else's."""

import warnings
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import entry_points

from hydra.core.config_store import ConfigStore

from recipes.task import Task
from trainer.errors import ConfigError
from trainer.startup import importing

GROUP = "springtide.tasks"
CONFIG_GROUP = "springtide.configs"
"""Packages named here (`mine = my_package.configs`) add YAML groups and recipes to the search path."""
NODES = ("task", "model", "data")


@dataclass(frozen=True)
class Nothing:
    """The node of a task that needs no configuration of that kind."""


@cache
def tasks() -> dict[str, type[Task]]:
    """Every task that is installed, by name. One that cannot be imported is left out, with a warning."""
    found: dict[str, type[Task]] = {}
    for point in entry_points(group=GROUP):
        try:
            with importing():
                found[point.name] = point.load()
        except Exception as error:
            if point.value.startswith("recipes."):  # our own: something stands in the way of it
                raise ConfigError(f"task {point.name} cannot be imported: {error!r}") from error
            warnings.warn(f"task {point.name} ({point.value}) is left out: {error!r}", stacklevel=2)
    return found


def node_types(task: type[Task]) -> dict[str, type]:
    """The dataclasses of the nodes `task`, `model` and `data`, and of those that are the task's own."""
    nodes = (*NODES, *own_nodes(task))
    return {node: task.configs.get(node, Nothing) for node in nodes}


def own_nodes(task: type[Task]) -> list[str]:
    """Nodes that the task has besides `task`, `model` and `data`."""
    return [node for node in task.configs if node not in NODES]


def register() -> None:
    """Tell Hydra the schema of every task.

    `schema/NAME` types the three nodes, and our own `configs/task/NAME.yaml` starts from it. A task
    without such a file gets choices named after it in the groups `task`, `model` and `data`.
    """
    store = ConfigStore.instance()
    for name, task in tasks().items():
        node = {key: kind() for key, kind in node_types(task).items()}
        store.store(group="schema", name=name, node=node, package="_global_")
        if _has_file("task", name):
            continue
        store.store(group="task", name=name, node=node, package="_global_")
        for key in ("model", "data"):
            if key in task.configs:
                store.store(group=key, name=name, node=task.configs[key]())


def _has_file(group: str, name: str) -> bool:
    """Whether our own configuration folder has this choice as a file."""
    return resources.files("configs").joinpath(group, f"{name}.yaml").is_file()


def config_packages() -> list[str]:
    """Packages whose YAML files join the search path."""
    return [point.value for point in entry_points(group=CONFIG_GROUP)]
