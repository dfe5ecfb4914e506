"""Processes of a test that work together by gloo."""

import os

import torch.distributed as dist


def meet(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)


def leave() -> None:
    """End this process when all are done, and leave its threads to the system.

    On a busy machine gloo's own may still run when Python takes the process down, which then aborts.
    """
    dist.barrier()
    os._exit(0)
