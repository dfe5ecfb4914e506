"""How benches time, and keep their figures."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from metaaugment.training.machine import machine


def timed(call: Callable[[], object], times: int, device: str) -> float:
    """Seconds for so many calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def write(file: Path | None, device: str, figures: Sequence[Any], **more: object) -> None:
    """Figures with what they were measured on, as JSON, if a file is named."""
    if file is None:
        return
    record = {"machine": machine(device), **more, "figures": [asdict(figure) for figure in figures]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {file}")
