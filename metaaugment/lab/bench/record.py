"""How benches time, show and keep their figures."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.machine import commit, machine

ROUNDS = 7
Name = TypeVar("Name")


def timed(call: Callable[[], object], times: int, device: str) -> float:
    """Seconds for this many calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def by_turns(calls: Mapping[Name, Callable[[], object]], seconds: float, device: str) -> dict[Name, float]:
    """Seconds that one call of each takes: the median of short rounds, in which all take turns.

    So a slow moment of the machine affects each of them. `seconds`: the time for all rounds of one of them.
    """
    times = {}
    for name, call in calls.items():
        took = min(timed(call, 1, device) for _ in range(2))  # the first warms up
        times[name] = max(1, round(seconds / ROUNDS / took))
    rounds = [
        {name: timed(call, times[name], device) / times[name] for name, call in calls.items()} for _ in range(ROUNDS)
    ]
    return {name: statistics.median(one[name] for one in rounds) for name in calls}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Names in the first column, and numbers in the others."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def check_new(file: Path | None) -> None:
    """Refuse to overwrite the figures of another bench, before minutes of measuring; note the commit of the code."""
    commit()
    if file is not None and file.exists():
        raise ValueError(f"--out is {file}, which exists already; choose another name, or remove it")


def write(file: Path | None, device: str, figures: Sequence[Any], **more: object) -> None:
    """Figures, with the machine and the commit that they were measured on, as JSON, if a file is named."""
    if file is None:
        return
    record = {"machine": machine(device), "commit": commit(), **more, "figures": [asdict(figure) for figure in figures]}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, record)
    print(f"written to {file}")
