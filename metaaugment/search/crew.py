"""Work shared among processes of this machine: they start together, and none outlives the search."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from metaaugment.data import CorruptImage
from metaaugment.training.interruption import Interrupted, Interruption


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
            wait(alive, timeout=1)
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


def _die_with_the_parent() -> None:
    """End with the parent: a process that resumes the search must be alone in its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
