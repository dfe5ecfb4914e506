"""`log.jsonl`: one JSON object an epoch."""

import json
import os
from pathlib import Path
from typing import Any

from metaaugment.sealed import write_atomically

Row = dict[str, Any]


class Log:
    """Appends rows to a file; what a killed run left of an unfinished epoch is cut off by `keep`."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, row: Row) -> None:
        with self.file.open("a") as content:
            content.write(json.dumps(row) + "\n")
            content.flush()
            os.fsync(content.fileno())

    def rows(self) -> list[Row]:
        """All whole lines."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def keep(self, epochs: int) -> None:
        """Keep the rows of the first epochs only."""
        rows = [row for row in self.rows() if row["epoch"] <= epochs]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(self.file, lambda part: part.write_text(text))
