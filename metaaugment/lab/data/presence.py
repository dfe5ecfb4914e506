"""Which data sets are there."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from metaaugment.lab.data.catalog import DATASETS, way_out
from metaaugment.lab.data.layout import Missing, data_root


@dataclass(frozen=True)
class Status:
    """A data set, the folder where it is or should be, its state, and how to get it (empty: it is there).

    `state` is "complete", "missing", or "incomplete: " and what is wrong.
    """

    name: str
    where: Path
    state: str
    how: str


def status(root: Path | str | None = None) -> list[Status]:
    """All data sets that have a place of their own, judged by sizes and numbers of files: no image is read."""
    return [_status(name, data_root(root)) for name, entry in DATASETS.items() if entry.locate is not None]


def check_there(names: Iterable[str], root: Path | str | None = None) -> None:
    """Refuse data sets that cannot be read from there, all in one sentence, without reading an image.

    Some of ImageNet's classes are enough to train on; what comes in archives must be complete.
    """
    found = [_status(name, data_root(root)) for name in dict.fromkeys(names) if DATASETS[name].locate is not None]
    absent = [
        f"{one.name} is {one.state} ({one.where}; {one.how})"
        for one in found
        if one.state == "missing" or (one.how and DATASETS[one.name].archives)
    ]
    if absent:
        raise ValueError(f"not all data are there: {', '.join(absent)}")


def _status(name: str, root: Path) -> Status:
    locate = DATASETS[name].locate
    assert locate is not None
    try:
        return Status(name, locate(root), "complete", "")
    except Missing as missing:
        state = f"incomplete: {missing}" if missing.incomplete else "missing"
        return Status(name, missing.where, state, way_out(name, root, missing))
