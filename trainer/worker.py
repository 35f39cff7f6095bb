"""One rank, from its first to its last moment: `python -m trainer.worker`, or a call in process."""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer import stop
from trainer.errors import DATA, FAILED, RunError
from trainer.peers import leave_with_dead_peers


def main() -> None:
    """Entry point of a rank that our launcher started."""
    stop.install()
    stop.die_with_parent()
    from trainer.launch import PAYLOAD, RECORDS

    leave_with_dead_peers(Path(os.environ[RECORDS]), int(os.environ["RANK"]))
    code = run(json.loads(os.environ.pop(PAYLOAD)))
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: threads of a broken process group could hang it.
    os._exit(code)


def run(payload: dict[str, Any]) -> int:
    """Train as the rank that the environment names; returns the exit code, prints what went wrong.

    `payload` holds the composed `config`, the `kind` of launch and the `overrides` given.
    """
    from recipes.task import DataError
    from trainer.config import build_config
    from trainer.launch import Invocation
    from trainer.loop import train
    from trainer.run import assemble

    try:
        config = build_config(payload["config"])
        invocation = Invocation(payload["kind"], payload["overrides"])
        with process_group(config.launch.timeout) as device:
            seed_everything(config.trainer.seed, config.trainer.deterministic)
            with assemble(config, invocation, device) as job:
                code = train(job)
                stop.ignore()  # from here on, the launcher's goodbye is not a request
                return code
    except RunError as error:
        return report(error.code, f"error: {error}")
    except DataError as error:
        return report(DATA, f"error: {error}")
    except Exception:
        rank = os.environ.get("RANK", "0")
        return report(FAILED, f"rank {rank} failed:\n{traceback.format_exc()}")


def report(code: int, text: str) -> int:
    """Leave a record of a failure for the launcher, or print it where there is none.

    torchrun prints the traceback of the rank that failed first, from the file that it asks for.
    """
    from trainer.launch import RECORDS

    rank = os.environ.get("RANK", "0")
    folder = os.environ.get(RECORDS)
    if folder is not None:
        record = {"time": time.time(), "code": code, "text": text}
        (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(record))
        print(text, file=sys.stderr) if rank != "0" else None  # into the rank's own file
    elif code == FAILED and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(f"rank {rank} lost its peers" if _lost_peers() else text, file=_console())
    elif code != FAILED and rank == "0":
        print(text, file=_console())
    if "TORCHELASTIC_ERROR_FILE" in os.environ and sys.exc_info()[1] is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(sys.exc_info()[1])  # type: ignore[arg-type]
    return code


def _lost_peers() -> bool:
    """Whether the error that is being handled only says that another rank is gone."""
    return "closed by peer" in str(sys.exc_info()[1]) or "reset by peer" in str(sys.exc_info()[1])


_original_stderr: int | None = None


def _console() -> Any:
    """Standard error as the rank was born with it."""
    return sys.stderr if _original_stderr is None else os.fdopen(os.dup(_original_stderr), "w")


def redirect_output(file: Path) -> None:
    """Send everything this process prints, libraries included, to `file`."""
    global _original_stderr
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    _original_stderr = os.dup(2)
    with file.open("a") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)


@contextmanager
def process_group(timeout: float) -> Iterator[Any]:
    """Join the ranks; yields this rank's device. A lone rank needs no launcher."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    alone = "RANK" not in os.environ
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1"):
        # One machine: gloo need not ask what address the host's name has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend, device_id = "cpu:gloo,cuda:nccl", device
    else:
        device, backend, device_id = torch.device("cpu"), "gloo", None
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        store=HashStore() if alone else None,
        timeout=timedelta(seconds=timeout),
        device_id=device_id,
    )
    try:
        yield device
        dist.barrier()
    finally:
        # After a failure the peers may be gone, and saying goodbye to them would hang.
        if sys.exc_info()[0] is None or world_size == 1:
            dist.destroy_process_group()


def seed_everything(seed: int, deterministic: bool) -> None:
    """Equal random states on every rank; `deterministic` also refuses operations that are not."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


if __name__ == "__main__":
    main()
