"""Locks among processes, on open files and folders; that of a process that dies is free at once.

All of the package's locks are here, because only Unix has them. The library `filelock` would not do: it locks no folder
and no file that holds something, cannot tell whether a lock is held without taking it, and needs to write for that.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def acquire(handle: int, patience: float | None = None) -> bool:
    """Lock an open file or folder, waiting at most so many seconds; returns whether it is locked now.

    Raises:
        OSError: where the system, or the file system, has no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    if patience is None:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return True
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(0.01)


@contextmanager
def held(handle: int, patience: float) -> Iterator[None]:
    """A context that holds the lock of an open file or folder, or no lock where there are none.

    Raises:
        OSError: when another process holds it for longer than this patience.
    """
    try:
        alone = acquire(handle, patience)
    except OSError:
        alone = True
    if not alone:
        raise OSError(errno.EBUSY, f"another process has been writing there for {patience:g} s")
    try:
        yield
    finally:
        if fcntl is not None:
            with suppress(OSError):  # closing is not enough if a forked child has it too
                fcntl.flock(handle, fcntl.LOCK_UN)


class FileLock:
    """A lock on a file, which is made for it.

    A forked child does not have it: it would hold its parent's lock after that is killed.

    Args:
        patience: seconds to wait for another process; without it, as long as it takes.
    """

    def __init__(self, file: Path, patience: float | None = None) -> None:
        self.file, self.patience = file, patience
        self._held: FileIO | None = None

    def acquire(self) -> bool:
        """Wait for the lock; returns whether it is held now."""
        self._held = self.file.open("ab+", buffering=0)
        _open.add(self._held)
        locked = False
        try:
            locked = acquire(self._held.fileno(), self.patience)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.file)) from None
        finally:
            if not locked:
                self.release()
        return locked

    @contextmanager
    def attempt(self) -> Iterator[bool]:
        """A context that holds the lock unless another process does; yields whether it is held."""
        lock = FileLock(self.file, patience=0)
        try:
            yield lock.acquire()
        finally:
            lock.release()

    def note(self, holder: str) -> None:
        """Write into the file who holds it; this stays there after the lock is released."""
        assert self._held is not None
        self._held.truncate(0)
        self._held.write(holder.encode())

    def release(self) -> None:
        if self._held is not None:
            _open.discard(self._held)
            self._held.close()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def is_held(file: Path) -> bool:
    """Whether a process holds the lock of a file; asking leaves no trace, and needs no right to write."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:  # never locked, or not accessible: then locking it says why
        return False
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)


def _let_go() -> None:
    while _open:
        _open.pop().close()


_open: set[FileIO] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
