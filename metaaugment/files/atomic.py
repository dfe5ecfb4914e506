"""Writing whole or not at all: a file, of which whoever reads sees the old one or the new one, or a line of a file."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from metaaugment.files import lock

PATIENCE = 120.0  # seconds that a writer waits for another one in the same folder


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Have a file written under a temporary name, and rename it when it is safe on the disk.

    The temporary name is always the same, so the next process overwrites what a killed one left there.
    """
    part = file.with_name(f".{file.name}.part")
    try:
        with _alone_in(file.parent):
            try:
                write(part)
                with part.open("rb+") as content:
                    os.fsync(content.fileno())
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:  # name the file itself, not its part
        raise OSError(error.errno, error.strerror or str(error), str(file)) from None


def append_line(file: Path, line: str) -> None:
    """Write a line at the end of a file: all of it or, on a full disk, nothing. A half-written one is ended first.

    Several processes may do so at once.
    """
    try:
        # Others wait: restoring the length must not cut off their lines.
        with file.open("ab+", buffering=0) as content, lock.held(content.fileno(), PATIENCE):
            _append(content, line.encode() + b"\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def _append(content: FileIO, line: bytes) -> None:
    length = content.seek(0, os.SEEK_END)
    content.seek(max(0, length - 1))  # what is written goes to the end all the same
    torn = length > 0 and content.read(1) != b"\n"
    rest = b"\n" + line if torn else line
    try:
        while rest:
            rest = rest[content.write(rest) :]
        os.fsync(content.fileno())
    except OSError:
        with suppress(OSError):  # a device has no length; the first error says more
            content.truncate(length)
        raise


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to this folder meanwhile: two that write the same file would share its part.

    At the end, what was written is safe against a loss of power.
    """
    if lock.fcntl is None:  # Windows, which cannot open a folder either
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with lock.held(handle, PATIENCE):
            yield
            os.fsync(handle)
    finally:
        os.close(handle)
