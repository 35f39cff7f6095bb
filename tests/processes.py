"""Processes of this machine, looked at from outside."""

import os
import re
from pathlib import Path


def ranks_of(pid):
    """Process ids of the ranks that a launcher started, by rank."""
    found = {}
    for child in children(pid):
        try:
            command, environment, name = (
                Path(f"/proc/{child}/{file}").read_text() for file in ("cmdline", "environ", "comm")
            )
        except OSError:
            continue
        new = re.search(r"(?:^|\0)RANK=(\d+)", environment) if "trainer.worker" in command else None
        if rank := re.fullmatch(r"rank (\d+)\n", name) or new:
            found[int(rank[1])] = child
    return found


def catches(pid, number):
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def children(pid):
    """Direct children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def command_of(pid):
    """Its command line; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def working_in(folder):
    """Ids of processes whose working directory is `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
