"""Commands as typed functions: which one is meant, and what is wrong with the words it is called with, in one sentence.

tyro reads the words; what it prints about a mistake is a box of many lines, so we look for the mistake ourselves.
"""

import inspect
import io
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, Suppress
from tyro.extras import SubcommandApp

from metaaugment.lab.experiments.flags import choice, flag

Command = Callable[..., Any]
HELP = {"-h", "--help"}
KINDS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}


@dataclass(frozen=True)
class Group:
    """Commands to choose from by name; `what` says what such a name is."""

    what: str
    help: str
    commands: Mapping[str, "Group | Command"]

    def app(self) -> SubcommandApp:
        app = SubcommandApp()
        for name, command in self.commands.items():
            if isinstance(command, Group):
                app.command(command.app(), name=name, help=command.help)
            else:
                app.command(name=name)(_put_off(command))
        return app


def understood(group: Group, prog: str, args: Sequence[str], console_outputs: bool) -> Callable[[], Any]:
    """The call that is asked for; a mistake raises a ValueError, and a wish for help ends the process."""
    command, words, path = (None, [], prog) if HELP & set(args) else _named(group, prog, args)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return group.app().cli(prog=prog, description=group.help, args=args, console_outputs=console_outputs)
    except SystemExit as end:
        if not end.code:
            raise
    found = command and mistake(command, path.removeprefix(f"{prog} "), words)
    # Whatever else tyro refuses, we pass on without the box around it.
    raise ValueError(f"{found or ' '.join(re.sub('[─-╿]', ' ', printed.getvalue()).split())}; see {path} --help")


def _put_off(command: Command) -> Command:
    """The same command, which returns its call: reading the words ends before anything is done."""

    @wraps(command)
    def later(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return partial(command, *args, **kwargs)

    return later


def _named(group: Group, prog: str, args: Sequence[str]) -> tuple[Command, list[str], str]:
    """The command that is named, the words after its name, and all of its name."""
    named, words = group, deque(args)
    while isinstance(named, Group):
        way = f"choose one of {', '.join(named.commands)}; see {prog} --help"
        if not words:
            raise ValueError(f"no {named.what} is named; {way}")
        word = words.popleft()
        if word.startswith("-"):
            raise ValueError(f"a {named.what} is expected before {word}; {way}")
        if word not in named.commands:
            raise ValueError(f"unknown {named.what} {choice(word, named.commands)}; see {prog} --help")
        named, prog = named.commands[word], f"{prog} {word}"
    return named, list(words), prog


def mistake(command: Command, called: str, args: Sequence[str]) -> str | None:
    """The first thing that is wrong with the words after the name that a command is called by, if any."""
    takes, words, given = _arguments(command), deque(args), 0
    while words:
        name, equals, value = words.popleft().partition("=")
        if not _is_flag(name):
            given += 1
            if given > len(takes.required) and not takes.more:
                return f"{called} does not take {name + equals + value!r}"
            continue
        name = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        if name not in takes.flags:
            return f"{called} has no flag {choice(name, takes.flags)}"
        kind = takes.flags[name]
        if kind is bool:
            if equals:
                return f"{name} is a switch and takes no value, but got {value!r}"
            continue
        values, many = [value] if equals else [], get_origin(kind) is tuple
        while words and not _is_flag(words[0]) and (many or not values):
            values.append(words.popleft())
        if not values and not many:
            return f"{name} has no value; {_allowed(kind)}"
        if not all(_fits(value, kind) for value in values):
            return f"{name} is {_refused(' '.join(values), kind)}"
    if missing := takes.required[given:]:
        return f"{called} needs {' and '.join(missing)}"
    return None


class Arguments(NamedTuple):
    """What a command takes: flags with the types of their values, words that it requires, and whether any more."""

    flags: dict[str, Any]
    required: list[str]
    more: bool


def _arguments(command: Command) -> Arguments:
    flags, required, more = {}, [], False
    for name, parameter in inspect.signature(command).parameters.items():
        kind, notes = _plain(parameter.annotation)
        if is_dataclass(kind):
            hints = {one: _plain(hint) for one, hint in get_type_hints(kind, include_extras=True).items()}
            flags |= {
                field.name: hints[field.name][0] for field in fields(kind) if Suppress not in hints[field.name][1]
            }
        elif Positional not in notes:
            flags[name] = kind
        elif get_origin(kind) is tuple:
            more = True
        else:
            required.append(name.upper())
    switches = {f"--no-{flag(name)[2:]}": bool for name, kind in flags.items() if kind is bool}
    return Arguments({flag(name): kind for name, kind in flags.items()} | switches, required, more)


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _fits(word, float)


def _fits(value: str, kind: Any) -> bool:
    """Whether a word can be read as a type."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return _fits(value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is NoneType:
        return value == "None"
    if kind in KINDS:
        try:
            kind(value)
        except ValueError:
            return False
    return True


def _refused(value: str, kind: Any) -> str:
    names = _names(kind)
    return choice(value, names) if names else f"{value!r}; {_allowed(kind)}"


def _allowed(kind: Any) -> str:
    """What a value of a type must be."""
    if names := _names(kind):
        return f"choose one of {', '.join(names)}"
    one = next((one for one in (kind, *get_args(kind)) if one in KINDS), None)
    if one is None:
        return "give one after it"
    optional = " or None" if NoneType in get_args(kind) else ""
    return f"it must be {KINDS[one][get_origin(kind) is tuple]}{optional}"


def _names(kind: Any) -> list[str]:
    """The values of a type that has a few with names, in the order in which they are declared."""
    literal = next((one for one in (kind, *get_args(kind)) if get_origin(one) is Literal), None)
    return [*get_args(literal), *(["None"] if NoneType in get_args(kind) else [])] if literal else []
