"""How benches time, show and keep their figures."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from metaaugment.lab.program import on_terminal
from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.machine import choose_device, commit, machine

ROUNDS = 7
Name = TypeVar("Name")
Figure = TypeVar("Figure")
Columns = Mapping[str, Callable[[Figure], str]]  # of a table, each with how it words a figure


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


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as one replayed CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda call=call: graph.replay()  # keeps alive what the graph works on


def begin(device: str | None, out: Path | None) -> str:
    """The device to measure on.

    Refuses to overwrite the figures of another bench, before minutes of measuring; notes the commit of the code."""
    commit()
    if out is not None and out.exists():
        raise ValueError(f"--out is {out}, which exists already; choose another name, or remove it")
    return choose_device(device)


def show(cases: Mapping[str, Callable[[], Sequence[Figure]]], columns: Columns[Figure]) -> list[Figure]:
    """Measure each case, and print its figures as a table: names in the first column, and numbers in the others."""
    console, figures = Console(force_terminal=on_terminal()), []
    for title, measure in cases.items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
        with console.status(title):
            measured = measure()
        for figure in measured:
            table.add_row(*(word(figure) for word in columns.values()))
        console.print(table)
        figures += measured
    return figures


def write(file: Path | None, device: str, figures: Sequence[Any], **more: object) -> None:
    """Figures, with the machine and the commit that they were measured on, as JSON, if a file is named."""
    if file is None:
        return
    record = {"machine": machine(device), "commit": commit(), **more, "figures": [asdict(figure) for figure in figures]}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, record)
    print(f"written to {file}")
