"""What a person may write on the command line, and what they hear when it cannot be used."""

import pytest

from trainer.compose import run_jobs
from trainer.config import Config, build_config
from trainer.errors import ConfigError


def compose(*arguments):
    """The typed configurations that a command line means: one, or those of a sweep."""
    found = []

    def job(plain, overrides, sweep):
        found.append(build_config(plain))
        found[-1].overrides = overrides
        return 0

    assert run_jobs(list(arguments), job) == 0
    return found


def test_the_default_recipe_is_tiny():
    [config] = compose()
    assert isinstance(config, Config)
    assert (config.recipe, config.task.name, config.model.num_layers) == ("tiny", "pretrain", 4)
    assert config.data.files is None
    assert config.overrides == ["+recipe=tiny"]


@pytest.mark.parametrize("written", ["recipe=llama8b", "+recipe=llama8b"])
def test_a_recipe_is_chosen_either_way_and_overrides_win(written):
    [config] = compose(written, "model.num_layers=3", "optim=wsd", "trainer.steps=7")
    assert config.recipe == "llama8b"
    assert (config.model.num_layers, config.model.hidden_size) == (3, 4096)
    assert config.parallel.param_dtype == "bfloat16"
    assert (config.optim.schedule, config.optim.lr, config.trainer.steps) == ("wsd", 3e-4, 7)


def test_groups_win_over_the_recipes_choice():
    [config] = compose("+recipe=llama1b", "model=tiny")
    assert config.model.hidden_size == 192


def test_any_field_of_the_architecture_can_be_added():
    [config] = compose("+model.config.initializer_range=0.01")
    assert config.model.config == {"initializer_range": 0.01}


def test_a_sweep_is_a_run_for_each_value():
    configs = compose("--multirun", "optim.lr=1e-3,3e-3", "trainer.seed=1,2")
    assert [(c.optim.lr, c.trainer.seed) for c in configs] == [
        (1e-3, 1), (1e-3, 2), (3e-3, 1), (3e-3, 2),
    ]  # fmt: skip


def test_the_first_failing_job_of_a_sweep_gives_the_exit_code():
    codes = iter([0, 5, 4])
    arguments = ["--multirun", "trainer.seed=1,2,3"]
    assert run_jobs(arguments, lambda *_: next(codes)) == 5


def test_a_folder_of_ones_own(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: llama1b\n\n"
        "recipe: mine\ntrainer: {steps: 3}\n"
    )
    [config] = compose("--config-dir", str(tmp_path), "+recipe=mine")
    assert (config.recipe, config.trainer.steps, config.model.hidden_size) == ("mine", 3, 2048)
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ntrainer: {stepz: 3}\n")
    with pytest.raises(ConfigError, match="stepz"):
        compose("--config-dir", str(tmp_path), "+recipe=mine")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("paralel.shard=2", "there is no key paralel.shard: did you mean parallel.shard?"),
        ("+paralel.shard=2", "there is no key paralel.shard: did you mean parallel.shard?"),
        ("++trainer.stepz=3", "there is no key trainer.stepz: did you mean trainer.steps?"),
        ("+optim.lrr=1", "there is no key optim.lrr: did you mean optim.lr?"),
        ("++model.num_layer=1", "there is no key model.num_layer: did you mean model.num_layers?"),
        ("steps=3", "there is no key steps: did you mean trainer.steps?"),
        ("data.file=[x]", "there is no key data.file: did you mean data.files?"),
        ("qwertz=1", "there is no key qwertz: `python -m trainer --cfg job` prints all keys"),
        ("trainer.steps=abc", "trainer.steps=abc cannot be used: set trainer.steps to a whole number"),
        ("trainer.steps=1e3", "set trainer.steps to a whole number"),
        ("optim.lr=fast", "optim.lr=fast cannot be used: set optim.lr to a number"),
        ("trainer.deterministic=maybe", "set trainer.deterministic to true or false"),
        ("optim.betas=3", "set optim.betas to a list"),
        ("trainer=null", "trainer=null cannot be used: set trainer to a group of keys"),
        ("trainer.steps=0", "trainer.steps=0 is too small: set trainer.steps to 1 or more"),
        ("optim.schedule=cosin", "is not one of constant, cosine, linear, wsd: set optim.schedule=cosine"),
        ("recipe=tinny", "recipe=tinny does not exist; there are hybrid_1f3s, hybrid_1f3s_repack, llama1b, llama70b, llama70b_fsdp_tide, llama8b, llama8b_fsdp_tide, sft, tiny"),
        ("model=llama80b", "set model=llama8"),
        ("model=null", "model=null chooses nothing"),
        ("task=pretrian", "task=pretrian does not exist; there are hybrid, pretrain, sft, trip: set task=pretrain"),
        ("run.root=a=b", "cannot read 'run.root=a=b': write key=value"),
        ("--recipe=tiny", "unknown option --recipe=tiny: keys are written +recipe=VALUE"),
        ("--steps=3", "keys are written steps=VALUE"),
        ("model.config.foo=1", "a new one needs a plus: +model.config.foo=1"),
        ("data=text", "data.files is empty: set data.files to globs"),
        ("model=folder", "needs a folder: set model.path"),
        ("collectives.name=nccl", "collectives=nccl is not one of stock, tide"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_one_line(argument, message):
    with pytest.raises(ConfigError) as error:
        compose(argument)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
