"""Which keys would make a run fit, found by planning it again with them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from trainer.config import Config
from trainer.devices import Device
from trainer.plan import Plan

GIB = 2**30
CONTEXT = 1.5 * GIB
"""What CUDA, its libraries and NCCL take before the first tensor."""
FRAGMENTED = 0.08
"""Of the memory, between blocks of the caching allocator."""


def room(device: Device) -> float:
    """Bytes of tensors that a device can hold."""
    return device.memory * (1 - FRAGMENTED) - CONTEXT


def remedies(
    config: Config, plan: Plan, total: float, limit: float, plan_again: Callable[[Config], float]
) -> list[str]:
    """Changes that bring `total` bytes a rank below `limit`: one key, else two or three together.

    `plan_again` gives the bytes of a changed configuration. Empty: nothing that is known here helps.
    """
    sizes: dict[str, float] = {}
    for kind in (_cheap, _costly):
        sizes |= {words: plan_again(changed) for words, changed in kind(config, plan)}
        single = [words for words, size in sizes.items() if size <= limit]
        if single:
            return single
    helpful = [words for words in sorted(sizes, key=sizes.__getitem__) if sizes[words] < total]
    for count in (2, 3):
        for several in combinations(helpful[:4], count):
            if sum(total - sizes[words] for words in several) >= total - limit:
                return [" and ".join(several)]
    return []


def _cheap(config: Config, plan: Plan) -> Iterator[tuple[str, Config]]:
    """Changes that cost little or no time in training."""
    parallel = config.parallel
    if config.collectives.name == "tide" and config.collectives.cast_ahead is not False:
        ahead = replace(config.collectives, cast_ahead=False)
        yield "collectives.cast_ahead=false", replace(config, collectives=ahead)
    if plan.accumulation > 1 and not parallel.reduce_every_micro_batch:
        every = replace(parallel, reduce_every_micro_batch=True)
        yield "parallel.reduce_every_micro_batch=true", replace(config, parallel=every)
    if plan.mesh.get("replicate", 1) > 1:
        wide = replace(parallel, replicate=1, shard=None)
        yield "parallel.replicate=1", replace(config, parallel=wide)


def _costly(config: Config, plan: Plan) -> Iterator[tuple[str, Config]]:
    """Changes that cost time, or precision."""
    parallel, trainer = config.parallel, config.trainer
    if parallel.activation_checkpointing != "block":
        block = replace(parallel, activation_checkpointing="block")
        yield "parallel.activation_checkpointing=block", replace(config, parallel=block)
    if plan.micro_batch_size > 1:
        micro = plan.micro_batch_size // 2
        while plan.micro_batch_size % micro:
            micro -= 1
        smaller = replace(trainer, micro_batch_size=micro)
        yield f"trainer.micro_batch_size={micro}", replace(config, trainer=smaller)
    if parallel.param_dtype == "float32":
        half = replace(parallel, param_dtype="bfloat16")
        yield "parallel.param_dtype=bfloat16", replace(config, parallel=half)
