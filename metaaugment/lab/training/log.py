"""`log.jsonl`: one JSON object per epoch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaaugment.files.atomic import append_line, write_atomically

LOG = "log.jsonl"
FIGURES = ("train_loss", "val_loss", "val_accuracy", "alpha", "effective_samples")  # in every row, among others
Row = dict[str, Any]


class Log:
    """The rows, and a file of them for others to read; the run itself restores them from its checkpoint.

    Of several processes only the first writes the file.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: list[Row] = []

    def append(self, row: Row) -> None:
        self.rows.append(row)
        if self.file is not None:
            append_line(self.file, json.dumps(row))

    def restore(self, rows: Sequence[Row]) -> None:
        """Hold exactly these rows; any that a killed run wrote after its last checkpoint are dropped."""
        self.rows = list(rows)
        if self.file is not None:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(self.file, lambda part: part.write_text(text))
