"""A newer NCCL beside torch's: what is loaded, when, and what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from collectives import nccl as asked
from trainer import nccl


def test_nothing_is_loaded_where_nothing_is_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(nccl.CHOICE, raising=False)
    monkeypatch.setattr(nccl, "FOLDER", tmp_path)
    assert nccl.library() is None
    assert not nccl.load()
    assert nccl.main(["path"]) == 1
    assert "python -m trainer.nccl install" in capsys.readouterr().err


def test_what_is_installed_is_found_and_removed(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(nccl.CHOICE, raising=False)
    monkeypatch.setattr(nccl, "FOLDER", tmp_path / "nccl")
    file = tmp_path / "nccl" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    file.parent.mkdir(parents=True)
    file.touch()
    assert nccl.library() == file
    assert nccl.main(["path"]) == 0
    assert str(file) in capsys.readouterr().out
    assert nccl.main(["remove"]) == 0
    assert nccl.library() is None


def test_another_library_can_be_named_or_none(monkeypatch, tmp_path):
    monkeypatch.setenv(nccl.CHOICE, "")
    assert nccl.library() is None
    monkeypatch.setenv(nccl.CHOICE, str(tmp_path / "missing.so"))
    with pytest.raises(FileNotFoundError, match="SPRINGTIDE_NCCL=.*no such file"):
        nccl.library()


def test_a_library_is_loaded_before_torch_and_never_after(tmp_path):
    """Any library will do to see that it is loaded."""
    code = (
        "import ctypes.util, os, sys; os.environ['SPRINGTIDE_NCCL'] = sys.argv[1]\n"
        "from trainer import nccl; assert 'torch' not in sys.modules; assert nccl.load()\n"
        "import torch; assert not nccl.load()"
    )
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("no /proc")
    libraries = [line.split()[-1] for line in maps.read_text().splitlines() if "libc.so" in line]
    done = subprocess.run(
        [sys.executable, "-c", code, libraries[0]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA builds of torch would install it")
def test_without_cuda_nothing_is_installed(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert nccl.main(["install"]) == 2
    assert "has no CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "no NCCL runs"), ((2, 28, 9), "NCCL 2.28.9 runs, 2.31 is needed"), ((2, 31, 0), None)],
)
def test_the_transport_says_what_it_lacks(monkeypatch, version, says):
    monkeypatch.setitem(sys.modules, "nccl", object())
    monkeypatch.setitem(sys.modules, "nccl.core", object())
    monkeypatch.setattr(asked, "running_version", lambda: version)
    found = asked.unusable()
    assert found is None if says is None else says in found and "trainer.nccl install" in found


def test_the_transport_names_the_package_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    assert "pip install 'springtide[nccl]'" in asked.unusable()
