"""What the benches share: the device they run on, and how figures are kept."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def choose_device(device: str | None) -> str:
    """The one asked for, or CUDA where there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch finds no CUDA device; leave the flag out to run on the CPU")
    return device


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


def machine(device: str) -> dict[str, str | int]:
    packages = {}
    for name in ("torch", "triton", "pillow", "torchvision", "timm", "kornia"):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores, {platform.machine()}"
    return {"hardware": hardware, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}
