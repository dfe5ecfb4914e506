"""What is known of a data set before it is read, and where it lies.

Each reader file ends with its entry, and the catalog lists them.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Refused(ValueError):
    """A refused argument by its Python name, its value, and what is allowed; a program may name a flag instead."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name, self.value, self.allowed = name, value, allowed

    def __str__(self) -> str:
        return f"{self.name} is {self.value}; {self.allowed}"


class Missing(ValueError):
    """Data that are not where they were looked for, or not all there.

    `where`: the folder that should hold them. `incomplete`: it is there, and something in it is missing or damaged.
    """

    def __init__(self, reason: str, where: Path, incomplete: bool = False) -> None:
        super().__init__(reason)
        self.where = where
        self.incomplete = incomplete


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


# -- where data lie ----------------------------------------------------------------------------------------------------


def data_root(root: Path | str | None) -> Path:
    """The folder of all data sets: the one given, else $METAAUGMENT_DATA, else ~/.cache/metaaugment."""
    return Path(root or os.environ.get("METAAUGMENT_DATA") or "~/.cache/metaaugment").expanduser()


def folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, in order, without those that are hidden."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry) and is_folder(entry))


def is_hidden(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


def is_folder(entry: os.DirEntry[str]) -> bool:
    # os.path follows links, and returns False for one that is broken or circular.
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def find_complete(
    root: Path,
    names: Sequence[str],
    holds: Callable[[Path], bool],
    problems: Callable[[Path], Iterable[str]],
    known_by: tuple[str, str],
) -> Path:
    """The first folder that holds some of the data and has no problems.

    Looks at the folders of the official names under the root, then at the root. Raises `Missing`: if all that hold data
    have problems, for the first problem of the first one; if none holds any, for two paths under the root, by which
    a user knows them.
    """
    incomplete: list[Missing] = []
    for folder in (*(root / name for name in names), root):
        if folder.is_dir() and holds(folder):
            reason = next(iter(problems(folder)), None)
            if reason is None:
                return folder
            incomplete.append(Missing(reason, folder, incomplete=True))
    if incomplete:
        raise incomplete[0]
    one, other = (root / path for path in known_by)
    raise Missing(f"neither {one} nor {other} was found", root / names[0])
