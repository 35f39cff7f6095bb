"""`run_ranks(4, check, argument)`: a function on every one of four gloo ranks, in a test.

The function gets its arguments on each rank, with the process group up, and may return something
that pickles. A failing rank's own traceback is the test's failure; a hang is ended and reported.
With SPRINGTIDE_TEST_DEVICE=cuda, rank `n` has GPU `n`.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.preload"])


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120
) -> Any:
    """Run `function(*args)` on `world_size` ranks; returns their results, by rank."""
    with tempfile.TemporaryDirectory() as scratch:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = forks.Pipe(duplex=False)
            process = forks.Process(
                target=_rank_main,
                args=(rank, world_size, scratch, sender, function, args),
                daemon=False,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(end - time.monotonic(), 0))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise AssertionError(f"ranks {missing} did not finish within {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    scratch: str,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.enable()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gpu = os.environ.get("SPRINGTIDE_TEST_DEVICE") == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sender.close()
    os._exit(0)
