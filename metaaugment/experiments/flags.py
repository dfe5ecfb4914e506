"""Dataclasses as flags of the command line: how a value is refused, agreed on, and said again."""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any


def flag(name: str) -> str:
    """Of a field."""
    return f"--{name.replace('_', '-')}"


def refuse(name: str, value: object, good: bool, allowed: str) -> None:
    """A ValueError that names the flag of a field, its value and what is allowed, unless the value is good."""
    if not good:
        raise ValueError(f"{flag(name)} is {value!r}; it must be {allowed}")


def one_of(value: str, allowed: Iterable[str], flag: str) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{flag} is {value!r}{hint}; choose one of {', '.join(allowed)}")


def flags(value: Any, default: Any, names: Iterable[str] | None = None) -> list[str]:
    """What is to be said for a dataclass to become this value, where without a word it is the default."""
    words = []
    for name in names if names is not None else (field.name for field in fields(value)):
        now = getattr(value, name)
        if now != getattr(default, name):
            # Switches are said without a value: --flip, --no-flip.
            words += [f"--{'' if now else 'no-'}{flag(name)[2:]}"] if isinstance(now, bool) else [flag(name), str(now)]
    return words


def said(args: Iterable[str]) -> frozenset[str]:
    """The fields whose flags a command has, whatever their values are."""
    names = (arg.split("=")[0].removeprefix("--").removeprefix("no-") for arg in args if arg.startswith("--"))
    return frozenset(name.replace("-", "_") for name in names)


def check_agreement(folder: Path, asked: Any, default: Any, recorded: Any, said: Collection[str] = frozenset()) -> None:
    """Refuse settings, a dataclass, that were asked for and are others than those that a folder was begun with.

    What is not the default was asked for, and so were the fields that `said` names.
    """
    for name in (field.name for field in fields(asked)):
        wish, found = getattr(asked, name), getattr(recorded, name)
        if (wish != getattr(default, name) or name in said) and wish != found:
            raise ValueError(
                f"{flag(name)} is {_said(wish)}, but {folder} was begun with {_said(found)}; "
                "leave out the flag, or begin another one with --out"
            )


def _said(value: object) -> str:
    return repr(str(value) if isinstance(value, Path) else value)
