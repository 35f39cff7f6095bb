"""The reference of `benchmarks.trunk`: the same model under plain FSDP2, and nothing else.

    torchrun --nproc-per-node 2 benchmarks/plain_fsdp2.py MODEL.yaml BATCH LENGTH STEPS EVERY

Tokens come from memory, nothing is logged, saved, checked or guarded. Prints one JSON line with the
seconds of each interval of EVERY steps.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from models.causal_lm import CausalLMConfig, build_causal_lm, transformers_config


def main() -> None:
    """Train and print the times."""
    preset, batch, length, steps, every = sys.argv[1], *map(int, sys.argv[2:6])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    config = CausalLMConfig(**OmegaConf.load(preset))  # type: ignore[arg-type]
    model: Any = build_causal_lm(config, transformers_config(config, 257))
    policy = MixedPrecisionPolicy(torch.bfloat16 if gpu else None, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.initialize_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    boundaries = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    documents = {"cu_seq_lens_q": boundaries, "max_length_q": length}
    positions = torch.arange(length, device=device).expand(batch, -1)
    torch.manual_seed(dist.get_rank())
    times = []
    for step in range(steps):
        if step % every == 0:
            dist.barrier()
            begin = time.perf_counter()
        tokens = torch.randint(257, (batch, length), device=device)
        logits = model(input_ids=tokens, position_ids=positions, **documents).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % every == every - 1:
            loss.item()
            times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": times}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
