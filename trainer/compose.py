"""From the command line to a configuration: Hydra composes, we say what is wrong with it.

Hydra's own messages suggest adding unknown keys with `+`; ours name the nearest key that exists.
"""

import difflib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer import plugins
from trainer.config import known_keys, register_schema, unknown_keys
from trainer.errors import ConfigError
from trainer.targets import check_targets

FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir",
    "--experimental-rerun", "--info",
)  # fmt: skip
"""The options of Hydra's command line; everything else is written key=value."""


DEFAULT_RECIPE = "tiny"


class InstalledConfigs(SearchPathPlugin):
    """Adds the YAML folders that other packages offer through entry points."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them, after our own."""
        for package in plugins.config_packages():
            search_path.append(provider=package, path=f"pkg://{package}")


def run_jobs(
    arguments: Sequence[str], job: Callable[[dict[str, Any], list[str], bool], int]
) -> int:
    """Compose the configuration that `arguments` ask for and call `job` with it, as plain data.

    `job` also gets the overrides as written and whether it is one of a sweep; it returns an exit
    code, and so does this: the first that is not 0. Raises `ConfigError`.
    """
    arguments = with_recipe(arguments)
    _check_flags(arguments)
    register_schema()
    plugins.register()
    Plugins.instance().register(InstalledConfigs)
    _check_foreign(arguments)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path="pkg://configs", config_name="config")
    def composed(config: DictConfig) -> None:
        stray = [key for key in unknown_keys(config) if key != "hydra"]
        if stray:
            given = [k for k, _ in _given_values(arguments) if f"{k}.".startswith(f"{stray[0]}.")]
            raise ConfigError(_unknown((given or stray)[0], known_keys(config)))
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} has no value: set {missing[0]}=...")
        plain = OmegaConf.to_container(config, resolve=True)
        assert isinstance(plain, dict)
        hydra_config = HydraConfig.get()
        plain["recipe"] = hydra_config.runtime.choices.get("recipe", plain["recipe"])
        sweep = hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN"
        named = {str(key): value for key, value in plain.items()}
        words = [*_config_dirs(arguments), *hydra_config.overrides.task]
        codes.append(job(named, words, sweep))

    # Hydra's record of a sweep would hold secrets in clear text: it goes where nobody looks.
    with (
        tempfile.TemporaryDirectory() as unseen,
        _hydra_arguments([*arguments, f"hydra.sweep.dir={unseen}"]),
    ):
        try:
            composed()
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException, ValueError, AttributeError) as error:
            raise ConfigError(explain(error, arguments)) from error
        except yaml.YAMLError as error:  # such as a key that a file has twice
            raise ConfigError(f"cannot read YAML: {' '.join(str(error).split())}") from error
    return next((code for code in codes if code), 0)


def _check_foreign(arguments: Sequence[str]) -> None:
    """Look at YAML that is not ours before Hydra builds anything from it. Raises `ConfigError`."""
    hydras = any(argument.lstrip("+~").startswith("hydra") for argument in arguments)
    if not (hydras or _config_dirs(arguments) or plugins.config_packages()):
        return
    config = _compose_groups_only(arguments, hydra_node=True)
    if config is not None:  # else Hydra finds the same thing wrong
        check_targets(config)


@contextmanager
def _hydra_arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Have `hydra.main` read `arguments`, raise errors, and not print them itself."""
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["springtide", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _without_job_errors():
            yield
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]


@contextmanager
def _without_job_errors() -> Iterator[None]:
    """Drop Hydra's line 'Error executing job with overrides', which repeats the command."""
    original = sys.stderr

    class Filter:
        def write(self, text: str) -> int:
            return 0 if text.startswith("Error executing job") else original.write(text)

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    sys.stderr = Filter()
    try:
        yield
    finally:
        sys.stderr = original


def with_recipe(arguments: Sequence[str]) -> list[str]:
    """Understand `recipe=NAME` (Hydra knows only `+recipe=NAME`), and choose one if none is given."""
    written = [f"+{a}" if a.startswith("recipe=") else a for a in arguments]
    given = any(a.lstrip("+").startswith("recipe=") for a in written)
    return written if given else [*written, f"+recipe={DEFAULT_RECIPE}"]


def _check_flags(arguments: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.split("=")[0]
        if argument.startswith("--") and not any(flag.startswith(name) for flag in FLAGS):
            key = name.lstrip("-").replace("-", "_")
            sign = "+" if key == "recipe" else ""
            raise ConfigError(f"unknown option {argument}: keys are written {sign}{key}=VALUE")
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and key in GROUPS and value in ("null", ""):
            raise ConfigError(f"{argument} chooses nothing: set {key} to one of its choices")


def explain(error: BaseException, arguments: Sequence[str]) -> str:
    """What a person needs to know about an error of Hydra's or OmegaConf's."""
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read {error.override!r}: write key=value, with quotes around a value that has "
            "=, commas, spaces or brackets in it: 'key=\"a=b\"'"
        )
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):
        return str(error)
    config = _compose_groups_only(arguments)
    if config is None:
        return _tidy(error)
    known = known_keys(config)
    for key, value in _given_values(arguments):
        free_form = _free_form_parent(key, config)
        if free_form is not None and key not in known:
            if isinstance(error, ConfigCompositionException) and key in str(error):
                return f"{free_form} takes any key, but a new one needs a plus: +{key}={value}"
        elif key not in known:
            return _unknown(key, known)
        elif f"{key}={value}" in str(error) and (wanted := _wanted(key, config)):
            return f"{key}={value} cannot be used: set {key} to {wanted}"
    return _tidy(error)


def _wanted(key: str, config: DictConfig) -> str | None:
    """What kind of value the schema wants for `key`, in words."""
    parent, _, last = key.rpartition(".")
    node: Any = (OmegaConf.select(config, parent) if parent else config)._get_node(last)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if isinstance(node, ListConfig):
        return "a list, such as [a,b]"
    if isinstance(node, DictConfig):
        return "a group of keys"
    return words.get(node._metadata.ref_type)


def _missing(error: MissingConfigException) -> str:
    """An unknown group or an unknown choice in one."""
    wanted = error.missing_cfg_file or ""
    group, _, choice = wanted.rpartition("/")
    if error.options and group:
        near = difflib.get_close_matches(choice, error.options, n=1, cutoff=0.4)
        sign = "+" if group == "recipe" else ""
        hint = f"set {sign}{group}={near[0]}" if near else "choose one of them"
        return f"{group}={choice} does not exist; there are {', '.join(error.options)}: {hint}"
    return str(error).splitlines()[0]


def _given_values(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Dotted keys of the `key=value` arguments and their values, without groups and Hydra's own."""
    words = [a for a in arguments if not a.startswith("-") and "=" in a]
    given = []
    for override in OverridesParser.create().parse_overrides(words):
        key = override.key_or_group
        if not key.startswith("hydra") and ("." in key or key not in GROUPS):
            given.append((key, (override.input_line or "").partition("=")[2]))
    return given


GROUPS = (
    "recipe", "model", "data", "task", "parallel", "collectives", "optim", "checkpoint", "logging",
    "launch", "schema",
)  # fmt: skip


def _compose_groups_only(arguments: Sequence[str], hydra_node: bool = False) -> DictConfig | None:
    """The configuration without the values given: which keys there are. None if that fails too.

    With `hydra_node`, Hydra's own part of it is there, and so are the values given for that.
    """
    from hydra.core.global_hydra import GlobalHydra

    words = [a for a in arguments if "=" in a and not a.startswith("-")]
    groups = [w for w in words if _is_choice(w, hydra_node) and "," not in w]
    folders = [
        f"file://{Path(word.split('=', 1)[1]).absolute()}" for word in _config_dirs(arguments)
    ]
    if not any(word.startswith("hydra.searchpath=") for word in groups):
        groups += [f"hydra.searchpath=[{','.join(folders)}]"]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module(version_base="1.3", config_module="configs"):
            return hydra.compose("config", overrides=groups, return_hydra_config=hydra_node)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError):
        return None


def _is_choice(word: str, hydra_node: bool) -> bool:
    """Whether an argument chooses in a group, or, if that is asked for, is about Hydra itself."""
    key = word.lstrip("+~").split("=")[0]
    return key in GROUPS or (hydra_node and key.startswith("hydra"))


def _config_dirs(arguments: Sequence[str]) -> list[str]:
    """`--config-dir=FOLDER` for each folder given, however it was spelled."""
    spelled = ("--config-dir", "-cd")
    given = [b for a, b in pairwise(arguments) if a in spelled]
    given += [
        a.split("=", 1)[1] for a in arguments if a.startswith(tuple(f"{s}=" for s in spelled))
    ]
    return [f"--config-dir={folder}" for folder in given]


def _free_form_parent(key: str, config: DictConfig) -> str | None:
    """The dictionary around `key` that takes any key, such as `model.config`, if there is one."""
    parts = key.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        node = OmegaConf.select(config, parent, default=None)
        if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict:
            return parent
    return None


def _unknown(key: str, known: Sequence[str]) -> str:
    """'There is no such key', with the nearest one that exists."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:  # perhaps only the last word is right: steps -> trainer.steps
        last = key.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [tails[t] for t in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)]
    hint = f"did you mean {near[0]}?" if near else "`python -m trainer --cfg job` prints all keys"
    return f"there is no key {key}: {hint}"


def _tidy(error: BaseException) -> str:
    """Hydra's message on one line, without its advice."""
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f": {error.__cause__}"
    lines = [line.strip() for line in text.splitlines()]
    useless = re.compile(r"^(full_key|object_type|reference_type|To append to your|Set the env)")
    key = next(
        (line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")),
        "",
    )
    message = " ".join(line for line in lines if line and not useless.match(line))
    return f"{key}: {message}" if key and key not in message else message
