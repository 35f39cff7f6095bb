"""`python -m trainer.doctor`: what this machine, or cluster, can do, and what to mend before a run.

Alone it looks at the machine that it runs on. Started as runs are (torchrun, or a SLURM step), all ranks
look at each other, too. Exits with 0 if runs can start here, with 1 if something stands in their way.
"""

import argparse
import os
from pathlib import Path

from trainer import nccl


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m trainer.doctor", description=__doc__)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where runs will be written"
    )
    parser.add_argument(
        "--require-gpu", action="store_true", help="a machine without GPUs is a problem"
    )
    options = parser.parse_args()
    nccl.load()  # the one that runs would use, before torch loads its own
    # threads of a process group could hang the end
    os._exit(_look(options.runs.absolute(), options.require_gpu))


def _look(folder: Path, require_gpu: bool) -> int:
    from trainer.doctor.cluster import look_together
    from trainer.doctor.finding import is_fit, lines
    from trainer.doctor.machine import look
    from trainer.launch import slurm_environment
    from trainer.process import process_group

    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ |= slurm_environment(os.environ)
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    findings = (
        list(look(folder, require_gpu)) if local_rank == 0 else []
    )  # a node is looked at once
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with process_group(120.0, alone=False) as device:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            findings = list(look_together(findings, folder, local_size, device))
    if rank == 0:
        print("\n".join(lines(findings)), flush=True)
        fit = is_fit(findings)
        print("\nruns can start here" if fit else "\nmend what is BAD before a run", flush=True)
    return 0 if is_fit(findings) else 1


if __name__ == "__main__":
    main()
