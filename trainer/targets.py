"""YAML from elsewhere chooses by name; it does not say what Python to call.

Hydra builds its own parts (launcher, sweeper, callbacks, logging) from whatever `_target_` a
configuration names. Nothing of ours is built in that way, so the only place for one is Hydra's node, and
the only thing that it may name is Hydra's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.errors import ConfigError

CALLS = ("_target_", "()", "class", "factory")
"""Keys whose value Hydra, or Python's logging, imports and calls."""
ALLOWED = ("hydra.", "hydra_plugins.", "logging.")


def check_targets(config: DictConfig) -> None:
    """Raise `ConfigError` for a composed configuration that names something else to call."""
    for place, named in _calls(OmegaConf.to_container(config, resolve=False), ()):
        if not str(named).startswith(ALLOWED):
            raise ConfigError(
                f"{'.'.join(place)}={named}: a configuration may not name Python to call: choose a "
                "task by its name (task=NAME), and install it as a package with an entry point"
            )


def _calls(node: Any, place: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """Keys that name something to call, and what they name."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        for key, value in node.items():
            here = [*place, str(key)]
            if key in CALLS and isinstance(value, str):
                yield here, value
            yield from _calls(value, here)
