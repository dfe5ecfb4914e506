"""What a policy was learned with: its images, and what magnitudes meant."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.ops import PAPER_OPS, Space


@dataclass(frozen=True)
class Source:
    """What a policy was learned with; it decides what the policy's numbers mean."""

    network: str | None  # the extractor: a name in `NETWORKS`, or None for a network of the user's own
    num_classes: int
    channels: int
    space: Space  # what magnitudes mean
    mean: tuple[float, ...]  # of the extractor's inputs, per channel, for pixels in [0, 1]
    std: tuple[float, ...]
    fill: tuple[int, ...]  # color of what geometric functions uncover, per channel, in 0 … 255
    size: tuple[int, int]  # height and width of the images
    layer: str | None = None  # the extractor's layer whose input is the feature; the last linear one if not given

    def __post_init__(self) -> None:
        _check_number("num_classes", self.num_classes, 2)
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels!r}; images have 1 (grey) or 3 (RGB)")
        for name, values in (("mean", self.mean), ("std", self.std), ("fill", self.fill)):
            if len(values) != self.channels:
                raise ValueError(f"{name} is {values}; for {self.channels} channels it needs {self.channels} numbers")
        if not all(isinstance(value, float) and math.isfinite(value) for value in (*self.mean, *self.std)):
            raise ValueError(f"mean is {self.mean} and std {self.std}; both must be finite numbers")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std is {self.std}; each number must be above 0")
        for value in self.fill:
            _check_number("fill", value, 0, 255)
        if len(self.size) != 2:
            raise ValueError(f"size is {self.size}; it must be a height and a width")
        for value in self.size:
            _check_number("size", value, 1)
        if not isinstance(self.layer, str | None):
            raise ValueError(f"layer is {self.layer!r}; it must be a name, or none")


def space_hash(space: Space) -> str:
    """SHA-256 of what magnitudes mean to the paper's functions, without the space's name and other functions."""
    fields = ("slope", "start", "around", "per", "of", "rounding", "signed")
    levels = []
    for op in PAPER_OPS:
        values = [getattr(space.levels[op.name], field) for field in fields] if op.magnitude else []
        levels.append([op.name, *(value if isinstance(value, str) else float(value) for value in values)])
    return hashlib.sha256(json.dumps(levels).encode()).hexdigest()


def shift_and_scale(
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "c 1 1"], Float[Tensor, "c 1 1"]]:
    """Pixels in 0 … 255 have zero mean and unit deviation as (pixels − shift) · scale."""
    shift, deviation = (torch.tensor(values, device=device, dtype=dtype)[:, None, None] * 255 for values in (mean, std))
    return shift, 1 / deviation


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number {allowed}")
