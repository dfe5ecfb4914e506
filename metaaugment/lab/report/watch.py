"""A report that follows its runs: rewritten whenever one of them has progressed, until all have a result."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from metaaugment.lab.report.page import Report
from metaaugment.lab.report.runs import run_folders
from metaaugment.lab.training.checkpoint import LOOK
from metaaugment.lab.training.folder import DIAGNOSIS, RECIPE, RESULT
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.log import LOG

LOOK_EVERY = 0.5  # seconds
REFRESH = 5  # seconds after which the page reloads itself


def watch(paths: Sequence[Path], write: Callable[[Report, int | None], None]) -> None:
    """Pass each state of the runs to `write`, with the seconds after which the page reloads, or None with the last.

    Raises `Interrupted` after a signal.
    """
    before = None
    with Interruption() as interruption:
        while True:
            now = state(paths)
            if now != before:
                report = Report.of(paths)
                write(report, None if report.finished else REFRESH)
                if report.finished:
                    return
                before = now
            time.sleep(LOOK_EVERY)
            if interruption.signum is not None:
                raise Interrupted(interruption.signum)


def state(paths: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Time and size of each file that the page is made from, which change as a run progresses."""
    found = {}
    for folder in (folder for path in paths for folder in run_folders(path)):
        for file in (folder / name for name in (RECIPE, LOG, LOOK, DIAGNOSIS, RESULT)):
            with contextlib.suppress(OSError):
                found[file] = ((about := file.stat()).st_mtime_ns, about.st_size)
    return found
