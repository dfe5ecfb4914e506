"""Dataclasses as command-line flags: how a value is refused, compared with a recorded one, and turned into flags."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def refuse(name: str, value: object, good: bool, allowed: str) -> None:
    """Raise a ValueError that names the flag of a field, its value and what is allowed, unless the value is good."""
    if not good:
        raise ValueError(f"{flag(name)} is {value!r}; it must be {allowed}")


def one_of(value: str, allowed: Collection[str], flag: str) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} is {choice(value, allowed)}")


def choice(value: str, allowed: Collection[str]) -> str:
    """A value that is not among the allowed ones, and what to choose instead."""
    near = difflib.get_close_matches(value, allowed, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    way = f"; choose one of {', '.join(allowed)}" if allowed else ""
    return f"{value!r}{hint}{way}"


def flags(value: Any, default: Any, names: Iterable[str] | None = None) -> list[str]:
    """The command-line flags that turn the default of a dataclass into this value."""
    names = [field.name for field in fields(value)] if names is None else names
    now = {name: getattr(value, name) for name in names}
    return flags_of({name: set_to for name, set_to in now.items() if set_to != getattr(default, name)})


def flags_of(changes: Mapping[str, Any]) -> list[str]:
    """The command-line flags that set fields, by their names, to these values."""
    words = []
    for name, value in changes.items():
        if isinstance(value, bool):  # a switch takes no value: --flip, --no-flip
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words += [flag(name), str(value)]
    return words


def said(args: Iterable[str]) -> frozenset[str]:
    """The fields whose flags are on a command line, whatever their values."""
    names = (arg.split("=")[0].removeprefix("--").removeprefix("no-") for arg in args if arg.startswith("--"))
    return frozenset(name.replace("-", "_") for name in names)


def check_agreement(folder: Path, asked: Any, default: Any, recorded: Any, said: Collection[str] = frozenset()) -> None:
    """Refuse settings (a dataclass) that were asked for and differ from those that a folder was begun with.

    A value was asked for if it is not the default, or if `said` names its field.
    """
    for name in (field.name for field in fields(asked)):
        wish, found = getattr(asked, name), getattr(recorded, name)
        if (wish != getattr(default, name) or name in said) and wish != found:
            raise ValueError(
                f"{flag(name)} is {_said(wish)}, but {folder} was begun with {_said(found)}; "
                "leave out the flag, or begin anew in another folder with --out"
            )


def _said(value: object) -> str:
    return repr(str(value) if isinstance(value, Path) else value)
