"""Runs as a report reads them: what their folders hold, and in plain words what is missing."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from metaaugment.embedding import K
from metaaugment.lab.experiments.diagnosis import Diagnosis
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.report.seen import Seen
from metaaugment.lab.report.seen import read as read_seen
from metaaugment.lab.training.checkpoint import LOOK
from metaaugment.lab.training.folder import DIAGNOSIS, RECIPE, RESULT, SEARCH
from metaaugment.lab.training.json_file import MAX_NUMBER, is_number, read_json, row_of
from metaaugment.lab.training.log import FIGURES, LOG, Row
from metaaugment.lab.training.look import QUANTILES
from metaaugment.lab.words import number_of, printable, some

INNER = re.compile(r"fold-\d+|trial-\d+|training|children")  # folders that a search trains in, which are no runs
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Run:
    """The folder of a run, as far as it can be read."""

    folder: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    result: dict[str, Any] | None = None
    seen: Seen | None = None
    missing: list[str] = field(default_factory=list)
    diagnosis: Diagnosis | None = None

    @property
    def name(self) -> str:
        return printable(self.recipe.get("name", self.folder.name))

    @property
    def method(self) -> str:
        return printable(self.recipe.get("method", "unknown method"))

    @property
    def dataset(self) -> str:
        return printable(self.recipe.get("dataset", "unknown data"))

    @property
    def planned(self) -> int | None:
        """The number of epochs it is meant to have."""
        return self.count("epochs")

    def count(self, key: str) -> int | None:
        """A field of the recipe, if it is a whole number."""
        value = self.recipe.get(key)
        return value if is_count(value) else None

    @property
    def has_policy(self) -> bool:
        """Whether it weights samples, which the compared methods do not."""
        return self.method in METHODS and METHODS[self.method].learns

    @property
    def learns(self) -> bool:
        """Whether its policy is learned, and not one from a file."""
        return self.has_policy and self.recipe.get("policy") is None

    def accuracy(self, images: str) -> float | None:
        """Of a finished run, on its test images, or on those that were held back in their place."""
        accuracy = (self.result or {}).get(f"{images}_accuracy")
        return accuracy if is_number(accuracy) and 0 <= accuracy <= 1 else None

    def told(self, what: str) -> dict[str, Any]:
        """What a finished run says of its data or its machine."""
        value = (self.result or {}).get(what)
        return value if isinstance(value, dict) else {}

    @cached_property
    def epochs(self) -> np.ndarray:
        return np.array([row["epoch"] for row in self.rows], dtype=int)

    @property
    def done(self) -> int:
        """The last epoch that it has finished; 0 if none is known."""
        return int(self.epochs.max(initial=0))

    def values(self, key: str) -> np.ndarray:
        """A quantity of the log by epoch; NaN where it is not a number."""
        return np.array([value if is_number(value := row.get(key)) else math.nan for row in self.rows], dtype=float)

    @cached_property
    def distributions(self) -> tuple[np.ndarray, np.ndarray]:
        """Epochs, and p_{j,k} after each of them, [epochs, K, K]."""
        return self._arrays("probabilities", (K, K))

    @cached_property
    def quantiles(self) -> tuple[np.ndarray, np.ndarray]:
        """Epochs, and the quantiles of the weights of a mini-batch, [epochs, 7]."""
        return self._arrays("weights", (len(QUANTILES),))

    def _arrays(self, key: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        found = [(row["epoch"], array) for row in self.rows if (array := _array(row.get(key), shape)) is not None]
        return np.array([epoch for epoch, _ in found], dtype=int), np.array([a for _, a in found]).reshape(-1, *shape)


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and is_number(value) and 0 <= value < 10**9


def _array(value: object, shape: tuple[int, ...]) -> np.ndarray | None:
    """The value as an array, if it has this shape and can be probabilities or weights."""
    try:
        array = np.array(value)
    except ValueError:  # rows of different lengths
        return None
    if array.shape != shape or array.dtype.kind not in "if":
        return None
    good = ((array >= 0) & (array < MAX_NUMBER)).all() and array.sum() > 0
    return array.astype(float) if good else None


def find(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in these folders or below them, each once, and a sentence about each folder that holds none."""
    folders: dict[Path, Path] = {}
    empty = []
    for path in paths:
        if not path.is_dir():
            wrong = "is a file" if path.exists() else "does not exist"
            raise ValueError(f"{path} {wrong}; name the folder of a run, or one that holds runs")
        found = run_folders(path)
        folders |= {folder.resolve(): folder for folder in found if folder.resolve() not in folders}
        if not found:
            reason = f"neither {RECIPE} nor {LOG} is in it or below it"
            reason = "what a search trains does not count" if any(path.rglob(SEARCH)) else reason
            empty.append(f"{printable(path)} holds no run: {reason}")
    return [read(folder) for folder in folders.values()], empty


def run_folders(path: Path) -> list[Path]:
    found = []
    for folder, below, files in os.walk(path):
        if RECIPE in files or LOG in files:
            found.append(Path(folder))
            below.clear()
        inner = INNER if SEARCH in files else None
        below[:] = sorted(name for name in below if not (name.startswith(".") or (inner and inner.fullmatch(name))))
    return found


def read(folder: Path) -> Run:
    """A run as far as it can be read; nothing in its folder, whatever it holds, is an error."""
    missing: list[str] = []
    recipe = _held(folder / RECIPE, read_json, missing, f"there is no {RECIPE}")
    rows = _rows(folder / LOG, missing)
    result = _held(folder / RESULT, read_json, missing)
    if recipe is None and result is not None and isinstance(result.get("recipe"), dict):
        recipe = result["recipe"]
    seen = _held(folder / LOOK, read_seen, missing)
    diagnosis = _held(folder / DIAGNOSIS, lambda file: Diagnosis.from_json(read_json(file)), missing)
    run = Run(folder, _completed(recipe or {}), rows, result, seen, missing, diagnosis)
    if rows and run.has_policy:
        for (epochs, _), what in (
            (run.distributions, "how often each pair of functions was drawn"),
            (run.quantiles, "how the weights spread"),
        ):
            if gaps := len(rows) - len(epochs):
                missing.append(
                    f"{LOG} does not say {what}" + (f" in {gaps} of {len(rows)} epochs" if len(epochs) else "")
                )
        if run.seen is None and not (folder / LOOK).exists():
            missing.append(f"there is no {LOOK}: no samples are shown, and nothing by magnitude or class")
    if result is None:
        done = f"{len(rows)} of {run.planned} epochs done" if run.planned else f"{number_of('epoch', len(rows))} done"
        missing.append(f"it is not finished: {done}, and there is no final accuracy yet")
    return run


def _completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with defaults for fields that are newer than the run; unchanged if it is of another version."""
    try:
        return Recipe.from_json(recipe).to_json()
    except ValueError:
        return recipe


def _held(file: Path, read: Callable[[Path], T], missing: list[str], absent: str | None = None) -> T | None:
    """What a file holds, if it can be read; `absent` is what to say if there is no file."""
    try:
        return read(file)
    except FileNotFoundError:
        missing += [absent] if absent else []
    except (OSError, ValueError) as error:
        missing.append(_reason(file, error))
    return None


def _rows(file: Path, missing: list[str]) -> list[Row]:
    """One row per epoch, in order; if an epoch occurs twice, the later row."""
    absent = f"there is no {file.name}: nothing is known about any epoch"
    lines = _held(file, lambda file: file.read_text(errors="replace").splitlines(), missing, absent)
    if lines is None:
        return []
    rows: dict[int, Row] = {}
    bad = []
    for number, line in enumerate(lines, 1):
        row = row_of(line)
        if row is not None and is_count(row.get("epoch")) and row["epoch"] > 0:
            rows[row["epoch"]] = row
        elif line.strip():
            bad.append(number)
    if bad:
        be = "is" if len(bad) == 1 else "are"
        missing.append(f"{_numbered('line', bad)} of {file.name} cannot be read as a row, and {be} left out")
    if not rows:
        missing.append(f"{file.name} has no row for an epoch yet")
    for key in FIGURES:
        gaps = [epoch for epoch, row in rows.items() if not is_number(row.get(key))]
        if gaps:
            missing.append(f"{key} is missing or not finite in {_numbered('epoch', gaps)}")
    return [rows[epoch] for epoch in sorted(rows)]


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    """Line 4, or lines 1, 2, 3 and 2 more."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {some(numbers)}"


def _reason(file: Path, error: Exception) -> str:
    """Why a file cannot be read, without the folder, which is named already."""
    if isinstance(error, OSError):
        return f"{file.name} cannot be read: {error.strerror or error}"
    return printable(str(error).replace(str(file), file.name))
