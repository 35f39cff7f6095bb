"""Jobs on several devices: what waits for what, what a limit does, and what an archive has."""

import argparse
import sys
import tarfile
import time

from benchmarks.slide.everything import JOBS, Job, Running, kept


class Fake(Job):
    """A process that notes when it began and ended; or one that never ends."""

    def command(self, options):
        code = (
            "import pathlib, sys, time; log = pathlib.Path(sys.argv[1]); began = time.time();"
            "time.sleep(float(sys.argv[2])); log.write_text(f'{began} {time.time()}')"
        )
        file = options.out / f"{self.what}-{self.name}"
        return [sys.executable, "-c", code, str(file), str(self.seed / 10)]


def run(folder, jobs, gpus, seconds=60.0):
    folder.mkdir(exist_ok=True)
    options = argparse.Namespace(out=folder, archive=folder / "all.tar.gz", gpus=gpus)
    Running(options, time.monotonic() + seconds, jobs).all()
    return {
        file.name: tuple(map(float, file.read_text().split()))
        for file in folder.iterdir()
        if "-" in file.name
    }


def test_a_job_waits_for_what_it_needs_and_its_gpu_takes_another(tmp_path):
    jobs = [Fake("choice", "a", 14), Fake("study", "b", 1, needs="choice"), Fake("other", "c", 1)]
    found = run(tmp_path / "out", jobs, ["0", "1"])
    assert found["study-b"][0] > found["choice-a"][1]
    assert found["other-c"][1] < found["choice-a"][1]


def test_the_limit_ends_all(tmp_path):
    began = time.monotonic()
    assert run(tmp_path / "out", [Fake("a", "a", 600), Fake("b", "b", 1)], [""], 1.0) == {}
    assert time.monotonic() - began < 20


def test_an_archive_has_the_weights_that_fit(tmp_path):
    for name, size in (("x", 300), ("y", 100)):
        folder = tmp_path / f"slide-{name}-0.weights"
        folder.mkdir()
        (folder / "s.safetensors").write_bytes(bytes(size))
        (tmp_path / f"slide-{name}-0.json").write_text("{}")
    names = [str(file.relative_to(tmp_path)) for file in kept(tmp_path, 200)]
    expected = ["slide-x-0.json", "slide-y-0.json", "slide-y-0.weights/s.safetensors"]
    assert names == expected
    options = argparse.Namespace(out=tmp_path, archive=tmp_path.parent / "all.tar.gz", gpus=[""])
    Running(options, 0.0, []).pack()
    with tarfile.open(f"{options.archive}.0") as archive:
        assert len(archive.getnames()) == 4


def test_what_jobs_need_comes_before_them():
    for number, job in enumerate(JOBS):
        assert not job.needs or job.needs in {other.what for other in JOBS[:number]}
