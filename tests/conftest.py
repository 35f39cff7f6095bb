"""Every test runs away from the user's settings, and with few threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("here", deadline=None)
settings.load_profile("here")

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HYDRA_FULL_ERROR"] = "0"
os.environ["WANDB_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SPRINGTIDE_EXCHANGE"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def plugin(tmp_path_factory):
    """The environment in which a third party's package is installed beside ours."""
    target = tmp_path_factory.mktemp("plugin")
    install(Path(__file__).parent / "plugin", target)
    return {"PYTHONPATH": str(target)}


def install(package: Path, target: Path) -> None:
    """`pip install` a package into a folder of its own, from a copy, without a network."""
    import shutil

    copy = target / ".source"
    shutil.copytree(package, copy)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
            "--disable-pip-version-check", "--target", target, copy,
        ],
        check=True,
    )  # fmt: skip
