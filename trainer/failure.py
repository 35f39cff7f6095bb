"""How a rank says why it ends: once, where somebody will look for it."""

import errno
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

from trainer.errors import CHECKPOINT, DATA, FAILED, RunError
from trainer.peers import wake_peers
from trainer.startup import importing

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""The disk is full, or read-only: errors that say nothing about the program."""


def end_rank(error: Exception) -> None:
    """End this process at once, from any thread, with `error` as the reason."""
    rank = os.environ.get("RANK", "0")
    try:
        raise error  # torchrun wants to know it with where it came from
    except type(error):
        report(FAILED, f"rank {rank} failed: {type(error).__name__}: {error}")
    finally:
        os._exit(FAILED)  # whatever became of the report: the main thread waits for ever


def in_words(error: BaseException) -> tuple[int, str]:
    """Exit code and text for an error that is being handled: its traceback only where that helps."""
    with importing():
        import torch

        from collectives.symmetric.transport import PeerError
        from recipes.task import DataError

    rank = os.environ.get("RANK", "0")
    if isinstance(error, RunError):
        return error.code, f"error: {error}"
    if isinstance(error, DataError):
        return DATA, f"error: {_in_the_worker(str(error))}"
    if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
        file = f" {error.filename}" if error.filename else ""
        return CHECKPOINT, (
            f"error: rank {rank} cannot write{file}: {error.strerror}: free some space, or set another "
            "run.dir"
        )
    if isinstance(error, PeerError):
        return FAILED, f"rank {rank} failed: {error}"
    if waited_in_vain(error):
        return FAILED, f"rank {rank} lost its peers: {_without_place(str(error))}"
    text = f"rank {rank} failed:\n{traceback.format_exc().rstrip()}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        text += (
            f"\nrank {rank} ran out of memory: set trainer.micro_batch_size to less, or "
            "parallel.activation_checkpointing=block; trainer.dry_run=true says what would fit"
        )
    return FAILED, text


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
        try:
            file.with_suffix(".part").write_text(
                json.dumps(record)
            )  # the launcher may end this rank
            os.replace(file.with_suffix(".part"), file)
        except OSError:  # the disk of temporary files is full
            print(text, file=console())
        wake_peers(Path(folder))
        print(text, file=sys.stderr) if rank != "0" else None  # into the rank's own file
    elif code == FAILED and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        lost = waited_in_vain(sys.exc_info()[1] or Exception())
        print(f"rank {rank} lost its peers" if lost else text, file=console())
    elif code != FAILED and rank == "0":
        print(text, file=console())
    told = folder is None and "TORCHELASTIC_ERROR_FILE" in os.environ
    if told and sys.exc_info()[1] is not None:
        # Not for our launcher: a rank killed while it writes this file would take the launcher along.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(sys.exc_info()[1])  # type: ignore[arg-type]
    return code


def waited_in_vain(error: BaseException) -> bool:
    """Whether torch's CPU collectives only say that another rank is gone, or silent."""
    said = ("closed by peer", "reset by peer", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def _in_the_worker(text: str) -> str:
    """What a data worker raised: torch hands it on with the worker's traceback around it."""
    if text.startswith("Caught DataError in "):
        return text.rpartition("DataError: ")[2].rstrip()
    return text


def _without_place(text: str) -> str:
    """gloo's first sentence, without where in gloo it is."""
    return re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0]).split(". ")[0]
