"""The table of image functions: the paper's 14 in its order, then Invert and Cutout of the compared systems."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from metaaugment.ops import kernels


@dataclass(frozen=True)
class Op:
    """An image function.

    Its place in `OPS` is its index in a transformation. A space (`space.py`) says what a magnitude means to it and
    whether it has a sign, because the compared systems differ in nothing else.
    """

    name: str
    kernel: Callable[..., Tensor]  # (images, argument, and what `uses` names) -> images
    magnitude: bool = True  # whether it takes one
    uses: tuple[str, ...] = ()


PAPER_OPS: tuple[Op, ...] = (
    Op("AutoContrast", kernels.autocontrast, magnitude=False),
    Op("Equalize", kernels.equalize, magnitude=False),
    Op("Rotate", kernels.rotate, uses=("fill",)),
    Op("Posterize", kernels.posterize),
    Op("Solarize", kernels.solarize),
    Op("Color", kernels.color),
    Op("Contrast", kernels.contrast),
    Op("Brightness", kernels.brightness),
    Op("Sharpness", kernels.sharpness),
    Op("ShearX", kernels.shear_x, uses=("fill",)),
    Op("ShearY", kernels.shear_y, uses=("fill",)),
    Op("TranslateX", kernels.translate_x, uses=("fill",)),
    Op("TranslateY", kernels.translate_y, uses=("fill",)),
    Op("Identity", kernels.identity, magnitude=False),
)

OPS: tuple[Op, ...] = (
    *PAPER_OPS,
    Op("Invert", kernels.invert, magnitude=False),
    Op("Cutout", kernels.cutout, uses=("fill", "position")),
)

INDEX: dict[str, int] = {op.name: i for i, op in enumerate(OPS)}
