"""How a run ends, also by being killed, and whether two runs come to the same end: bit for bit, except for clocks.

The commit is excepted too: it changes during a test when somebody works on the code meanwhile.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from metaaugment.files import sealed
from metaaugment.lab.experiments import run
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.interruption import Interrupted
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.trainer import Trainer, Watcher

TIMES = ("seconds", "images_per_second", "commit")


class Killed(BaseException):
    """As sudden as SIGKILL: nothing catches it on the way."""


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in TIMES}


def rows(out: Path) -> list[Row]:
    """The log without its times."""
    return [timeless(json.loads(line)) for line in (out / "log.jsonl").read_text().splitlines()]


def final(out: Path) -> dict[str, Any]:
    state = sealed.load(out / checkpoint.LAST, "checkpoint")
    return {key: value for key, value in timeless(state).items() if key not in ("identity", "log")}


def same(one: Any, other: Any) -> bool:
    """Trees alike in structure, types and every bit of every tensor."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.contiguous().numpy(force=True).tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Compare two trees of values, bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for place, (mine, yours) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, yours, f"{path}/{place}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, path


def assert_same_end(one: Path, other: Path) -> None:
    """Two runs have the same log, but for its times, and the same last checkpoint."""
    assert rows(one) == rows(other)
    assert_same(final(one), final(other))


class Stop(Watcher):
    """Sends this process a signal after a number of steps."""

    def __init__(self, after: int, signum: int = signal.SIGTERM) -> None:
        self.left, self.signum = after, signum

    def stepped(self, trainer: Trainer) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.signum)


@contextmanager
def stopping(after: int, signum: int = signal.SIGTERM) -> Iterator[None]:
    """A context in which a run is stopped by a signal after so many steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Lines", lambda console: Stop(after, signum))
        with pytest.raises(Interrupted):
            yield
