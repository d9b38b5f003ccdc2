"""Run a function in several rank processes at once, over a `file://` rendezvous on the loopback interface.

The processes come from a fork server that has imported torch and diffusers once, so that each costs little. A
rank that fails or hangs fails the test with that rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 120.0
_PRELOAD = [
    "torch",
    "torch.distributed",
    "dlo_engine.runtime",
    "dlo_engine.pipeline",
    "dlo_engine.families.flux",
]


def run_ranks(world: int, target: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """`target(rank, rendezvous, *args)` in `world` processes; their results (plain values) in rank order.

    `folder` is an empty place for the rendezvous file.
    """
    context = _context()
    rendezvous = f"file://{folder / f'rendezvous-{time.monotonic_ns()}'}"
    pipes, processes = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(there, target, rank, rendezvous, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _context() -> Any:
    """Fresh interpreters where there is a GPU: CUDA cannot be used in a child of a process that touched it."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _collect(pipes: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(pipes))
    deadline = time.monotonic() + PATIENCE
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting)} gave no result within {PATIENCE} s"
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process ended without a word"
                assert ok, f"rank {rank} failed:\n{value}"
                results[rank] = value
                del waiting[rank]
    return [results[rank] for rank in range(len(pipes))]


def _main(pipe: Any, target: Callable[..., Any], rank: int, rendezvous: str, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        import torch

        if not torch.cuda.is_available():
            warnings.simplefilter("error")
        torch.set_num_threads(1)
        pipe.send((True, target(rank, rendezvous, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
