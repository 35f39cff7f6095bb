"""Whatever a key is set to, there is a plan or one error that names a key that was set: never a traceback.

Most cases skip Hydra, which takes ten times as long as all else, and start from its composed dictionary;
some go all the way from the command line. `python -m tests.faults.fuzz` does thousands.
"""

import copy
import io
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from recipes.task import DataError
from trainer.cli import run
from trainer.compose import run_jobs
from trainer.config import build_config
from trainer.errors import RunError
from trainer.launch import decide
from trainer.plan import make_plan
from trainer.plugins import tasks
from trainer.run import make_task

RECIPES = ("tiny", "sft", "trip", "hybrid_1f3s_repack", "lelora_sft", "lelora_classify")
LEFT_ALONE = ("recipe", "task.name", "run.", "hydra", "trainer.dry_run", "data.cache_dir")
"""What chooses another schema, or is a place to write to."""
VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 2**31, 2**63, 10**30, -0.5, 0.3, 1.5, 1e-300, 1e300,
    float("nan"), float("inf"), "", "abc", "1e3", "none", "auto", "../..", "\0", "ü", "a,b", "${x}", [],
    [0], [1, 2], [3, 1], ["a", None], [[1]], {}, {"a": 1}, {"a": {"b": []}},
]  # fmt: skip
SIZES = (
    "parallel.replicate", "parallel.shard", "parallel.expert", "parallel.sequence.size",
    "parallel.sequence.max_parent", "parallel.reshard_after_forward", "parallel.node_size",
    "launch.nproc", "trainer.batch_size", "trainer.micro_batch_size",
)  # fmt: skip


@cache
def composed(recipe):
    """The plain configuration of a recipe."""
    found = []
    assert run_jobs([f"+recipe={recipe}"], lambda plain, *_: found.append(plain) or 0) == 0
    return found[0]


@cache
def keys(recipe):
    """Every key that holds a value, dotted."""

    def walk(node, prefix):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    return [key for key in walk(composed(recipe), "") if not key.startswith(LEFT_ALONE)]


def changed(recipe, changes):
    """The recipe's configuration with other values."""
    plain = copy.deepcopy(composed(recipe))
    for key, value in changes.items():
        node = plain
        *parents, last = key.split(".")
        for parent in parents:
            node = node[parent]
        node[last] = value
    return plain


def plan(plain):
    """What the launcher does before it looks at any file."""
    config = build_config(plain)
    place = decide(config.launch, config.parallel, {}, 0, dry_run=True)
    kind = tasks()[config.task.name]
    task = make_task(config, place.world_size)
    return make_plan(config, place.world_size, None, kind.axes and task.axes)


def check_plan_or_error(recipe, changes):
    """Returns which of the two it was."""
    said = None
    try:
        plan(changed(recipe, changes))
    except (RunError, DataError) as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{recipe} with {changes}: {type(error).__name__}: {error}") from error
    assert said is None or names_a_key(said, recipe, changes), f"{recipe} with {changes}: {said}"
    return "plan" if said is None else "error"


def names_a_key(said, recipe, changes):
    """One that was set, or the one that does not go with it."""
    words = [word for key in changes for word in key.split(".")]  # a group, too: collectives=tide
    return any(word in said for word in (*words, *keys(recipe)))


@st.composite
def odd_settings(draw):
    """A recipe, and one to three of its keys with values from anywhere."""
    recipe = draw(st.sampled_from(RECIPES))
    chosen = draw(st.lists(st.sampled_from(keys(recipe)), min_size=1, max_size=3, unique=True))
    return recipe, {key: draw(st.sampled_from(VALUES)) for key in chosen}


@st.composite
def odd_sizes(draw):
    """A recipe, and sizes of its parallel axes that need not fit."""
    recipe = draw(st.sampled_from(RECIPES))
    chosen = draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=6, unique=True))
    return recipe, {key: draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8, 64])) for key in chosen}


def many(examples):
    """So many examples. One that fails is as small as the ones that are drawn: no shrinking."""
    return settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@many(40)
@given(st.one_of(odd_settings(), odd_sizes()))
def test_a_plan_or_one_error_that_names_a_key(case):
    check_plan_or_error(*case)


WORDS = [
    "null",
    "true",
    "-1",
    "0",
    "3",
    "1e3",
    "0.3",
    "abc",
    "''",
    "[]",
    "[1,2]",
    "{a:1}",
    "nan",
    "'",
]


def check_command(arguments):
    """From the command line to the plan of a dry run, or to one line."""
    out, err = io.StringIO(), io.StringIO()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["+recipe=tiny", *arguments, "trainer.dry_run=true"])
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    said = err.getvalue()
    if code == 0:
        return "plan"
    assert code in (2, 3, 4), arguments
    assert said.startswith("error: "), (arguments, said)
    assert said.count("\n") == 1, (arguments, said)
    parts = [part for word in arguments for part in word.lstrip("+").split("=")[0].split(".")]
    assert any(part in said for part in parts), (arguments, said)
    return "error"


@st.composite
def odd_words(draw):
    """One or two `key=value` of the default recipe; some keys have a slip in them."""
    chosen = draw(st.lists(st.sampled_from(keys("tiny")), min_size=1, max_size=2, unique=True))
    words = []
    for key in chosen:
        sign = draw(st.sampled_from(["", "", "", "", "+", "++"]))
        words.append(f"{sign}{key}={draw(st.sampled_from(WORDS))}")
    return words


@pytest.fixture
def elsewhere(tmp_path_factory):
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@settings(
    many(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(words=odd_words())
def test_a_command_line_ends_in_a_plan_or_one_line(elsewhere, words):
    check_command(words)
