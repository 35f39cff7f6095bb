"""The files of docs/launch: their shells parse, and what they say agrees with itself and with us."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "docs" / "launch"
BATCH = (LAUNCH / "train.sbatch").read_text()
SERVICE, JOB = yaml.safe_load_all((LAUNCH / "train.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
*SHELL, SCRIPT = CONTAINER["command"]


def parses(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    return done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", [BATCH, SCRIPT], ids=["sbatch", "pod"])
def test_shells_can_read_them(script):
    assert parses(script) == (True, "")
    assert "set -euo pipefail" in script


@pytest.mark.parametrize("script", [BATCH, SCRIPT], ids=["sbatch", "pod"])
def test_they_look_first_and_then_train_so_that_a_run_goes_on(script):
    lines = script.replace("\\\n", " ")
    doctor, run = (re.search(rf"-m trainer{name} .*", lines) for name in (r"\.doctor", ""))
    assert doctor.start() < run.start()
    assert "--require-gpu" in doctor[0]
    assert "run.dir=" in run[0]
    assert "trainer.resume=auto" in run[0]
    assert "collectives.transport=nccl" in run[0]
    for name in re.findall(r"\+recipe=(\w+)", script):
        assert name == "NAME" or (ROOT / "configs" / "recipe" / f"{name}.yaml").is_file(), name
    assert "SPRINGTIDE_NCCL=$(python -m trainer.nccl path)" in script


def test_a_task_for_each_gpu():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", BATCH, re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"] == "TERM@300"
    assert "requeue" in options


def test_a_pod_for_each_node_and_a_rank_for_each_gpu():
    spec, limits = JOB["spec"], CONTAINER["resources"]["limits"]
    words = dict(re.findall(r"--(nnodes|nproc-per-node)=(\d+)", SCRIPT))
    assert spec["completions"] == spec["parallelism"] == int(words["nnodes"])
    assert limits["nvidia.com/gpu"] == int(words["nproc-per-node"])
    assert spec["completionMode"] == "Indexed"
    assert (SERVICE["kind"], JOB["kind"]) == ("Service", "Job")


def test_pods_find_each_other():
    name = SERVICE["metadata"]["name"]
    assert POD["subdomain"] == name
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert f"{JOB['metadata']['name']}-0.{name}:" in SCRIPT
    ports = re.findall(r"^ranks (\d+) ", SCRIPT, re.M)
    assert len(set(ports)) == len(ports) == 2


def test_what_pods_need_is_there():
    mounted = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in POD["volumes"]}
    assert mounted["memory"] == "/dev/shm"
    assert CONTAINER["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    seconds = {each["name"]: each["value"] for each in CONTAINER["env"]}[
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    ]
    assert int(seconds) < POD["terminationGracePeriodSeconds"]


def test_the_variables_are_explained():
    page = (ROOT / "docs" / "multi-node.md").read_text()
    names = {each["name"] for each in CONTAINER["env"]} | set(re.findall(r"export (\w+)", BATCH))
    for name in names:
        assert f"`{name}" in page, name


SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
PYTHON = """#!/bin/bash
echo "python $*" >> "$LOG"
if [[ "$*" == "-m trainer.nccl path" ]]; then echo /nccl/libnccl.so.2; fi
if [[ "$*" == "-m trainer "* ]]; then exit "$CODE"; fi
"""
NOTED = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
if [[ "$*" == *"-m trainer.doctor"* ]]; then exit "${DOCTOR:-0}"; fi
"""


@pytest.fixture
def programs(tmp_path):
    """A place where what the files start only notes that it was started; runs a script there."""
    for name, text in (
        ("srun", SRUN),
        ("python", PYTHON),
        ("scontrol", NOTED),
        ("torchrun", NOTED),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"

    def perform(script, *arguments, **variables):
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "LOG": str(log),
            "CODE": "0",
            **variables,
        }
        done = subprocess.run(
            ["bash", "-c", script, "file", *arguments], env=environment, check=False
        )
        return done.returncode, log.read_text().splitlines()

    return perform


@pytest.mark.parametrize(("code", "requeued"), [("0", False), ("75", True), ("1", False)])
def test_a_job_that_a_signal_stopped_goes_back_into_the_queue(code, requeued, programs):
    job = {"SLURM_JOB_NAME": "moe", "SLURM_JOB_ID": "7", "RUNS": "/runs", "CODE": code}
    ended, lines = programs(BATCH, "+recipe=tiny", "trainer.steps=3", **job)
    assert ended == int(code)
    assert lines[2] == "python -m trainer.doctor --require-gpu --runs /runs"
    assert lines[3].startswith(
        "python -m trainer +recipe=tiny trainer.steps=3 run.dir=/runs/moe-7 "
    )
    assert lines[4:] == (["scontrol requeue 7"] if requeued else [])


@pytest.mark.parametrize("doctor", ["0", "1"])
def test_a_pod_trains_if_the_doctor_lets_it(doctor, programs):
    code, lines = programs(SCRIPT, JOB_COMPLETION_INDEX="3", DOCTOR=doctor)
    assert code == int(doctor)
    assert [" -m trainer " in line for line in lines[1:]] == [False, True][: 2 - int(doctor)]
    assert all("--node-rank=3" in line for line in lines[1:])
