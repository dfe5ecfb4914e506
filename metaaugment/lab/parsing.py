"""Which command is meant, and what is wrong with the words it is called with, in one sentence.

tyro reads the words of a command, by the types of its arguments, and writes all help. What it prints about a mistake is
a box of many lines, which it promises no way to change: so when it has refused, we look for the mistake ourselves.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, Suppress
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
from tyro.extras import subcommand_cli_from_dict

from metaaugment.lab.experiments.flags import choice, flag

Command = Callable[..., Any]
HELP = {"-h", "--help"}


@dataclass(frozen=True)
class Group:
    """Commands to choose from by name, made when they are needed; `what` says what such a name is."""

    what: str
    help: str
    commands: Callable[[], Mapping[str, "Group | Command"]]


def understood(group: Group, prog: str, args: Sequence[str], console_outputs: bool) -> Callable[[], Any]:
    """The call that is asked for; a mistake raises a ValueError, and a wish for help ends the process."""
    named, words, called = group, list(args), prog
    while isinstance(named, Group):
        commands = named.commands()
        if HELP & set(words[:1]):
            entries = {name: _entry(command) for name, command in commands.items()}
            subcommand_cli_from_dict(
                entries, prog=called, description=named.help, args=["--help"], console_outputs=console_outputs
            )
        named = _chosen(named.what, commands, words, called)
        called = f"{called} {words.pop(0)}"
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(_put_off(named), prog=called, args=words, console_outputs=console_outputs)
    except SystemExit as end:
        if not end.code:
            raise
    found = mistake(named, called.removeprefix(f"{prog} "), words)
    # A mistake that we do not find, we pass on without the box around it.
    raise ValueError(f"{found or ' '.join(re.sub('[─-╿]', ' ', printed.getvalue()).split())}; see {called} --help")


def _chosen(what: str, commands: Mapping[str, Group | Command], words: Sequence[str], called: str) -> Group | Command:
    """The command that the first word names."""
    way = f"choose one of {', '.join(commands)}; see {called} --help"
    if not words:
        raise ValueError(f"no {what} is named; {way}")
    if words[0].startswith("-"):
        raise ValueError(f"a {what} is expected before {words[0]}; {way}")
    if words[0] not in commands:
        raise ValueError(f"unknown {what} {choice(words[0], commands)}; see {called} --help")
    return commands[words[0]]


def _entry(command: Group | Command) -> Command:
    """What stands for a command in the list of its group: its help alone."""

    def entry() -> None: ...

    entry.__doc__ = command.help if isinstance(command, Group) else command.__doc__
    return entry


def _put_off(command: Command) -> Command:
    """The same command, which returns its call: reading the words ends before anything is done."""

    @wraps(command)
    def later(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return partial(command, *args, **kwargs)

    return later


def mistake(command: Command, called: str, words: Sequence[str]) -> str | None:
    """What is wrong with the words after the name that a command is called by, if we find it."""
    taken = dict(_taken(command))
    flags = [name for name in taken if _is_flag(name)]
    places = [name for name in taken if not _is_flag(name)]
    loose, given = [], []  # words without a flag; flags, each with the words behind it
    for word in words:
        if _is_flag(word):
            name, equals, value = word.partition("=")
            given.append((name, equals, [value] if equals else []))
        else:
            (given[-1][2] if given else loose).append(word)
    for name, equals, behind in given:
        name = flag(name[2:]) if name.startswith("--") else name
        if name not in flags:
            return f"{called} has no flag {choice(name, flags)}"
        kind = taken[name]
        if kind is bool and equals:
            return f"{name} is a switch and takes no value, but got {behind[0]!r}"
        number = 0 if kind is bool else len(behind) if get_origin(kind) is tuple else 1
        values, loose = behind[:number], loose + behind[number:]
        if number and not values:
            return f"{name} has no value; {_allowed(kind) or 'give one after it'}"
        if number and not _fits(values, kind):
            value, names = " ".join(values), _names(kind)
            return f"{name} is {choice(value, names) if names else f'{value!r}; {_allowed(kind)}'}"
    required = [name for name in places if get_origin(taken[name]) is not tuple]
    if missing := required[len(loose) :]:
        return f"{called} needs {' and '.join(missing)}"
    if len(loose) > len(required) == len(places):
        return f"{called} does not take {loose[len(required)]!r}"
    return None


def _taken(command: Any) -> Iterator[tuple[str, Any]]:
    """What a command takes, with types: --flags, those of its dataclasses too, and NAMES of words that have no flag."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(kind):
            yield from _taken(kind)
        elif Positional in notes:
            yield name.upper(), kind
        elif name != "return" and Suppress not in notes:
            yield flag(name), kind
            if kind is bool:
                yield f"--no-{flag(name)[2:]}", kind


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _fits([word], float)


def _spec(kind: Any) -> PrimitiveConstructorSpec[Any]:
    """How tyro reads a type."""
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    assert isinstance(spec, PrimitiveConstructorSpec)
    return spec


def _fits(values: Sequence[str], kind: Any) -> bool:
    try:
        _spec(kind).instance_from_str(list(values))
    except ValueError:
        return False
    return True


def _names(kind: Any) -> list[str]:
    """The values of a type that has a few with names."""
    return sorted(_spec(kind).choices or (), key=str.lower)


def _allowed(kind: Any) -> str:
    """What a value of a type must be, unless all are good."""
    if names := _names(kind):
        return f"choose one of {', '.join(names)}"
    parts = get_args(kind) or (kind,)
    noun = "whole number" if int in parts else "number"
    if not {int, float} & set(parts):
        return ""
    number = f"{noun}s" if get_origin(kind) is tuple else f"a {noun}"
    return f"it must be {number}{' or None' if NoneType in parts else ''}"
