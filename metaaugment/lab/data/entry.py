"""What is known of a data set before it is read: each reader file ends with its entry, and the catalog lists them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metaaugment.lab.data.splits import Splits

# Told of a long piece of work: what is under way, how much of it is done, and how much there is (None: not known).
Progress = Callable[[str, int, int | None], None]


def silent(what: str, done: int, total: int | None) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Request:
    """What is asked of a reader: the seed of the splits, the side of the images, the shares held out."""

    root: Path
    seed: int
    size: int
    held_out: tuple[float, float]
    progress: Progress


@dataclass(frozen=True)
class Archive:
    """An official archive: its address, its published MD5, and what it unpacks to, under the data folder."""

    url: str
    md5: str
    unpacks_to: str
    # Refused if larger: a little above what the archive is known to hold.
    max_bytes: int


@dataclass(frozen=True)
class Reduced:
    """How a search makes do with less: so many training images of each class, and the network published for it."""

    per_class: int
    network: str | None = None


def mean_color(mean: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(255 * value) for value in mean)


def black(mean: Sequence[float]) -> tuple[int, ...]:
    """The background of drawings."""
    return (0,) * len(mean)


@dataclass(frozen=True)
class Entry:
    """A data set that can be asked for by name.

    `locate` finds it under a root, or raises `Missing`; without it, the images are a user's own, in a folder that has
    to be named. `sizes`: the sides in pixels that can be chosen, `size` the default. `archives`: how it can be fetched;
    without any, `how` says how to get it, into a folder {root}. `held_out`: the default shares of validation and test
    images, if they can be chosen. `in_files`: whether its images stay in files, of which parts are seen, instead of in
    memory. `embedded`: whether an installed package holds it, and no folder. `fixed_test`: whether its test images are
    the same for all seeds of the splits. `top5`: whether it is also judged by the five likeliest classes. `like`: the
    data whose published policies fit it best; digits and characters are nearest to SVHN's house numbers. `searched`:
    what the searches that reduce it, by their systems, train on.
    """

    title: str
    read: Callable[[Request], Splits]
    locate: Callable[[Path], Path] | None
    size: int
    sizes: range
    how: str = ""
    held_out: tuple[float, float] | None = None
    fill: Callable[[Sequence[float]], tuple[int, ...]] = mean_color
    archives: tuple[Archive, ...] = ()
    in_files: bool = False
    embedded: bool = False
    fixed_test: bool = False
    top5: bool = False
    like: str = "cifar10"
    searched: Mapping[str, Reduced] = field(default_factory=dict)
