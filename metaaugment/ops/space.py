"""What a magnitude in [0, 10] means: a space turns it into the argument of each function.

The compared systems use the same functions with different ranges, directions and roundings, the source of most trouble
in reproducing them. A space is therefore data: one level per function, all of one linear form, so that the fused kernel
reads the same numbers as the PyTorch one and the table can be printed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from metaaugment.ops.table import OPS

MAX_MAGNITUDE = 10.0

# Codes of the fields `per` and `rounding` in the table that the kernels read.
UNITS = ("pixel", "width", "height")
ROUNDINGS = ("none", "truncate", "nearest")
WIDTH, HEIGHT = map(UNITS.index, ("width", "height"))
TRUNCATE, NEAREST = map(ROUNDINGS.index, ("truncate", "nearest"))


@dataclass(frozen=True)
class Level:
    """argument = around + sign · round((start + slope · m) · unit / of), the sign only where `signed`.

    Computed in float64 from m as it is given. Levels that a system counts in steps, such as 5 of 30, should be given
    as float64 magnitudes: in float32, 5/3 is a little less, and truncation shows it.
    """

    slope: float
    start: float = 0.0
    around: float = 0.0
    per: str = "pixel"  # the unit: 1, or the image's width or height
    of: float = 1.0  # what `start` and `slope` are stated for: a size, or a power of ten that keeps them exact
    rounding: str = "none"
    signed: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (("per", self.per, UNITS), ("rounding", self.rounding, ROUNDINGS)):
            if value not in allowed:
                raise ValueError(f"a level's {name} is {value!r}; choose one of {', '.join(allowed)}")
        if not all(map(math.isfinite, (self.slope, self.start, self.around))) or not 0 < self.of < math.inf:
            raise ValueError(f"{self} has a number that is not finite, or an `of` that is not above 0")

    def row(self) -> list[float]:
        codes = UNITS.index(self.per), self.of, ROUNDINGS.index(self.rounding), self.signed
        return [self.around, self.start, self.slope, *map(float, codes)]


@dataclass(frozen=True)
class Space:
    """A name and the level of each function that takes a magnitude."""

    name: str
    levels: Mapping[str, Level]
    source: str = "defined by the user"

    def __post_init__(self) -> None:
        missing = [op.name for op in OPS if op.magnitude and op.name not in self.levels]
        if missing:
            raise ValueError(f"space {self.name!r} has no level for {', '.join(missing)}; give each function one")
        unknown = set(self.levels) - {op.name for op in OPS if op.magnitude}
        if unknown:
            raise ValueError(f"space {self.name!r} has a level for {', '.join(sorted(unknown))}, which takes none")

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.levels.items())))

    def arguments(
        self,
        ops: Int[Tensor, "*n"],
        magnitudes: Float[Tensor, "*n"],
        signs: Shaped[Tensor, "*n"],
        height: int,
        width: int,
    ) -> Float[Tensor, "*n"]:
        """The argument of each function, in float64 as Pillow's own Python would compute it."""
        around, start, slope, per, of, rounding, signed = level_table(self, ops.device)[ops.long()].unbind(-1)
        of_width, of_height = (per == WIDTH).double(), (per == HEIGHT).double()
        unit = of_width * width + of_height * height + (1 - of_width - of_height)
        value = (magnitudes.double() * slope + start) * unit / of
        value = torch.where(rounding == TRUNCATE, value.trunc(), value)
        value = torch.where(rounding == NEAREST, value.round(), value)
        return around + torch.where(signed == 1, signs.double(), 1.0) * value


@cache
def level_table(space: Space, device: torch.device) -> Float[Tensor, "ops 7"]:
    """One row per function, in the order of `OPS`; a level of zero for functions that take no magnitude."""
    none = Level(slope=0.0).row()
    rows = [space.levels[op.name].row() if op.magnitude else none for op in OPS]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _both(name: str, level: Level) -> dict[str, Level]:
    """The same level for a function's X and Y form; if relative to the size, X uses the width and Y the height."""
    if level.per == "pixel":
        return {f"{name}X": level, f"{name}Y": level}
    return {f"{name}{axis}": replace(level, per=per) for axis, per in (("X", "width"), ("Y", "height"))}


def _enhance(level: Level) -> dict[str, Level]:
    return dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), level)


_FACTOR = _enhance(Level(0.18, start=0.1))  # 0.1 to 1.9; 5 leaves the image as it is
_CUTOUT = Level(2.0, per="width", of=32, rounding="truncate")  # AutoAugment's 20 pixels of 32

SPACES: dict[str, Space] = {
    space.name: space
    for space in (
        Space(
            "metaaugment",
            {
                "Rotate": Level(3.0, signed=True),
                "Posterize": Level(-0.4, around=8, rounding="truncate"),  # 8 to 4 bits: never black
                "Solarize": Level(-25.6, start=256),
                **_FACTOR,
                **_both("Shear", Level(0.03, signed=True)),
                **_both("Translate", Level(1.0, per="width", of=32, signed=True)),
                "Cutout": _CUTOUT,
            },
            "this project: AutoAugment's ranges, continuous, Posterize from 8 bits down (docs/decisions.md)",
        ),
        Space(
            "autoaugment",
            {
                "Rotate": Level(3.0, rounding="truncate", signed=True),
                "Posterize": Level(-0.4, around=4, rounding="truncate"),  # 0 bits, black, at 10
                "Solarize": Level(-25.6, around=256, rounding="truncate"),
                **_FACTOR,
                **_both("Shear", Level(0.03, signed=True)),
                # 10 pixels of 32 in the published code; the same share of other sizes.
                **_both("Translate", Level(1.0, per="width", of=32, rounding="truncate", signed=True)),
                "Cutout": _CUTOUT,
            },
            "AutoAugment's released code for CIFAR, which PBA and UDA share",
        ),
        Space(
            "randaugment",
            {
                "Rotate": Level(3.0, signed=True),
                "Posterize": Level(0.4, rounding="truncate"),  # 0 to 4 bits: weaker with m, black below 2.5
                "Solarize": Level(25.6, rounding="truncate"),  # weaker with m too; inverts all at 0
                **_FACTOR,
                **_both("Shear", Level(0.03, signed=True)),
                # 100 and 2 · 40 pixels of ImageNet's 224 in the published code; the same share of other sizes.
                **_both("Translate", Level(10.0, per="width", of=224, signed=True)),
                "Cutout": Level(8.0, per="width", of=224, rounding="truncate"),
            },
            "RandAugment's released TPU code",
        ),
        Space(
            "faa",
            {
                # Geometry is U-shaped: 5 is neutral, 0 and 10 are strongest.
                "Rotate": Level(6.0, start=-30, signed=True),
                "Posterize": Level(0.4, around=4, rounding="truncate"),  # 4 to 8 bits: weaker with m
                "Solarize": Level(25.6),  # weaker with m
                **_FACTOR,
                **_both("Shear", Level(0.6, start=-3, of=10, signed=True)),
                **_both("Translate", Level(9.0, start=-45, per="width", of=100, signed=True)),
                # Pillow's rectangle includes both ends: one pixel more than the share of the width, so at least one.
                "Cutout": Level(2.0, per="width", of=100, rounding="truncate", around=1),
            },
            "Fast AutoAugment's and DADA's released code, their level in [0, 1] being m / 10",
        ),
        Space(
            "torchvision",
            {
                "Rotate": Level(3.0, signed=True),
                "Posterize": Level(-0.4, around=8, rounding="nearest"),
                "Solarize": Level(-25.5, start=255),  # a white pixel is inverted even at 0
                **_enhance(Level(0.09, around=1, signed=True)),  # 0 leaves the image as it is
                **_both("Shear", Level(0.03, signed=True)),
                **_both("Translate", Level(15.0, per="width", of=331, rounding="truncate", signed=True)),
                "Cutout": _CUTOUT,
            },
            "torchvision's AutoAugment and RandAugment, m / 10 of the way through its bins",
        ),
        Space(
            "trivialaugment-wide",
            {
                "Rotate": Level(13.5, rounding="truncate", signed=True),
                "Posterize": Level(-0.6, around=8, rounding="truncate"),  # 8 to 2 bits
                "Solarize": Level(-25.6, around=256, rounding="truncate"),
                **_enhance(Level(0.199, start=0.01)),
                **_both("Shear", Level(0.099, signed=True)),
                **_both("Translate", Level(3.2, rounding="truncate", signed=True)),  # 32 pixels, whatever the size
                "Cutout": Level(6.0, per="width", of=100, rounding="truncate"),
            },
            "TrivialAugment's wide space",
        ),
    )
}


def find_space(space: str | Space) -> Space:
    """A space by its name; a space of the user's own is returned as it is."""
    if isinstance(space, Space):
        return space
    if not isinstance(space, str) or space not in SPACES:
        raise ValueError(f"unknown space {space!r}; choose one of {', '.join(SPACES)}")
    return SPACES[space]
