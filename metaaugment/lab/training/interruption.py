"""Ctrl-C and SIGTERM ask a run to stop where nothing is lost; a second one stops it at once."""

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, ClassVar, TypeVar

from metaaugment.lab.training.processes import highest

T = TypeVar("T")


class Interrupted(Exception):
    """A run stopped on request, where its last checkpoint lets it continue."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruption:
    """A context in which the two signals are noted in `signum` instead of ending the process.

    A signal that is noted in one context is noted in all those around it, and in those that are entered after it: it
    must not get lost between a training and the search that it is part of.
    """

    signum: int | None = None
    _entered: ClassVar[list["Interruption"]] = []  # from the outermost to the innermost

    def __enter__(self) -> "Interruption":
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            if self._entered:
                self.signum = self._entered[-1].signum
            self._entered.append(self)
            if self.signum is None:
                self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._entered:
            self._entered.remove(self)
        # After a signal, the next one ends the process until the outermost context is left.
        if self.signum is None or not self._entered:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        for context in self._entered:
            context.signum = signum
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def heeding(interruption: Interruption, batches: Iterable[T]) -> Iterator[T]:
    """Batches until a signal asks to stop, which raises `Interrupted`: in all processes, whichever of them was asked.

    Some processes may have a batch more than others; all of them ask as often as the one with most.
    """
    left = iter(batches)
    more = True
    while more:
        if signum := highest(interruption.signum or 0):
            raise Interrupted(signum)
        batch = next(left, None)
        more = bool(highest(int(batch is not None)))
        if batch is not None:
            yield batch
