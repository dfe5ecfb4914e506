"""A lock among the processes that share the folder of a search."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from metaaugment.files.atomic import acquire


class FileLock:
    """A lock that one process holds at a time; that of a killed process is free at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._held: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._held = self.file.open("ab+")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        return True

    @contextmanager
    def attempt(self) -> Iterator[bool]:
        """A context that holds the lock unless another process does; yields whether it is held."""
        with self.file.open("ab+") as file:
            yield acquire(file.fileno(), patience=0)

    def release(self) -> None:
        assert self._held is not None
        self._held.close()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
