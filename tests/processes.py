"""Processes of a test: those that work together through gloo, and waiting for what others do."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def meet(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)


def leave() -> None:
    """End this process when all are done, and leave its threads to the system.

    On a busy machine gloo's threads may still run when Python shuts the process down, which then aborts.
    """
    dist.barrier()
    os._exit(0)


def together(world: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What `world` processes return from `work`, each given its rank: tensors, or trees of them."""
    folder.mkdir(parents=True)
    mp.set_forkserver_preload(["metaaugment"])  # imported once: the import takes longer than the work of most tests
    mp.start_processes(_one, (world, str(folder), work, args), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _one(rank: int, world: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    meet(rank, world, folder)
    torch.save(work(rank, world, *args), f"{folder}/{rank}.pt")
    leave()


def until(fact: Callable[[], bool]) -> None:
    """Wait for a fact, for at most ten minutes; the test then fails by its own assertions."""
    for _ in range(60_000):
        if fact():
            return
        time.sleep(0.01)
