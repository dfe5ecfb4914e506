"""What a search has written down, read again: what is damaged, or of something else, is refused by the file's name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaaugment.files.sealed import MALFORMED, Damaged
from metaaugment.guard.faults import first_line
from metaaugment.lab.experiments.recipe import fits
from metaaugment.lab.training.log import Row

WAY_OUT = "restore an intact copy of it, or begin another search with --out"


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Around the reading of a file: whatever is wrong with its content is reported in one sentence."""
    try:
        yield
    except Damaged as error:
        raise Damaged(file, error.reason, WAY_OUT) from None
    except KeyError as error:
        raise Damaged(file, f"cannot be understood: {error} is missing", WAY_OUT) from error
    except MALFORMED as error:
        raise Damaged(file, f"cannot be understood: {first_line(error)}", WAY_OUT) from error


def check_rows(rows: Sequence[Row], form: Mapping[str, Any]) -> None:
    """Refuse rows that lack what those of a search have: the names in `form`, with values of these types."""
    for number, row in enumerate(rows, start=1):
        for name, kind in form.items():
            if name not in row:
                raise ValueError(f"row {number} has no {name!r}, which all rows of this search have")
            if not fits(row[name], kind):
                raise ValueError(f"the {name!r} of row {number} is {row[name]!r}, which is not a valid value")
