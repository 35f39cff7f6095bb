"""One rank, from its first to its last moment: `python -m trainer.worker`, or a call in process."""

import faulthandler
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer import nccl, stop
from trainer.failure import in_words, report
from trainer.peers import leave_with_dead_peers
from trainer.startup import importing


def main() -> None:
    """Entry point of a rank that our launcher started."""
    faulthandler.enable()  # what crashes in a library shows where we called it
    stop.install()
    stop.die_with_parent(int(os.environ[stop.LAUNCHER]))
    nccl.load()  # before torch loads its own
    with importing():
        from trainer.launch import EXCHANGE, PAYLOAD

    exchange = Path(os.environ[EXCHANGE])
    leave_with_dead_peers(exchange, int(os.environ["RANK"]))
    code = run(json.loads((exchange / PAYLOAD).read_text()))
    with suppress(OSError):  # whoever read the output may have gone
        sys.stdout.flush()
        sys.stderr.flush()
    # No interpreter shutdown: threads of a broken process group could hang it.
    os._exit(code)


def run(payload: dict[str, Any]) -> int:
    """Train as the rank that the environment names; returns the exit code, prints what went wrong.

    `payload` holds the composed `config`, the `kind` of launch and the `overrides` given.
    """
    with importing():
        from trainer.config import build_config
        from trainer.launch import Invocation
        from trainer.loop import train
        from trainer.plugins import tasks
        from trainer.process import process_group, seed_everything
        from trainer.run import assemble
        from trainer.work import is_work, work

    try:
        config = build_config(payload["config"])
        invocation = Invocation(payload["kind"], payload["overrides"])
        with process_group(config.launch.timeout, alone=_alone(payload)) as device:
            seed_everything(config.trainer.seed, config.trainer.deterministic)
            if is_work(tasks()[config.task.name]):
                return work(config, invocation, device)
            with assemble(config, invocation, device) as job:
                code = train(job)
                stop.ignore()  # from here on, the launcher's goodbye is not a request
                return code
    except Exception as error:
        return report(*in_words(error))


def _alone(payload: dict[str, Any]) -> bool:
    """Whether this process is the only rank, without a launcher to have set the environment."""
    from trainer.launch import EXCHANGE

    return payload["kind"] == "local" and EXCHANGE not in os.environ


if __name__ == "__main__":
    main()
