"""The folder of a run: what lies in it, and who may write to it."""

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from metaaugment.sealed import write_atomically

MAX_NUMBER = 1e100
RECIPE, RESULT, DIAGNOSIS, LOCK = "recipe.json", "result.json", "diagnosis.json", ".lock"  # of a run
SEARCH, TRIALS, POLICY = "search.json", "trials.jsonl", "policy.json"  # of a search
BEGINNINGS = (LOCK, f".{RECIPE}.part", f".{SEARCH}.part")  # what is there before the recipe is


def new(folder: Path, what: str = "run") -> None:
    """Make the folder of a new run; an existing one is another run's, unless that one died before it began."""
    if folder.exists() and (not folder.is_dir() or any(file.name not in BEGINNINGS for file in folder.iterdir())):
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file; choose a folder for the {what} with --out")
        raise ValueError(
            f"{folder} exists already; continue its {what} with --resume {shlex.quote(str(folder))}, or choose another "
            "folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)


def give_up(folder: Path, first: str) -> bool:
    """Where nothing has come of a run but its first file, take that back: the same folder can then be named again."""
    events = list(folder.glob("events.out.tfevents.*"))  # TensorBoard's, which begin before the first step
    nothing = set(folder.iterdir()) <= {folder / first, folder / LOCK, *events}
    if nothing:
        for file in (folder / first, *events):
            file.unlink(missing_ok=True)
    return nothing


MOMENT = 0.2  # seconds, longer than anybody needs to ask whether a folder is locked


@contextmanager
def locked(folder: Path, by: str = "", patience: float = MOMENT) -> Iterator[None]:
    """Nobody else trains into this folder meanwhile; a process that dies releases it.

    Args:
        by: who it is that has it, for `last_locked`.
        patience: seconds to wait for a process that may be dying, or that only asks whether it `is_locked`.
    """
    until = time.monotonic() + patience
    lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT, 0o666)
    _locks.add(lock)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise ValueError(
                        f"another process trains into {folder}; wait for it, or choose another --out"
                    ) from None
            time.sleep(0.05)
        os.truncate(lock, 0)
        os.write(lock, by.encode())
        yield
    finally:
        if lock in _locks:
            _locks.remove(lock)
            os.close(lock)


def _let_go() -> None:
    """In a forked child: it shares the locks of its parent, and would keep them when that one is killed."""
    while _locks:
        os.close(_locks.pop())


_locks: set[int] = set()
os.register_at_fork(after_in_child=_let_go)


def is_locked(folder: Path) -> bool:
    """Whether a process trains into a folder; asking leaves no trace there."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:  # nobody has, or what is in the way of training into it, which that puts into words
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def last_locked(folder: Path) -> str | None:
    """Who has trained into a folder last, or does."""
    lock = folder / LOCK
    return lock.read_text() if lock.exists() else None


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    write_atomically(file, lambda part: part.write_text(json.dumps(value, indent=2) + "\n"))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a JSON file can be computed with and drawn; whole numbers there have no end."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: it is not valid JSON ({error}); take an intact copy of it") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it holds a {type(value).__name__}, not an object; take an intact copy")
    return value
