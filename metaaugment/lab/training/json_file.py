"""Files of one JSON object, or of one a line; the numbers in them, and what they hold as dataclasses."""

import json
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from reprlib import repr as shortened
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from metaaugment.files.atomic import write_atomically
from metaaugment.files.sealed import Damaged

MAX_NUMBER = 1e100
T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """Bounds of a number, beside its type: `Annotated[float, Within(0, 1)]`."""

    low: float
    high: float


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    write_atomically(file, lambda part: part.write_text(json.dumps(value, indent=2) + "\n"))


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(file, f"it holds a {type(value).__name__}, not an object")
    return value


def damaged(file: Path, reason: str) -> Damaged:
    """The error for a file that nothing but a copy of it can replace."""
    return Damaged(file, f"is damaged: {reason}", "restore an intact copy")


def row_of(line: str) -> dict[str, Any] | None:
    """The object that a line holds; None if it was left half written by a killed process, or is anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number to compute with and draw; whole numbers in JSON can be of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def read_as(kind: type[T], file: Path) -> T:
    """What a file holds, as a dataclass; one that is damaged is refused by its name and that of the field."""
    values = read_json(file)
    try:
        return typed(kind, values)
    except ValueError as error:
        raise damaged(file, f"its {error}") from None


def typed(kind: type[T], values: Mapping[str, Any], always: Collection[str] = (), within: str = "") -> T:
    """A dataclass from JSON values, by the types of its fields; what else there is among the values is left out.

    Args:
        always: fields that have a default, but have been written at all times.

    Raises:
        ValueError: with words such as "field 'epoch' is -1, which is not a valid value".
    """
    hints, found = get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):  # type: ignore[arg-type]
        name = within + field.name
        if field.name in values:
            found[field.name] = _as(hints[field.name], values[field.name], name)
        elif field.name in always or (field.default is MISSING and field.default_factory is MISSING):
            raise ValueError(f"field {name!r} is missing")
    return kind(**found)


def fits(value: object, kind: Any) -> bool:
    """Whether a JSON value can be of this type."""
    with suppress(ValueError):
        _as(kind, value, "")
        return True
    return False


def _as(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as a type: one of JSON's, a path, or whatever dictionaries, lists and dataclasses make of these."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is Any or (outer is Literal and value in inner) or (value is None and kind is type(None)):
        return value
    if outer is Annotated:
        found = _as(inner[0], value, name)
        if found is None or all(note.low <= found <= note.high for note in inner[1:] if isinstance(note, Within)):
            return found
    elif outer in (Union, UnionType):
        for one in inner:
            with suppress(ValueError):
                return _as(one, value, name)
    elif is_dataclass(outer) and isinstance(value, dict):
        return typed(outer, value, within=f"{name}.")  # type: ignore[arg-type]
    elif outer is dict and inner and isinstance(value, dict):
        if inner[0] is not int or all(str(key).isdecimal() for key in value):  # in JSON, they are text
            return {inner[0](key): _as(inner[1], one, f"{name}.{key}") for key, one in value.items()}
    elif outer in (list, tuple) and inner and isinstance(value, list):
        return outer(_as(inner[0], one, f"{name}.{place}") for place, one in enumerate(value))
    elif outer is float:
        if isinstance(value, int | float) and type(value) is not bool and abs(value) <= sys.float_info.max:
            return float(value)
    elif outer is Path and isinstance(value, str):
        return Path(value)
    elif type(value) is outer:
        return value
    raise ValueError(f"field {name!r} is {shortened(value)}, which is not a valid value")
