"""How a rank says why it ends: once, where somebody will look for it."""

import json
import os
import sys
import time
from pathlib import Path

from trainer.errors import FAILED
from trainer.peers import wake_peers


def end_rank(error: Exception) -> None:
    """End this process at once, from any thread, with `error` as the reason."""
    rank = os.environ.get("RANK", "0")
    try:
        raise error  # torchrun wants to know it with where it came from
    except type(error):
        report(FAILED, f"rank {rank} failed: {type(error).__name__}: {error}")
    finally:
        os._exit(FAILED)  # whatever became of the report: the main thread waits for ever


def report(code: int, text: str) -> int:
    """Leave a record of a failure for the launcher, or print it where there is none.

    torchrun prints the traceback of the rank that failed first, from the file that it asks for.
    """
    from trainer.launch import EXCHANGE
    from trainer.process import console

    rank = os.environ.get("RANK", "0")
    folder = os.environ.get(EXCHANGE)
    if folder is not None:
        record = {"time": time.time(), "code": code, "text": text}
        file = Path(folder) / f"rank-{rank}.json"
        file.with_suffix(".part").write_text(json.dumps(record))  # the launcher may end this rank
        os.replace(file.with_suffix(".part"), file)
        wake_peers(Path(folder))
        print(text, file=sys.stderr) if rank != "0" else None  # into the rank's own file
    elif code == FAILED and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(f"rank {rank} lost its peers" if _lost_peers() else text, file=console())
    elif code != FAILED and rank == "0":
        print(text, file=console())
    if "TORCHELASTIC_ERROR_FILE" in os.environ and sys.exc_info()[1] is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(sys.exc_info()[1])  # type: ignore[arg-type]
    return code


def _lost_peers() -> bool:
    """Whether the error that is being handled only says that another rank is gone."""
    return "closed by peer" in str(sys.exc_info()[1]) or "reset by peer" in str(sys.exc_info()[1])
