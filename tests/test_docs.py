"""Every command in the documentation runs, as it is written there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import install
from tests.runs.helpers import program, train

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```", re.M | re.S)

ELSEWHERE = {
    "make test": "this run is it",
    "make lint": "make test begins with it",
    'make test TESTS="tests/recipes"': "make test, for a part",
    "make format": "would change the checkout",
    "torchrun --nnodes=8": "tests/runs/test_launchers.py runs two nodes on this machine",
    "srun --nodes=8": "tests/runs/test_launchers.py sets the variables of a step",
    "pip install ./sine": "installed below, without a network",
    "python -m benchmarks.trunk --gpus": "needs GPUs; tests/test_benchmarks.py runs it on the CPU",
    **{
        f"python -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.tide.{name}": (
            "needs two GPUs"
        )
        for name in ("alone", "host", "network")
    },
    "python -m benchmarks.repacking --quick": "tests/benchmarks/repacking runs a few of its steps",
    "python -m benchmarks.repacking --lengths FILE": "tests/benchmarks/repacking has such a file",
    "python -m benchmarks.repacking.solvers": "tests/benchmarks/repacking runs a few of its cases",
    "python -m benchmarks.repacking.calibrate": "needs a GPU; tests/benchmarks/repacking: on the CPU",
    "python -m benchmarks.repacking.exchange": "tests/benchmarks/repacking runs it on the CPU",
    "python -m benchmarks.repacking.page": "would change the checkout; its tables are compared there",
    "pip install --no-deps recbole": "needs a package index",
    "python -m trainer +recipe=trip run.dir=runs/trip": "needs that package; the next block trains",
    "python -m trainer +recipe=slide run.dir=runs/slide": "needs that package, and minutes; see below",
    "python -m trainer +recipe=slide data=planted": "tests/trainer/test_chain.py runs chains",
    **dict.fromkeys(
        (
            "python -m trainer +recipe=sid_build",
            "python -m trainer +recipe=gr_train",
            "python -m trainer.export runs/teacher",
            "python -m trainer +recipe=beam_export",
            "python -m trainer +recipe=list_distill",
            "python -m trainer.export runs/student",
            "python -m trainer +recipe=list_eval",
        ),
        "tests/recipes/slide and tests/trainer/test_chain.py run every stage",
    ),
    "python -m trainer +recipe=lelora_classify trainer.steps=4": (
        "tests/recipes/lelora/test_steering.py has a population teach"
    ),
    "python -m trainer +recipe=lelora_classify trainer.steps=6": "tests/runs/test_lelora.py does it",
    "python -m trainer.export runs/labels": "tests/runs/test_lelora.py does it",
    "python -m trainer +recipe=hybrid_1f3s trainer.steps=2": "tests/runs/test_hybrid.py does it",
    "python -m trainer +recipe=hybrid_1f3s_repack trainer.steps=2": "tests/runs/test_repacked.py does it",
    "python -m trainer +recipe=tiny parallel.sequence.size=2": "tests/runs/test_equality.py does it",
    "python -m trainer run.dir=runs/mine trainer.steps=25": "tests/faults/test_restarts.py does it",
    "python -m trainer +recipe=qwen3_30b_a3b_fsdp_tide": "tests/runs/test_qwen3_moe.py does it",
    "python -m trainer.export runs/moe": "tests/runs/test_qwen3_moe.py does it",
    "pip install 'springtide[video]'": "needs a package index",
    "python -m recipes.wan.make_latents latents --videos": "tests/recipes/wan encodes some",
    "python -m trainer +recipe=wan22_fsdp_tide": "tests/runs/test_wan.py does it",
    "python -m trainer.export runs/low": "tests/runs/test_wan.py does it",
    "python -m recipes.wan.make_latents latents --drawn": "tests/recipes/wan makes some",
    "python -m benchmarks.trip": "tests/benchmarks/trip runs a small one",
    "python -m benchmarks.tide --device": "tests/test_benchmarks.py runs it on the CPU, a quick one",
}
"""Commands that are not run here, by their beginning, and what runs instead."""

SHORT = ("trainer.eval_samples=8", "trainer.batch_size=4", "logging.wandb.mode=disabled")
"""Added to runs that do not say it themselves: steps and evaluations take no time, wandb is not imported."""


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text())


def command_blocks(page):
    """The commands of each shell block; those of one block run in order, in the same folder."""
    shell = [text.splitlines() for kind, _, text in blocks(page) if kind == "bash"]
    return [[line for line in lines if line.strip() and line[0] != "#"] for lines in shell]


def commands(page):
    return [command for block in command_blocks(page) for command in block]


BLOCKS = [
    pytest.param(page, block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(command_blocks(page))
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A copy of what the commands need, with the files that the pages show, and its environment."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("docs", "Makefile", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    for page in PAGES:
        for _, title, text in blocks(page):
            if title:
                (folder / title).parent.mkdir(parents=True, exist_ok=True)
                (folder / title).write_text(text)
    # `make train` shall use the environment that the tests run in, not install another.
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "python").chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    (folder / "plugin").mkdir()
    install(folder / "sine", folder / "plugin")
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "plugin"),
        "ARGS": " ".join(("trainer.steps=3", *SHORT)),  # make train: the first steps of it
    }
    environment.pop("HYDRA_FULL_ERROR", None)
    return folder, environment


def is_elsewhere(command):
    return any(command.startswith(prefix) for prefix in ELSEWHERE)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_commands_run(page, block, workplace):
    folder, environment = workplace
    for command in block:
        if is_elsewhere(command):
            continue
        code, output = perform(command, folder, environment)
        assert code == 0, f"{command}\n{output}"


def perform(command, folder, environment):
    """What bash would do with it, but Python is forked; `make train` starts all of its processes."""
    words = shlex.split(command, comments=True)
    given = {"cwd": folder, "env": environment, "timeout": 240}
    if words[:2] == ["python", "-m"]:
        if words[2] != "trainer" or {"--help", "--cfg", "trainer.dry_run=true"} & set(words):
            return program(*words[3:], module=words[2], **given)
        return train(*words[3:], *short(words), **given)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout


def short(words):
    return [
        word for word in SHORT if not any(w.startswith(f"{word.split('=')[0]}=") for w in words)
    ]


def test_the_sine_learns_to_be_one(workplace):
    """The example of `docs/writing-a-task.md` does what the page says."""
    folder, environment = workplace
    sine = ["task=sine", "model=sine", "data=sine"]
    code, output = train(
        *sine, "trainer.steps=300", "trainer.batch_size=64", "optim.lr=1e-2", "run.dir=sine-run",
        "checkpoint.every=0", cwd=folder, env=environment,
    )  # fmt: skip
    assert code == 0, output
    error = float(re.findall(r"error (\d\.\d+)", output)[-1])
    assert error < 0.1
    code, output = program(*sine, "task.noise=-1", cwd=folder, env=environment)
    assert code == 2
    assert "set task.noise to 0 or more" in output


def test_every_exception_to_the_rule_is_still_needed():
    written = [command for page in PAGES for command in commands(page)]
    for prefix in ELSEWHERE:
        assert any(command.startswith(prefix) for command in written), prefix


def test_the_list_of_keys_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "trainer.keys"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "configuration.md").read_text().endswith(done.stdout)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_every_key_has_a_meaning():
    from trainer.keys import markdown

    empty = [
        line for line in markdown().splitlines() if line.startswith("| `") and line.endswith("|  |")
    ]
    names = [line.split("`")[1] for line in empty]
    obvious = {"model.num_layers", "model.hidden_size", "model.intermediate_size", "model.num_heads",
               "model.num_kv_heads", "model.head_dim", "model.max_positions", "model.rope_theta",
               "model.tie_embeddings", "optim.betas", "optim.eps", "task.name",
               "logging.wandb.project", "logging.wandb.entity"}  # fmt: skip
    assert set(names) <= obvious
