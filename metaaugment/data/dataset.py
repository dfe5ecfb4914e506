"""Data sets by name: three splits, the names of the classes, and what images are normalized and filled with."""

import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from metaaugment.data import cifar, digits, folder, omniglot
from metaaugment.data.layout import Missing, data_root
from metaaugment.data.progress import Progress, silent
from metaaugment.data.splits import Split, Splits, apportion, portion, split
from metaaugment.transformation import MAX_SIDE

STAND_IN = "stand in for the test images, which are not looked at"


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training, validation and test images.

    `mean`, `std`: of each channel, for values in 0..1. `fill`: the color of what geometry uncovers, 0..255.
    `note`: what a user should know, such as how it was split.
    """

    name: str
    train: Split
    val: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fill: tuple[int, ...]
    note: str = ""

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def channels(self) -> int:
        return len(self.mean)

    def rehearsal(self, share: float, seed: int, of: str = "validation") -> "DataSet":
        """The same without its test images: a share of the validation or training images, drawn class by class, stands
        in for them.

        A class with a single validation image is held back or left as a whole: the seed draws as many of these classes
        as bring the share to its size. Of the training images of a class, at least one is always left.
        """
        return self._training_rehearsed(share, seed) if of == "training" else self._validation_rehearsed(share, seed)

    def _training_rehearsed(self, share: float, seed: int) -> "DataSet":
        sizes = torch.bincount(self.train.labels, minlength=self.num_classes).tolist()
        shares = apportion(round(share * sum(sizes)), sizes)
        counts = [min(count, max(size - 1, 0)) for count, size in zip(shares, sizes, strict=True)]
        if not sum(counts):
            raise ValueError(
                f"--held-back is {share:g}, which is none of the {len(self.train)} training images; choose a larger "
                "share"
            )
        held_back, left = split(self.train.labels, seed, counts)
        note = f"{len(held_back):,} training images {STAND_IN}"
        return replace(self, train=self.train.take(left), test=self.train.take(held_back), note=f"{self.note}; {note}")

    def _validation_rehearsed(self, share: float, seed: int) -> "DataSet":
        sizes = torch.bincount(self.val.labels, minlength=self.num_classes).tolist()
        counts = portion(share, sizes, seed)
        for name, size, count in zip(self.classes, sizes, counts, strict=True):
            if size > 1 and not 0 < count < size:
                raise ValueError(
                    f"--held-back is {share:g}, which does not split the {size} validation images of class {name}: "
                    "both parts need at least one; choose a share closer to 0.5, or hold out more"
                )
        if not 0 < sum(counts) < len(self.val):
            raise ValueError(
                f"--held-back is {share:g}, which does not split the {len(self.val)} validation images: both parts "
                "need at least one; choose a share closer to 0.5, or hold out more"
            )
        held_back, left = split(self.val.labels, seed, counts)
        note = f"{len(held_back):,} validation images {STAND_IN}"
        return replace(self, val=self.val.take(left), test=self.val.take(held_back), note=f"{self.note}; {note}")

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any image, label or order (files: with any name or size)."""
        sha = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for part in (self.train, self.val, self.test):
            sha.update(part.digest())
        return sha.hexdigest()[:16]


@dataclass(frozen=True)
class Request:
    """What is asked of a reader: the seed of the splits, the side of the images, the shares held out."""

    root: Path
    seed: int
    size: int
    held_out: tuple[float, float]
    progress: Progress


class Refused(ValueError):
    """A refused argument of `dataset`, its value, and what is allowed; a program may name its own flag instead."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name, self.value, self.allowed = name, value, allowed

    def __str__(self) -> str:
        return f"{self.name} is {self.value}; {self.allowed}"


def mean_color(mean: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(255 * value) for value in mean)


def black(mean: Sequence[float]) -> tuple[int, ...]:
    """The background of drawings."""
    return (0,) * len(mean)


@dataclass(frozen=True)
class Archive:
    """An official archive: its address, its published MD5, and what it unpacks to, under the data folder."""

    url: str
    md5: str
    unpacks_to: str
    # Refused if larger: a little above what the archive is known to hold.
    max_bytes: int


@dataclass(frozen=True)
class Entry:
    """A data set that can be asked for by name.

    `locate` finds it under a root, or raises `Missing` (None: it has no place of its own). `sizes`: the sides in pixels
    that can be chosen, `size` the default. `held_out`: the default shares of validation and test images, if they can be
    chosen. `how`: how to get it by its {name}, into a folder {root}.
    """

    title: str
    read: Callable[[Request], Splits]
    locate: Callable[[Path], Path] | None
    how: str
    size: int
    sizes: range
    held_out: tuple[float, float] | None = None
    fill: Callable[[Sequence[float]], tuple[int, ...]] = mean_color
    archives: tuple[Archive, ...] = ()


TORONTO = "https://www.cs.toronto.edu/~kriz"
LAKE = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
GET = "metaaugment data get {name} --data {root}"


def of_cifar(layout: cifar.Layout, file: str, md5: str) -> Entry:
    """The entry of CIFAR-10 or CIFAR-100, whose binary version is this file."""
    return Entry(
        layout.title,
        read=lambda ask: cifar.read(layout, ask.root, ask.seed),
        locate=lambda root: cifar.locate(layout, root),
        how=GET,
        size=32,
        sizes=range(32, 33),
        archives=(Archive(f"{TORONTO}/{file}", md5, layout.binary, max_bytes=200_000_000),),
    )


DATASETS: dict[str, Entry] = {
    "digits": Entry(
        "digits",
        read=lambda ask: digits.read(ask.seed, ask.size),
        locate=lambda root: digits.locate(),
        how="nothing to do: it comes with scikit-learn",
        size=digits.SIZE,
        sizes=range(8, 65),
        fill=black,
    ),
    "cifar10": of_cifar(cifar.CIFAR10, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": of_cifar(cifar.CIFAR100, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    "omniglot": Entry(
        "Omniglot",
        read=lambda ask: omniglot.read(omniglot.OMNIGLOT, ask.root, ask.seed, ask.size, ask.progress),
        locate=lambda root: omniglot.locate(omniglot.OMNIGLOT, root),
        how=GET,
        size=omniglot.SIZE,
        sizes=range(8, 106),
        fill=black,
        archives=(
            Archive(
                f"{LAKE}/images_background.zip",
                md5="68d2efa1b9178cc56df9314c21c6e718",
                unpacks_to="omniglot/images_background",
                max_bytes=100_000_000,
            ),
            Archive(
                f"{LAKE}/images_evaluation.zip",
                md5="6b91aef0f799c5bb55b94e3f2daec811",
                unpacks_to="omniglot/images_evaluation",
                max_bytes=100_000_000,
            ),
        ),
    ),
    "imagenet": Entry(
        "ImageNet",
        read=lambda ask: folder.read_imagenet(ask.root, ask.seed, ask.held_out, ask.size),
        locate=folder.locate_whole_imagenet,
        how="register at https://image-net.org/download, and unpack the training and validation images of ILSVRC2012 "
        "to {root}/imagenet/train and {root}/imagenet/val, with a folder for each class in both",
        size=folder.SIZE,
        sizes=range(8, MAX_SIDE + 1),
        held_out=folder.IMAGENET_HELD_OUT,
    ),
    "folder": Entry(
        "folder",
        read=lambda ask: folder.read_folder(ask.root, ask.seed, ask.held_out, ask.size),
        locate=None,
        how="name a folder of your own images with --data",
        size=folder.SIZE,
        sizes=range(8, MAX_SIDE + 1),
        held_out=folder.HELD_OUT,
    ),
}


def dataset(
    name: str,
    root: Path | str | None = None,
    *,
    seed: int = 0,
    size: int | None = None,
    per_class: int | None = None,
    held_out: tuple[float, float] | None = None,
    progress: Progress = silent,
) -> DataSet:
    """A data set by its name, read from under `root` (default: $METAAUGMENT_DATA, else ~/.cache/metaaugment).

    `seed` draws the splits; it is not the seed of training. `size`: side of the images in pixels, if it can be chosen.
    `per_class`: number of training images per class, drawn by the seed; a class that has fewer keeps them all, and the
    other splits stay as they are.
    `held_out`: shares of validation and test images, for a folder without such splits.
    """
    entry = find(name)
    if root is None and entry.locate is None:
        raise ValueError(f"the data set {name} has no default folder; {entry.how}")
    where, size = data_root(root), entry.size if size is None else size
    if size not in entry.sizes:
        first, last = entry.sizes[0], entry.sizes[-1]
        allowed = f"{first} pixels a side" if first == last else f"{first} to {last} pixels a side"
        raise Refused("size", size, f"images of {entry.title} have {allowed}")
    if held_out is not None and entry.held_out is None:
        raise Refused("held_out", held_out, f"the splits of {entry.title} are fixed, so leave it out")
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
    mean, std = train.statistics()
    # A constant channel becomes zero instead of being divided by zero.
    std = tuple(value or 1.0 for value in std)
    return DataSet(name, train, read.val, read.test, read.classes, mean, std, entry.fill(mean), note)


def find(name: str) -> Entry:
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(DATASETS)}")
    return DATASETS[name]


def way_out(name: str, root: Path, missing: Missing) -> str:
    """What to do about data that are missing."""
    how = DATASETS[name].how.format(name=name, root=shlex.quote(str(root)))
    if not DATASETS[name].archives:
        return how
    return f"move {missing.where} away and get it again: {how}" if missing.incomplete else f"get it: {how}"


def fewer(train: Split, num_classes: int, per_class: int, seed: int) -> Split:
    """`per_class` training images of each class, or all of a class that has fewer; a larger number keeps the images of
    a smaller one, and adds to them."""
    sizes = train.labels.bincount(minlength=num_classes).tolist()
    if not 1 <= per_class <= max(sizes):
        raise Refused("per_class", per_class, f"it must be 1 to {max(sizes)}, the size of the largest class")
    chosen, _ = split(train.labels, seed, [min(per_class, size) for size in sizes])
    return train.take(chosen)
