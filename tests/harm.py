"""Harm that reading a file may do, and the watch for it."""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from outside import Target

# The limits of a case: processor time, time by the clock, and memory.
SECONDS, CLOCK, BYTES = 5.0, 60.0, 2**30

HARM = (
    "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile", "pty.",
    "subprocess.", "socket.", "urllib.", "ctypes.dlopen", "import", "exec", "compile", "marshal.", "code.__new__",
    "pickle.find_class", "builtins.input",
)  # fmt: skip
WRITES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate",
)  # fmt: skip


class Hang(BaseException):
    """A case takes too long; a BaseException, so that no reader mistakes it for an error of the file."""


class Harm(RuntimeError):
    """What a file made Python do."""


class Watch:
    """Python's audit events while a case is read. A hook cannot be removed; without a folder it does nothing."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is not None and self._harms(event, args):
            self.seen.append(f"{event} {str(args)[:200]}")
            raise Harm(self.seen[-1])

    def _harms(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            return bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and self._outside(args[0])
        if event in ("exec", "compile") and self._ours(str(args[1] if event == "compile" else args[0].co_filename)):
            return False
        if event in WRITES:
            within = os.readlink(f"/proc/self/fd/{args[-1]}") if isinstance(args[-1], int) and args[-1] >= 0 else ""
            paths = [os.fsdecode(arg) for arg in args[:2] if isinstance(arg, str | bytes | os.PathLike)]
            return any(self._outside(os.path.join(within, path)) for path in paths)
        if event == "subprocess.Popen" and args[0] == "git":
            return False  # finds the commit, for a policy that is exported
        return event.startswith(HARM) and event != "socket.gethostname"

    @staticmethod
    def _ours(source: str) -> bool:
        """Whether code comes from our own types, for the command line, or from the template of the page."""
        frame: FrameType | None = sys._getframe(3)
        by = "" if frame is None else str(frame.f_globals.get("__name__"))
        return source.endswith("page.html") or by.split(".")[0] in ("tyro", "typing", "dataclasses")

    def _outside(self, path: Any) -> bool:
        if isinstance(path, int) or path == os.devnull:
            return False
        return not f"{os.path.realpath(os.fsdecode(path))}{os.sep}".startswith(f"{self.folder}{os.sep}")

    @contextlib.contextmanager
    def over(self, folder: Path) -> Iterator[None]:
        self.folder = folder.resolve()
        try:
            yield
        finally:
            self.folder = None


@contextlib.contextmanager
def clocked() -> Iterator[None]:
    """Ends a case that takes too long, if need be together with its process."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    faulthandler.dump_traceback_later(CLOCK, exit=True)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)


def resident(field: str) -> int:
    """Bytes of memory of this process: VmRSS at present, VmHWM at most since the last reset."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


@dataclass
class Fault:
    target: str
    what: str  # in a line
    where: str  # the line that raised
    told: str = ""  # the whole traceback
    seed: int = 0
    case: int = 0
    folder: str = ""  # with the files
    times: int = 1

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        which = f"seed {self.seed}, case {self.case}: {self.folder}"
        return f"{self.target}: {self.what[:300]} at {self.where}{often}; {which}"


@dataclass
class Account:
    """Outcomes of cases: how often files were read and refused, and the most time and memory that a case took."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0  # by the clock
    slowest: float = 0.0  # of processor time
    memory: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: "Account") -> None:
        for name in ("cases", "read", "refused", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest, self.memory = max(self.slowest, other.slowest), max(self.memory, other.memory)
        for fault in other.faults:
            self.note(fault)

    def note(self, fault: Fault) -> bool:
        """Add a fault; returns whether it is a new one."""
        for known in self.faults:
            if (known.target, known.where, known.what[:40]) == (fault.target, fault.where, fault.what[:40]):
                known.times += fault.times
                return False
        self.faults.append(fault)
        return True


def judge(name: str, target: Target, folder: Path, watch: Watch, account: Account) -> list[Fault]:
    """Have a case read by all readers of its target; returns what they did wrong."""
    found = []
    for reader in target.readers:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, began = resident("VmRSS"), time.process_time()
        error: BaseException | None = None
        watch.seen.clear()
        try:
            with clocked(), watch.over(folder):
                reader(folder)
        except BaseException as raised:  # of whatever kind: it is judged below
            error = raised
        took, held = time.process_time() - began, resident("VmHWM") - before
        account.slowest, account.memory = max(account.slowest, took), max(account.memory, held)
        account.read += error is None
        account.refused += error is not None
        if fault := wrong(name, target, error, watch.seen, held):
            found.append(fault)
        if isinstance(error, KeyboardInterrupt):
            raise error
    return found


def wrong(name: str, target: Target, error: BaseException | None, harm: Sequence[str], held: int) -> Fault | None:
    """What is wrong with an outcome, if anything is."""
    told = "".join(traceback.format_exception(error)) if error is not None else ""
    if harm:
        return Fault(name, f"harm: {harm[0]}", _place(error), told)
    if held > BYTES:
        return Fault(name, f"{held / 2**20:,.0f} MiB of memory", _place(error), told)
    if error is None:
        return None
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            return Fault(name, f"memory: {cause}", _place(cause), told)
    if isinstance(error, ValueError | OSError) and target.refuses:
        if len(str(error).strip().splitlines()) == 1 or name == "tree":
            return None
        return Fault(name, f"no sentence: {error!s}", _place(error), told)
    return Fault(name, f"{type(error).__name__}: {error}", _place(error), told)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _place(error: BaseException | None) -> str:
    """The innermost line of our own code that an error passed through."""
    if error is None:
        return "no error"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "metaaugment" in Path(frame.filename).parts] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere"
