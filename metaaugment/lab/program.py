"""The program as a process: what it prints to, and the exit status and sentence with which it ends."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

from rich.console import Console

from metaaugment.distributed import Parted
from metaaugment.guard.faults import full_memory, lost_reader
from metaaugment.lab.training import launch
from metaaugment.lab.training.interruption import Interrupted


class Patient(Console):
    """A console that goes quiet when the reader of its output closes it, instead of ending the process.

    It prints sentences with names of files in them, in which brackets and colons are not markup.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(
            quiet=quiet, soft_wrap=True, markup=False, emoji=False, highlight=False, force_terminal=on_terminal()
        )

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_terminal(stream: TextIO | None = None) -> bool:
    """Whether a stream, by default the standard output, is a terminal, whatever FORCE_COLOR makes of colors."""
    stream = stream or sys.stdout
    return stream is not None and stream.isatty()


@contextmanager
def fetching() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each thing that is fetched, on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    tasks = {}
    with Progress(*columns, console=Console(stderr=True), disable=not on_terminal(sys.stderr)) as bar:

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield progress


def write_any_character() -> None:
    """Have the output replace what its encoding lacks: a ± or a strange file name must not end a run."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # a program that calls this one may have put anything there
            stream.reconfigure(errors=errors)


@contextmanager
def in_a_sentence(args: Sequence[str]) -> Iterator[None]:
    """Exit status 0 for success, 2 for a user's mistake (one sentence), 1 for a fault of ours.

    Of several processes that train together, only one speaks. `args`: those that the program is called with.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Parted as error:
        fail(f"{error}; continue from the last checkpoint with --resume, or let torchrun do it with --max-restarts", 1)
    except (ValueError, MemoryError, RuntimeError) as error:
        if memory := full_memory(error):
            less = "begin again with a smaller --batch, --copies or --policy-batch"  # once begun, a search keeps them
            fail(f"{memory}; {less if args[:1] == ['search'] else 'free some, or use a machine with more'}")
        if lost := lost_reader(error):
            fail(f"{lost}; continue with --resume and fewer --workers")
        if not isinstance(error, ValueError):
            raise
        fail(str(error))
    except Interrupted as stop:
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(sentence: str, status: int = 2) -> NoReturn:
    if launch.speaks():
        console = Console(stderr=True, soft_wrap=True, force_terminal=on_terminal(sys.stderr))
        console.print(f"metaaugment: {sentence}", style="red", markup=False, highlight=False)
    sys.exit(status)
