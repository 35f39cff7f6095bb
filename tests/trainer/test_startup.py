"""Imports are not interrupted by the garbage collector, and it is back afterwards."""

import gc
import subprocess
import sys

import pytest

from trainer.startup import importing


def test_the_collector_rests_while_importing_and_returns_after_an_error():
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_process_ends_without_a_word_about_what_was_left_out():
    """Extension modules look for what nobody took apart when the interpreter ends."""
    imports = "from trainer.plugins import tasks; import gc; tasks(); assert gc.get_freeze_count()"
    done = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
