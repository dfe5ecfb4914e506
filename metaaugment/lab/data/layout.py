"""Where data sets lie on disk."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


class Missing(ValueError):
    """Data that are not where they were looked for, or not all there.

    `where`: the folder that should hold them. `incomplete`: it is there, and something in it is missing or damaged.
    """

    def __init__(self, reason: str, where: Path, incomplete: bool = False) -> None:
        super().__init__(reason)
        self.where = where
        self.incomplete = incomplete


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
    problems: Callable[[Path], Iterator[str]],
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
            reason = next(problems(folder), None)
            if reason is None:
                return folder
            incomplete.append(Missing(reason, folder, incomplete=True))
    if incomplete:
        raise incomplete[0]
    one, other = (root / path for path in known_by)
    raise Missing(f"neither {one} nor {other} was found", root / names[0])
