"""Counts, durations, names and commands as people read them."""

import shlex
from collections.abc import Iterable, Sequence


def number_of(noun: str, number: int) -> str:
    """A count and its noun: 1 epoch, 2 epochs."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """As people say it: 48 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def some(names: Sequence[object]) -> str:
    """The first three, and how many more there are: cat, dog, horse and 7 more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


def series(names: Iterable[str], last: str) -> str:
    """All of them, such as: cat, dog or horse; `last` is the word before the last."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def printable(name: object) -> str:
    """A name that a page can hold, even that of a file whose name is not valid Unicode."""
    return str(name).encode("utf-8", "replace").decode()


def command(*words: str, **settings: object) -> str:
    """A command of the program, with these settings as its flags, as a shell takes it."""
    flags = (word for name, value in settings.items() for word in (f"--{name}", str(value)))
    return shlex.join(["metaaugment", *words, *flags])
