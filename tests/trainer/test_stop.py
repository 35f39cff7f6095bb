import subprocess
import sys

ORPHAN = """
import os, time
from trainer import stop
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.001)
stop.die_with_parent({parent})
print("it lives")
"""


def what_is_said(parent):
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN.format(parent=parent)], capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout


def test_a_process_whose_parent_had_gone_before_it_could_ask_ends():
    """A rank that is killed while it starts its data workers."""
    assert what_is_said("parent") == ""
    assert what_is_said("None") == "it lives\n"
