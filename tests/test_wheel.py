"""The wheel carries everything: it trains from any folder, without the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.helpers import SMALL

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_trains_away_from_the_checkout(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "w", source]
    subprocess.run(build, check=True)
    [wheel] = (tmp_path / "w").glob("springtide-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("HYDRA_FULL_ERROR", None)
    code = "import trainer, configs; print(trainer.__file__); print(configs.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    assert all(line.startswith(str(site)) for line in where)
    for command in (
        [sys.executable, "-m", "trainer", "launch.nproc=2"],
        [site / "bin" / "springtide", "launch.nproc=1"],
    ):
        done = subprocess.run(
            [*command, "+recipe=tiny", *SMALL, "trainer.steps=2"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "done: 2 steps" in done.stdout
        assert "switched off" not in done.stdout  # the report's styles and script are there
