"""A batch of transformations T_{j,k}^{m1,m2} as a value, and what it does to a batch of images."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Self, SupportsIndex

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from metaaugment.ops import MAX_MAGNITUDE, OPS, Space, eager, find_space

# Pillow's fixed-point coordinates reach 32,768; a shear by one doubles the side.
MAX_SIDE = 16_383
INDEX_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROUNDING = 1e-3  # of a floating-point image: a quarter of a grey level


@dataclass(frozen=True, eq=False)
class Transformation:
    """Two functions in order for each of n samples, with everything that was drawn for them.

    Everything random is here, so applying a transformation is pure: the same images give the same result.

    - `first`, `second`: indices into `OPS`, [n]
    - `magnitudes`: in [0, 10], [n, 2]
    - `signs`: +1 or −1, [n, 2]; functions without a direction ignore them
    - `positions`: the centers of Cutout as fractions (y, x) of the image in [0, 1], [n, 2, 2]; by default the middle
    """

    first: Int[Tensor, " n"]
    second: Int[Tensor, " n"]
    magnitudes: Float[Tensor, "n 2"]
    signs: Tensor
    positions: Float[Tensor, "n 2 2"] | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_values()

    def _check_kinds(self) -> None:
        """Types and shapes, which can be checked without waiting for a device."""
        n = len(self.first) if isinstance(self.first, Tensor) and self.first.ndim else 0
        fields = {"first": (n,), "second": (n,), "magnitudes": (n, 2), "signs": (n, 2), "positions": (n, 2, 2)}
        for name, shape in fields.items():
            value = getattr(self, name)
            if name == "positions" and value is None:
                continue
            if not isinstance(value, Tensor) or value.dtype.is_complex or value.dtype == torch.bool:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{name} is {kind}; it must be a tensor of real numbers")
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; for {n} samples it must be {shape}")
        for name in ("first", "second"):
            if getattr(self, name).dtype not in INDEX_TYPES:
                raise ValueError(f"{name} has dtype {getattr(self, name).dtype}; function indices must be integers")

    def _check_values(self) -> None:
        for name in ("first", "second"):
            value = getattr(self, name)
            _refuse(value, (value < 0) | (value >= len(OPS)), f"{name} holds the function index",
                    f"indices are 0 to {len(OPS) - 1}, the places in metaaugment.OPS")  # fmt: skip
        _refuse(self.magnitudes, ~((self.magnitudes >= 0) & (self.magnitudes <= MAX_MAGNITUDE)),
                "magnitudes holds", f"magnitudes lie in [0, {MAX_MAGNITUDE:g}]")  # fmt: skip
        _refuse(self.signs, self.signs.abs() != 1, "signs holds", "signs are +1 or -1")
        if self.positions is not None:
            _refuse(self.positions, ~((self.positions >= 0) & (self.positions <= 1)),
                    "positions holds", "positions are fractions of the image in [0, 1]")  # fmt: skip

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, samples: SupportsIndex | slice | Sequence[int] | Tensor) -> "Transformation":
        """The transformations of some of the samples; an index gives a batch of one."""
        if isinstance(samples, SupportsIndex) and getattr(samples, "ndim", 0) == 0:  # numpy's and torch's numbers too
            place = range(len(self))[samples]
            chosen = slice(place, place + 1)
        else:
            chosen = samples if isinstance(samples, slice) else torch.as_tensor(samples)
        return self._map(lambda value: value[chosen])

    def __iter__(self) -> Iterator["Transformation"]:
        return (self[sample] for sample in range(len(self)))

    def to(self, device: torch.device | str) -> "Transformation":
        # Only a copy to a device may be non-blocking: on the host, memory would be read before it is written.
        device = torch.device(device)
        return self._map(lambda value: value.to(device, non_blocking=device.type != "cpu"))

    @classmethod
    def draw(
        cls,
        first: Int[Tensor, " n"],
        second: Int[Tensor, " n"],
        generator: torch.Generator | None = None,
        magnitudes: Float[Tensor, "n 2"] | None = None,
    ) -> "Transformation":
        """Draw the rest: magnitudes ~ U(0, 10) if none are given, fair signs, positions."""
        n, device = len(first), getattr(first, "device", None)
        if magnitudes is None:
            magnitudes = torch.rand(n, 2, generator=generator, device=device, dtype=torch.float32) * MAX_MAGNITUDE
        signs = torch.randint(0, 2, (n, 2), generator=generator, device=device, dtype=torch.int8) * 2 - 1
        positions = torch.rand(n, 2, 2, generator=generator, device=device, dtype=torch.float32)
        drawn = cls._trusted(first, second, magnitudes, signs, positions)
        drawn._check_kinds()
        if drawn.first.device.type == "cpu":
            drawn._check_values()
        return drawn

    @classmethod
    def _trusted(cls, *values: Any) -> Self:
        """Construct without checking values, which would make the host wait for a GPU."""
        transformation = object.__new__(cls)
        for name, value in zip(cls.__dataclass_fields__, values, strict=True):
            object.__setattr__(transformation, name, value)
        return transformation

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Transformation":
        values = (self.first, self.second, self.magnitudes, self.signs, self.positions)
        return Transformation._trusted(*(None if value is None else function(value) for value in values))


def device_of(generator: torch.Generator | None) -> torch.device:
    """The device that a generator draws on; torch's default device if there is none."""
    return torch.get_default_device() if generator is None else generator.device


def apply(
    images: Tensor, transformation: Transformation, space: str | Space = "metaaugment", fill: int | Sequence[int] = 0
) -> Tensor:
    """Transform each image of a batch by its own two functions, one after the other.

    Args:
        images: uint8 [n, c, h, w] with 1 or 3 channels. Floating-point images in [0, 1] are taken as uint8 / 255 and
            give the uint8 result / 255 in their own dtype.
        transformation: one for each image, on any device.
        space: defines what magnitudes mean: a name in `metaaugment.ops.SPACES`, or a space of your own.
        fill: the value in 0 … 255, or one per channel, of what geometric functions uncover and Cutout covers.

    Returns:
        New images of the same shape, dtype and device; for uint8, what Pillow gives, bit for bit. On CUDA the host does
        not wait for the device; after a first call as a warm-up, a call can be captured in a CUDA graph.
    """
    space = find_space(space)
    check_images(images)
    check_transformation(transformation, len(images))
    colors = _check_fill(fill, images.shape[1])
    if images.dtype != torch.uint8:
        return apply(as_pixels(images), transformation, space, colors).to(images.dtype) / 255
    if len(images) == 0:
        return images.clone()
    t = transformation.to(images.device)
    positions = t.positions
    if positions is None:
        positions = torch.full((len(t), 2, 2), 0.5, dtype=torch.float32, device=images.device)
    return _backend(images.device.type).apply_functions(
        images.contiguous(),
        torch.stack([t.first.long(), t.second.long()], 1),
        t.magnitudes,
        t.signs,
        positions,
        space,
        colors,
    )


def as_pixels(images: Tensor) -> UInt8[Tensor, "n c h w"]:
    """uint8 images as they are, and floating-point ones in [0, 1] as the uint8 images that they stand for."""
    if images.dtype == torch.uint8:
        return images
    if images.device.type == "cpu":  # elsewhere the host would wait each time: whoever holds the batches checks once
        check_range(images)
    return (images.float() * 255).round_().nan_to_num_().clamp_(0, 255).to(torch.uint8)


def in_unit_range(images: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 images as numbers in [0, 1]."""
    if images.dtype != torch.uint8:
        raise ValueError(
            f"the images are {str(images.dtype).removeprefix('torch.')}, but without prepare= they are divided by 255; "
            "give uint8 images for training and validation, or a prepare= that turns yours into the network's inputs"
        )
    return images.to(dtype) / 255


def check_range(
    images: Tensor,
    what: str = "images holds",
    way: str = "floating-point images lie in [0, 1]; normalise them after the transformation, in a learner by prepare=",
) -> None:
    """Refuse floating-point images outside of [0, 1], by more than the rounding of a resize; waits for the device."""
    _refuse(images, ~((images >= -ROUNDING) & (images <= 1 + ROUNDING)), what, way)


@cache
def _backend(device_type: str) -> ModuleType:
    """The fused kernel on CUDA; plain PyTorch on every other device, and where Triton is not installed."""
    if device_type == "cuda":
        with contextlib.suppress(ImportError):
            from metaaugment.ops import fused

            return fused
    return eager


def check_images(images: Tensor) -> None:
    """Type and shape of a batch, which can be checked without waiting for a device; it may be empty."""
    if not isinstance(images, Tensor):
        raise ValueError(f"images is a {type(images).__name__}; give a torch tensor")
    if images.dtype != torch.uint8 and images.dtype not in FLOAT_TYPES:
        raise ValueError(f"images has dtype {images.dtype}; use torch.uint8, or floating point in [0, 1]")
    if images.ndim != 4:
        raise ValueError(f"images has shape {tuple(images.shape)}; a batch is [n, channels, height, width]")
    _, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images has {channels} channels (its second axis); 1 (grey) and 3 (RGB) are allowed")
    if not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE:
        raise ValueError(f"images are {height} by {width} pixels; sides of 1 to {MAX_SIDE} are allowed")


def check_transformation(transformation: Transformation, n: int) -> None:
    if not isinstance(transformation, Transformation):
        raise ValueError(f"transformation is a {type(transformation).__name__}; give a metaaugment.Transformation")
    if n != len(transformation):
        raise ValueError(f"{n} images but {len(transformation)} transformations; give each image one")


def _check_fill(fill: int | Sequence[int], channels: int) -> tuple[int, ...]:
    try:
        colors = torch.as_tensor(fill, dtype=torch.float64).tolist()
    except (TypeError, ValueError, RuntimeError):
        colors = None
    colors = [colors] * channels if isinstance(colors, float) else colors
    if colors is None or len(colors) != channels or not all(color in range(256) for color in colors):
        raise ValueError(
            f"fill is {fill}; it must be one whole number from 0 to 255, or {channels} of them, one for each channel"
        )
    return tuple(int(color) for color in colors)


def _refuse(value: Tensor, wrong: Tensor, what: str, allowed: str) -> None:
    """Raise with the first wrong value, if there is one."""
    if wrong.any():
        found = value[wrong][0].item()
        raise ValueError(f"{what} {found if isinstance(found, int) else format(found, '.9g')}; {allowed}")
