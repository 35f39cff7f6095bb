"""One rank of one configuration, under torchrun; rank 0 prints one JSON line.

torchrun ... -m benchmarks.tide.worker KIND MODEL BATCH LENGTH STEPS NODE_SIZE
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from benchmarks.tide.copies import Copies
from collectives.config import CollectivesConfig
from collectives.symmetric.p2p import PointToPoint
from collectives.symmetric.shm import SharedMemory
from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    next_token_loss,
    transformers_config,
)
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.tide import use_tide
from parallel.weights import materialize

PRESETS = Path(__file__).resolve().parent.parent.parent / "configs" / "model"
KINDS = ("stock", "tide", "tide, slot reuse")


def main() -> None:
    """Train a few steps: the first ones warm up, one is counted, the others are timed."""
    kind, preset, batch, length, steps, node_size = (
        sys.argv[1],
        sys.argv[2],
        *map(int, sys.argv[3:7]),
    )
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = dist.get_world_size()
    values: Any = OmegaConf.load(PRESETS / f"{preset}.yaml")
    config = CausalLMConfig(**{**values, "attention": "sdpa"})
    model: Any = build_causal_lm(config, transformers_config(config, 257))
    parallel = ParallelConfig(param_dtype="bfloat16", reduce_dtype="float32")
    parallelize(model, build_mesh(mesh_shape(parallel, size), "cpu"), parallel)
    materialize(model, torch.device("cpu"), partial(init_weights, model), seed=0)
    tide = None
    if kind != "stock":
        reuse = kind == "tide, slot reuse"
        tide = use_tide(model, CollectivesConfig(name="tide", slot_reuse=reuse), node_size)
        assert not tide.stayed, tide.stayed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(257, (batch, length))

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        loss = next_token_loss(model(input_ids=tokens).logits[:, :-1], tokens[:, 1:])
        (loss / (batch * (length - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    warmup = [step() for _ in range(2)]
    seconds = [step() for _ in range(steps)]
    copies = Copies(size)
    for transport in (SharedMemory, PointToPoint):
        transport.put = copies.watch(transport.put)  # type: ignore[method-assign]
    with copies:
        step()
    memory = {}
    if tide is not None:
        memory = {
            "slots": sum(pool.slot_nbytes for pool in tide.pools),
            "staging": sum(pool.staging_nbytes for pool in tide.pools),
        }
    if dist.get_rank() == 0:
        found = {"warmup": warmup, "seconds": seconds, "bytes": copies.bytes, "memory": memory}
        print("\n" + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
