"""Every test runs away from the user's caches, and with few threads."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HYDRA_FULL_ERROR"] = "0"
os.environ["WANDB_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SPRINGTIDE_FAILURES"):
    os.environ.pop(name, None)
