"""Data sets by name: how each is read, where it lies, and how to get it."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from metaaugment.lab.data import cifar, digits, folder, omniglot
from metaaugment.lab.data.data_set import DataSet
from metaaugment.lab.data.depth import WrongWhite, find_dim
from metaaugment.lab.data.files import AREA_MIN, WHITE, ImageFiles
from metaaugment.lab.data.layout import Missing, data_root
from metaaugment.lab.data.progress import Progress, silent
from metaaugment.lab.data.splits import Split, Splits, split
from metaaugment.transformation import MAX_SIDE


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
    chosen. `how`: how to get it by its {name}, into a folder {root}. `in_files`: whether its images stay in files, of
    which parts are seen, instead of in memory. `embedded`: whether an installed package holds it, and no folder.
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
    in_files: bool = False
    embedded: bool = False


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
        embedded=True,
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
        in_files=True,
    ),
    "folder": Entry(
        "folder",
        read=lambda ask: folder.read_folder(ask.root, ask.seed, ask.held_out, ask.size),
        locate=None,
        how="name a folder of your own images with --data",
        size=folder.SIZE,
        sizes=range(8, MAX_SIDE + 1),
        held_out=folder.HELD_OUT,
        in_files=True,
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
        raise ValueError(f"the data set {name} has no default folder; {entry.how}")
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
    parts = train, val, test = [seen(part, area_min, white) for part in (train, read.val, read.test)]
    try:
        dim = find_dim([part for part in parts if isinstance(part, ImageFiles)], white)
    except WrongWhite as error:
        raise Refused("white", white, str(error)) from None
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
    how = DATASETS[name].how.format(name=name, root=shlex.quote(str(root)))
    if not DATASETS[name].archives:
        return how
    return f"move {missing.where} away and get it again: {how}" if missing.incomplete else f"get it: {how}"


def seen(part: Split, area_min: float, white: int) -> Split:
    """Image files, to be seen this way; images in memory are as they are."""
    return replace(part, area_min=area_min, white=white) if isinstance(part, ImageFiles) else part


def fewer(train: Split, num_classes: int, per_class: int, seed: int) -> Split:
    """`per_class` training images of each class, or all of a class that has fewer; a larger number keeps the images of
    a smaller one, and adds to them."""
    sizes = train.labels.bincount(minlength=num_classes).tolist()
    if not 1 <= per_class <= max(sizes):
        raise Refused("per_class", per_class, f"it must be 1 to {max(sizes)}, the size of the largest class")
    chosen, _ = split(train.labels, seed, [min(per_class, size) for size in sizes])
    return train.take(chosen)
