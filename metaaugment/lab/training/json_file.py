"""Files of one JSON object, or of one a line, and the numbers in them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from metaaugment.files.atomic import write_atomically
from metaaugment.files.sealed import Damaged

MAX_NUMBER = 1e100


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
