"""Checkpoints: the last one and the one before it, each written whole or not at all."""

import contextlib
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from metaaugment.files import sealed
from metaaugment.guard.faults import first_line, full_memory
from metaaugment.lab.training.folder import RECIPE
from metaaugment.lab.training.json_file import write_json

LAST = "checkpoint.safetensors"
BEFORE = "checkpoint-before.safetensors"
LOOK = "look.safetensors"
# Checkpoints take at most this share of the training time. A network of 36 M parameters takes half a second to write,
# while an epoch of few images takes three.
SHARE = 1 / 20
# Seconds without a checkpoint after which one is written within an epoch: an epoch of ImageNet takes long.
WITHIN = 300.0


class Checkpoints:
    """Writes the checkpoints of a run while training goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[float] | None = None
        self._began = time.monotonic()
        self._saved = -math.inf  # when the last state was copied
        self._took = 0.0  # seconds to copy and write it

    def due(self) -> bool:
        """Whether none is being written, and the last one is long enough ago for what it cost.

        Raises what went wrong with one that could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is None and time.monotonic() - self._saved >= self._took / SHARE

    def overdue(self) -> bool:
        """Whether a kill would now lose so much that a checkpoint should not wait for the end of the epoch."""
        return time.monotonic() - max(self._began, self._saved) >= WITHIN and self.due()

    def save(self, state: Mapping[str, Any]) -> None:
        """Copy a state and have it written in the background; raises what went wrong with the one before."""
        self.wait()
        started = time.monotonic()
        tree, tensors = sealed.copied(state)
        self._saved = time.monotonic()
        self._took = self._saved - started
        self._writing = self._thread.submit(_timed, put, self.folder, tree, tensors)

    def wait(self) -> None:
        """Wait until the last state is on the disk; raises what went wrong if it cannot be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._took += writing.result()

    def settle(self) -> None:
        """Wait until the write under way has ended, without raising if it has failed."""
        if self._writing is not None:
            futures.wait([self._writing])


def _timed(write: Callable[..., None], *what: Any) -> float:
    started = time.monotonic()
    write(*what)
    return time.monotonic() - started


def put(folder: Path, tree: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put a new checkpoint in place; the last one is kept under another name.

    The other files made from the same state are written first: a run that is killed in between writes them again.
    `checkpoint.json` tells people where the run stands; the program never reads it.
    """
    if tree.get("look"):
        sealed.write(folder / LOOK, "look", *sealed.part(tree, tensors, "look"))
    write_json(folder / "checkpoint.json", {k: v for k, v in tree.items() if isinstance(v, str | int | float)})
    last, before = folder / LAST, folder / BEFORE
    if last.exists():
        spare = folder / f".{BEFORE}.part"
        spare.unlink(missing_ok=True)
        try:
            os.link(last, spare)
        except OSError:  # a file system without hard links
            shutil.copyfile(last, spare)
        spare.replace(before)
        spare.unlink(missing_ok=True)  # after a kill both may be links to one file, which replace() leaves as they are
    sealed.write(last, "checkpoint", tree, tensors)


def load(folder: Path) -> dict[str, Any] | None:
    """The last checkpoint of a run; None if it has not written one yet."""
    last = folder / LAST
    if not last.exists():
        if (folder / BEFORE).exists():
            raise sealed.Damaged(last, "is missing", _way_out(folder))
        return None
    try:
        return sealed.load(last, "checkpoint")
    except sealed.Damaged as error:
        raise sealed.Damaged(last, error.reason, _way_out(folder)) from None


def of_run(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a run; refuses a folder that is not a run or has no checkpoint yet."""
    if not (folder / RECIPE).exists():
        raise ValueError(f"{folder} is not a run: it has no {RECIPE}; name the folder that train wrote to")
    state = load(folder)
    if state is None:
        raise ValueError(f"{folder} has no checkpoint yet; wait for its first epoch, or continue it with --resume")
    return state


@contextlib.contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Around the use of a checkpoint: one that does not fit, though its SHA-256 is right, is reported as damaged."""
    try:
        yield
    except sealed.MALFORMED as error:
        if isinstance(error, ValueError) or full_memory(error):
            raise  # a sentence already, or no fault of the checkpoint
        reason = f"does not fit together ({type(error).__name__}: {first_line(error)})"
        raise sealed.Damaged(folder / LAST, reason, _way_out(folder)) from error


def _way_out(folder: Path) -> str:
    before = folder / BEFORE
    with contextlib.suppress(OSError, *sealed.MALFORMED):
        state = sealed.load(before, "checkpoint")
        return (
            f"the checkpoint before it is intact, after epoch {state['epoch']}; "
            f"continue from there with: {shlex.join(['mv', str(before), str(folder / LAST)])}"
        )
    return f"there is no other checkpoint; start the run again in another folder, or remove {folder}"
