"""Ctrl-C and SIGTERM ask a run to stop where nothing is lost; a second one stops it at once."""

import signal
import threading
from types import FrameType


class Interrupted(Exception):
    """A run stopped on request, after a checkpoint."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruption:
    """A context in which the two signals are noted in `signum` instead of ending the process."""

    signum: int | None = None

    def __enter__(self) -> "Interruption":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        # Not the previous handlers: those of an enclosing context would only note the second signal as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
