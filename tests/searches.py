"""What tests of searches share: a search that dies or is asked to stop at a moment, and what it has noted."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from endings import Killed


def killed() -> NoReturn:
    raise Killed


def asked_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def dying(
    function: Callable[..., Any], call: int, after: bool = False, die: Callable[[], object] = killed
) -> Callable[..., Any]:
    """The function, but for its n-th call, which dies before it does anything, or after."""
    calls = iter(range(1, sys.maxsize))

    def instead(*arguments: Any, **named: Any) -> Any:
        now = next(calls) == call
        if now and not after:
            die()
        result = function(*arguments, **named)
        if now and after:
            die()
        return result

    return instead


def rows(out: Path) -> list[dict[str, Any]]:
    """Whole rows, without how long they took, which differs from time to time."""
    lines = [line for line in (out / "trials.jsonl").read_text().splitlines() if line.endswith("}")]
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]
