"""What a run or a bench runs on."""

import contextlib
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from metaaugment.version import __version__

CONTINUED = ", continued at "  # between the commits of a run, in what earlier versions wrote
UNKNOWN = "unknown"
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of computing, or max, in every so many


def choose_device(device: str | None) -> str:
    """The device asked for, or else CUDA if it is available."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch finds no CUDA device; leave the flag out to run on the CPU")
    return device


def cores() -> int:
    """Cores that this process may use: those that it is bound to, or fewer if its container gets less of their time."""
    # Not every system says which cores a process may use.
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        time, period = map(int, QUOTA.read_text().split())
        return min(bound, math.ceil(time / period))
    return bound


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """A context in which torch computes with this many threads on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """A context in which a GPU repeats its numbers exactly, as a CPU always does; warns of operations that cannot."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]


def machine(device: str) -> dict[str, str | int]:
    packages = {}
    for name in ("torch", "triton", "pillow", "torchvision", "timm", "kornia"):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores, {platform.machine()}"
    packages = {"metaaugment": __version__, **packages}
    return {"hardware": hardware, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}


def commit() -> str | None:
    """The commit of the code if it runs from a checkout, with a + if files were changed since.

    METAAUGMENT_COMMIT says it for code that was copied without its repository, or over another state of it.
    """
    return os.environ.get("METAAUGMENT_COMMIT") or _checked_out()


@cache
def _checked_out() -> str | None:
    """As it is when first asked for: a process keeps the code that it has loaded, whatever is committed later."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        if subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True).returncode:
            return None
        # No tag matches, so that it is named by its hash.
        words = [*git, "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commits(recorded: object) -> list[str]:
    """The commits that a run was made at, from its checkpoint or result; earlier versions wrote them as one text."""
    return [str(one) for one in recorded] if isinstance(recorded, list) else str(recorded or UNKNOWN).split(CONTINUED)


def continued(before: list[str], now: str | None) -> list[str]:
    """The commits of a run that goes on at this one."""
    known = now or UNKNOWN
    return before if before[-1:] == [known] else [*before, known]
