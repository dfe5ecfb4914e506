"""Data sets by name, which of them are there, and how to get one that is not."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from metaaugment.lab.data import cifar, digits, folder, omniglot
from metaaugment.lab.data.data_set import DataSet
from metaaugment.lab.data.depth import find_dim
from metaaugment.lab.data.entry import Entry, Missing, Progress, Refused, Request, data_root, silent
from metaaugment.lab.data.files import AREA_MIN, WHITE, ImageFiles
from metaaugment.lab.data.splits import Split, split
from metaaugment.lab.words import command

DATASETS: dict[str, Entry] = {
    "digits": digits.ENTRY,
    "cifar10": cifar.entry(cifar.CIFAR10),
    "cifar100": cifar.entry(cifar.CIFAR100),
    "omniglot": omniglot.ENTRY,
    "imagenet": folder.IMAGENET,
    "folder": folder.ENTRY,
}


def dataset(
    name: str,
    root: Path | str | None = None,
    *,
    seed: int = 0,
    size: int | None = None,
    per_class: int | None = None,
    held_out: tuple[float, float] | None = None,
    area_min: float = AREA_MIN,
    white: int = WHITE,
    progress: Progress = silent,
) -> DataSet:
    """A data set by its name, read from under `root` (default: $METAAUGMENT_DATA, else ~/.cache/metaaugment).

    `seed` draws the splits; it is not the seed of training. `size`: side of the images in pixels, if it can be chosen.
    `per_class`: number of training images per class, drawn by the seed; a class that has fewer keeps them all, and the
    other splits stay as they are.
    `held_out`: shares of validation and test images, for a folder without such splits.
    `area_min`: of image files (imagenet, folder), the least share of an image's area in the random part that training
    sees; with 1, training and evaluation see the whole image, both sides scaled to the size.
    `white`: of image files, the value that counts as white in grey images of more than 8 bits, such as 4095.
    """
    entry = find(name)
    if root is None and entry.locate is None:
        raise Refused("root", root, f"the data set {name} has no default folder; {entry.how}")
    where, size = data_root(root), entry.size if size is None else size
    if size not in entry.sizes:
        first, last = entry.sizes[0], entry.sizes[-1]
        allowed = f"{first} pixels a side" if first == last else f"{first} to {last} pixels a side"
        raise Refused("size", size, f"images of {entry.title} have {allowed}")
    if held_out is not None and entry.held_out is None:
        raise Refused("held_out", held_out, f"the splits of {entry.title} are fixed, so leave it out")
    if not 0 < area_min <= 1:
        raise Refused("area_min", area_min, "it must be above 0, and at most 1")
    if not 1 <= white <= WHITE:
        raise Refused("white", white, f"it must be 1 to {WHITE}")
    try:
        read = entry.read(Request(where, seed, size, held_out or entry.held_out or (0, 0), progress))
    except Missing as missing:
        state = "not complete" if missing.incomplete else "not there"
        raise ValueError(f"{entry.title} is {state}: {missing}; {way_out(name, where, missing)}") from None
    train, note = read.train, read.note
    if per_class is not None:
        train = fewer(train, len(read.classes), per_class, seed)
        at_most = "" if len(train) == per_class * len(read.classes) else "at most "
        note = f"{note}; {at_most}{per_class} training images of each class kept"
    parts = train, val, test = [
        replace(part, area_min=area_min, white=white) if isinstance(part, ImageFiles) else part
        for part in (train, read.val, read.test)
    ]
    dim = find_dim([part for part in parts if isinstance(part, ImageFiles)], white)
    mean, std = train.statistics()
    # A constant channel becomes zero instead of being divided by zero.
    std = tuple(value or 1.0 for value in std)
    if dim is not None:
        note = f"{note}; {dim.note}"
    return DataSet(name, train, val, test, read.classes, mean, std, entry.fill(mean), note, dim)


def find(name: str) -> Entry:
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(DATASETS)}")
    return DATASETS[name]


def way_out(name: str, root: Path, missing: Missing) -> str:
    """What to do about data that are missing."""
    if not DATASETS[name].archives:
        return DATASETS[name].how.format(root=shlex.quote(str(root)))
    how = command("data", "get", name, data=root)
    return f"move {missing.where} away and get it again: {how}" if missing.incomplete else f"get it: {how}"


def fewer(train: Split, num_classes: int, per_class: int, seed: int) -> Split:
    """`per_class` training images of each class, or all of a class that has fewer; a larger number keeps the images of
    a smaller one, and adds to them."""
    sizes = train.labels.bincount(minlength=num_classes).tolist()
    if not 1 <= per_class <= max(sizes):
        raise Refused("per_class", per_class, f"it must be 1 to {max(sizes)}, the size of the largest class")
    chosen, _ = split(train.labels, seed, [min(per_class, size) for size in sizes])
    return train.take(chosen)


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
