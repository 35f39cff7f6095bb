import pytest

from models.causal_lm import CausalLMConfig
from parallel.mesh import ParallelConfig, SequenceConfig
from recipes.pretrain import PretrainConfig
from recipes.task import DataError
from recipes.text.config import TextConfig
from trainer.config import Config, TrainerConfig
from trainer.errors import ConfigError
from trainer.plan import make_plan

AXES = frozenset({"replicate", "shard"})


def plan(world_size, parallel=None, num_samples=None, **trainer):
    config = Config(
        task=PretrainConfig(), model=CausalLMConfig(), data=TextConfig(),
        trainer=TrainerConfig(**trainer), parallel=parallel or ParallelConfig(),
    )  # fmt: skip
    return make_plan(config, world_size, num_samples, AXES)


def test_sizes_follow_from_batch_and_ranks():
    made = plan(4, batch_size=32, micro_batch_size=2, eval_batch_size=5)
    assert (made.data_parallel, made.micro_batch_size, made.accumulation) == (4, 2, 4)
    assert made.eval_batch_size == 5
    assert plan(4, batch_size=32).accumulation == 1


def test_epochs_limit_the_steps():
    assert plan(2, num_samples=100, batch_size=32, epochs=2, steps=1000).steps == 6
    assert plan(2, num_samples=100, batch_size=32, epochs=2, steps=5).steps == 5
    with pytest.raises(DataError, match="1 epochs of 10 samples do not fill one batch of 32"):
        plan(2, num_samples=10, batch_size=32, epochs=1)


@pytest.mark.parametrize(
    ("world_size", "parallel", "trainer", "message"),
    [
        (3, {}, {"batch_size": 32}, "cannot be split over 3 ranks: set trainer.batch_size=33"),
        (2, {}, {"batch_size": 32, "micro_batch_size": 5}, "set trainer.micro_batch_size to a divisor of 16"),
        (2, {"shard": 3}, {}, "parallel.shard=3 needs 3 ranks, but there are 2"),
        (2, {"sequence": SequenceConfig(size=2)}, {}, "parallel.sequence.size=2: task pretrain cannot run on the axis sequence"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_to_set(world_size, parallel, trainer, message):
    with pytest.raises(ConfigError, match=message):
        plan(world_size, ParallelConfig(**parallel), **trainer)
