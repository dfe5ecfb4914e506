"""Work shared among processes of this machine: they start together, and none outlives the search."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from metaaugment.guard.faults import full_memory
from metaaugment.lab.data import CorruptImage
from metaaugment.lab.experiments.experiment import data_of
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.laboratory import Laboratory
from metaaugment.lab.training.interruption import Interrupted, Interruption

MOMENT = 0.1  # seconds after which a signal is heeded
NEWS = 1.0  # seconds between looks at what is done


def share(
    lab: Laboratory, processes: int, target: Callable[..., None], arguments: Sequence[Any], look: Callable[[], None]
) -> None:
    """Call target(lab, index, *arguments) in several processes, each with a laboratory of its own, spread over the
    GPUs; `look` is called repeatedly meanwhile.

    Each computes with as many threads as this one: what is found must not depend on the number of processes.

    What a killed process leaves unfinished, the others may do; the caller starts what is left again.
    """
    before, looked = len(lab.trials()), time.monotonic()

    def meanwhile() -> None:
        nonlocal looked
        lab.stop_if_asked()
        if time.monotonic() - looked >= NEWS:
            looked = time.monotonic()
            look()

    common = target, lab.recipe, lab.place, lab.folder, torch.get_num_threads()
    tasks = [(*common, index, arguments) for index in range(processes)]
    dead = work(_take_part, tasks, meanwhile)
    look()  # at what the last of them noted on its way out
    if dead and len(lab.trials()) == before:
        raise ValueError(
            f"{len(dead)} of {processes} processes were killed, exit status {dead[0]}, before a trial was finished; "
            "check that there is memory for all of them, or search with fewer --processes"
        )
    if dead:
        lab.say(f"{len(dead)} of {processes} processes were killed; their unfinished work is done by others")


def _take_part(
    target: Callable[..., None],
    recipe: Recipe,
    place: Place,
    folder: Path,
    threads: int,
    index: int,
    arguments: Sequence[Any],
    interruption: Interruption,
) -> None:
    torch.set_num_threads(threads)
    data = data_of(recipe, place, Console(quiet=True))
    lab = Laboratory(recipe, place, data, folder, Console(quiet=True), interruption)
    if lab.device.type == "cuda":
        torch.cuda.set_device(index % torch.cuda.device_count())
    target(lab, index, *arguments)


def work(target: Callable[..., None], tasks: Sequence[tuple[Any, ...]], meanwhile: Callable[[], None]) -> list[int]:
    """Call target(*task, interruption) in one process per task, and wait until they are done or dead.

    `meanwhile` is called repeatedly; if it raises, all processes are asked to stop after what they are doing. A user's
    mistake that a process finds is raised here. Returns the exit statuses of processes that were killed.
    """
    context = multiprocessing.get_context("spawn")
    processes, reports = [], []
    try:
        for task in tasks:
            report, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_member, args=(target, task, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            reports.append(report)
        while alive := [process.sentinel for process in processes if process.is_alive()]:
            wait(alive, timeout=MOMENT)
            meanwhile()
            _raise_first(reports)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    _raise_first(reports)
    return [process.exitcode for process in processes if process.exitcode]


def _raise_first(reports: Sequence[Connection]) -> None:
    for report in reports:
        try:
            if report.poll():
                raise report.recv()
        except EOFError:  # the process ended without a report
            continue


def _member(target: Callable[..., None], task: tuple[Any, ...], report: Connection) -> None:
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    try:
        with Interruption() as interruption:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes: the parent decides
            target(*task, interruption)
    except Interrupted:
        pass
    except (CorruptImage, OSError) as error:  # the search itself words these
        report.send(error)
    except ValueError as error:
        report.send(ValueError(str(error)))
    except (MemoryError, RuntimeError) as error:
        if (memory := full_memory(error)) is None:
            raise
        sys.exit(f"metaaugment: {memory}")  # like a process that the system kills: others may have enough


def _die_with_the_parent() -> None:
    """End with the parent: a process that resumes the search must be alone in its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
