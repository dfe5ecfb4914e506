"""The folder of a run: what lies in it, and who may write to it."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaaugment.files.lock import FileLock, is_held

RECIPE, RESULT, DIAGNOSIS, LOCK = "recipe.json", "result.json", "diagnosis.json", ".lock"  # of a run
SEARCH, TRIALS, POLICY = "search.json", "trials.jsonl", "policy.json"  # of a search
PLACE = "place.json"  # of both
UNREADABLE = "unreadable.txt"  # of a run that skipped files
# What may be there before the recipe is.
BEGINNINGS = (LOCK, PLACE, *(f".{name}.part" for name in (PLACE, RECIPE, SEARCH)))


def new(folder: Path, what: str = "run") -> None:
    """Make the folder of a new run; one that exists is refused, unless its run died before it began."""
    if folder.exists() and (not folder.is_dir() or any(file.name not in BEGINNINGS for file in folder.iterdir())):
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file; choose a folder for the {what} with --out")
        raise ValueError(
            f"{folder} exists already; continue its {what} with --resume {shlex.quote(str(folder))}, or choose another "
            "folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)


def give_up(folder: Path, first: str) -> bool:
    """If a run has left nothing but its first files, remove them, so that its folder can be named again.

    Returns whether it has.
    """
    events = list(folder.glob("events.out.tfevents.*"))  # TensorBoard's, which begin before the first step
    nothing = set(folder.iterdir()) <= {folder / first, folder / PLACE, folder / LOCK, *events}
    if nothing:
        for file in (folder / first, folder / PLACE, *events):
            file.unlink(missing_ok=True)
    return nothing


MOMENT = 0.2  # seconds; asking whether a folder is locked takes less


@contextmanager
def locked(folder: Path, by: str = "", patience: float = MOMENT) -> Iterator[None]:
    """Lock a folder, so that nobody else trains into it; a process that dies releases its lock.

    Args:
        by: name of the holder, for `last_locked`.
        patience: seconds to wait for a process that may be dying, or that only asks whether the folder `is_locked`.
    """
    lock = FileLock(folder / LOCK, patience)
    if not lock.acquire():
        raise ValueError(f"another process is training into {folder}; wait for it, or choose another --out")
    try:
        lock.note(by)
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process trains into a folder; asking leaves no trace there."""
    return is_held(folder / LOCK)


def last_locked(folder: Path) -> str | None:
    """Who trains into a folder, or was the last to; None if nobody has."""
    lock = folder / LOCK
    return lock.read_text() if lock.exists() else None


def accuracy_key(result: Mapping[str, Any]) -> str:
    """The key of a run's accuracy: on the test images, or on images that were held back."""
    return "held_back_accuracy" if "held_back_accuracy" in result else "test_accuracy"
