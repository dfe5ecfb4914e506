"""Work shared among processes: they take one piece of it after the other, and none outlives the search."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
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
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.interruption import Interrupted, Interruption

MOMENT = 0.5  # seconds after which a signal is heeded

Work = Callable[[Any], Any]  # does a piece of work
Make = Callable[..., Work]  # makes that in a laboratory, given the arguments of a crew: once in each process


class Alone:
    """This process, which does all work itself."""

    def __init__(self, lab: Laboratory, work: Work) -> None:
        self.lab, self.work = lab, work

    def do(self, pieces: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Do pieces of work; yields each with its result, as soon as it is finished."""
        for piece in pieces:
            self.lab.stop_if_asked()
            yield piece, self.work(piece)


class Crew:
    """Processes of this machine, spread over the GPUs, each with a laboratory of its own.

    Each computes with as many threads as this one: what is found must not depend on the number of processes. Members
    are idle or busy: with a piece of work, or with None while they begin.
    """

    flag = "--processes"

    def __init__(self, lab: Laboratory, number: int, make: Make, arguments: Sequence[Any]) -> None:
        self.lab, self.number, self.make, self.arguments = lab, number, make, arguments
        self.idle: deque[Any] = deque()
        self.busy: dict[Any, tuple[Any, Any]] = {}  # members and what they do, by what tells of their answer
        self.lost: list[str] = []  # how members died since all of them were hired
        self.noted = -1  # trials at that time

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self._dismiss([*self.idle, *(member for member, _ in self.busy.values())])

    def do(self, pieces: Iterable[Any], look: Callable[[], None] = lambda: None) -> Iterator[tuple[Any, Any]]:
        """Have pieces of work done; yields each with its result, as soon as it is finished.

        What a member was killed over is done by another one. A user's mistake that a member finds is raised here.
        `look` is called repeatedly meanwhile.
        """
        left = deque(pieces)
        missing = len(left)
        while missing:
            if not self.idle and not self.busy:
                self._hire_all()
            while left and self.idle:
                member, piece = self.idle.popleft(), left.popleft()
                self.busy[self._give(member, piece)] = member, piece
            for told in self._told():
                member, piece = self.busy.pop(told)
                answer = self._answer(member, told)
                if answer is LOST:
                    left.extend([] if piece is None else [piece])
                    continue
                self.idle.append(member)
                if isinstance(answer, Exception):
                    raise answer
                if piece is not None:
                    missing -= 1
                    yield piece, answer
            self.lab.stop_if_asked()
            look()

    def _hire_all(self) -> None:
        noted = len(self.lab.trials())
        if self.lost and noted == self.noted:
            raise ValueError(
                f"{len(self.lost)} of {self.number} processes were killed, {self.lost[0]}, before a trial was "
                f"finished; check that there is memory for all of them, or search with fewer {self.flag}"
            )
        self.lost, self.noted = [], noted
        for index in range(self.number):
            self._hire(index)

    def _bury(self, how: str) -> object:
        self.lost.append(how)
        lost = f"{len(self.lost)} of {self.number} processes were killed"
        self.lab.say(f"{lost}; their unfinished work is done by others")
        return LOST

    # -- the processes --

    def _hire(self, index: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        where = self.lab.recipe, self.lab.place, self.lab.folder, torch.get_num_threads(), index
        process = context.Process(target=_serve, args=(theirs, where, self.make, self.arguments))
        process.start()
        theirs.close()
        self.busy[ours] = (process, ours), None

    def _give(self, member: Any, piece: Any) -> Any:
        """Give an idle member a piece of work; returns what will tell of its answer."""
        with suppress(BrokenPipeError):  # it was killed, which is found next
            member[1].send(piece)
        return member[1]

    def _told(self) -> Sequence[Any]:
        """What tells of an answer now, or after a moment."""
        return wait(list(self.busy), MOMENT)

    def _answer(self, member: Any, told: Any) -> Any:
        """An answer, an error to raise, or that the member is lost."""
        try:
            return told.recv()
        except (EOFError, ConnectionResetError):
            member[0].join()
            return self._bury(f"exit status {member[0].exitcode}")

    def _dismiss(self, members: Sequence[Any]) -> None:
        """Stop members, whatever they do, and wait until they are gone."""
        for process, pipe in members:
            pipe.close()
            process.terminate()
        for process, _ in members:
            process.join()


LOST = object()  # instead of an answer


def _serve(pipe: Connection, where: tuple[Recipe, Place, Path, int, int], make: Make, arguments: Sequence[Any]) -> None:
    """What a process does: it begins, which it tells by None, and then answers each piece of work."""
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    recipe, place, folder, threads, index = where
    quiet = Console(quiet=True)

    def begin() -> Work:
        data = data_of(recipe, place, quiet)
        lab = Laboratory(recipe, place, data, folder, quiet, interruption)
        if lab.device.type == "cuda":
            torch.cuda.set_device(index % torch.cuda.device_count())
        return make(lab, *arguments)

    with suppress(EOFError, BrokenPipeError, Interrupted), Interruption() as interruption:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes: the parent decides
        torch.set_num_threads(threads)
        work = attempt(begin)
        if isinstance(work, Exception):
            pipe.send(work)
            return
        pipe.send(None)
        while True:
            pipe.send(attempt(work, pipe.recv()))


def attempt(work: Callable[..., Any], *what: Any) -> Any:
    """The result of some work, or the error that the search itself words.

    A process without enough memory ends, as if the system had killed it: others may have enough.
    """
    try:
        return work(*what)
    except (CorruptImage, OSError) as error:
        return error
    except ValueError as error:
        return ValueError(str(error))
    except (MemoryError, RuntimeError) as error:
        if (memory := full_memory(error)) is None:
            raise
        sys.exit(f"metaaugment: {memory}")


def _die_with_the_parent() -> None:
    """End with the parent: a process that resumes the search must be alone in its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
