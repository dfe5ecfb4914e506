"""The image functions on batches of uint8 images, each with Pillow's result bit for bit.

A kernel takes images [n, c, h, w], one argument per sample, and whatever `Op.uses` names, and returns new images.
Most functions are *point* functions, an output value for each of the 256 input values: they make a table [n, c, 256]
exactly as Pillow makes its own, in the same precision and the same order of operations, and share one look-up.
The geometric ones make an affine matrix and share one resampling.

Multiplication and addition stay two operations everywhere: a fused multiply-add rounds once instead of twice and
changes results. `fused.py` computes the same functions on a GPU and is tested against this file.
"""

import math
from collections.abc import Callable
from functools import wraps

import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

Images = UInt8[Tensor, "n c h w"]
Argument = Float[Tensor, " n"]
Table = UInt8[Tensor, "n #c 256"]  # one table may serve all channels

# ITU-R 601 luma in 16.16 fixed point. Every partial sum stays below 2^24, so float32 holds it exactly.
LUMA = (19595, 38470, 7471)

# Values processed at a time on a CPU. Intermediate results, up to eight bytes per value, then stay in a core's cache
# instead of going through main memory: several times faster on large images.
CHUNK = 1 << 18


def in_chunks(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run a kernel whose arguments are all per sample on a few images at a time."""

    @wraps(kernel)
    def run(images: Tensor, *values: Tensor) -> Tensor:
        few = max(1, CHUNK // images[0].numel())
        if images.device.type != "cpu" or len(images) <= few:
            return kernel(images, *values)
        parts = zip(*(value.split(few) for value in (images, *values)), strict=True)
        return torch.cat([kernel(*part) for part in parts])

    return run


# -- point functions ------------------------------------------------------------------------------------------------


@in_chunks
def look_up(images: Images, table: Table) -> Images:
    """Replace each pixel by the entry of its sample's (and channel's) table."""
    n, c, h, w = images.shape
    return table.expand(n, c, 256).gather(2, images.reshape(n, c, h * w).long()).view(n, c, h, w)


def autocontrast(images: Images, argument: Argument) -> Images:
    """Stretch each channel so that its darkest pixel becomes 0 and its brightest 255."""
    flat = images.flatten(2)
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    # A tensor divided by a tensor: torch computes `255.0 / x` as a reciprocal and a product, which rounds twice.
    scale = torch.full_like(low, 255.0) / (high - low)
    offset = -low * scale
    # In double and truncated, as Pillow's Python does: 254.999… stays 254.
    table = (_levels(images, torch.float64) * scale + offset).clamp(0, 255)
    return look_up(images, torch.where(high > low, table, _levels(images, torch.float64)).to(torch.uint8))


def equalize(images: Images, argument: Argument) -> Images:
    """Flatten each channel's histogram by Pillow's integer rule."""
    count = histogram(images)
    brightest = images.flatten(2).amax(2, keepdim=True).long()
    step = (images.shape[2] * images.shape[3] - count.gather(2, brightest)) // 255
    below = count.cumsum(2) - count
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    # A step of zero (one grey value, or too few pixels) leaves the channel as it is.
    return look_up(images, torch.where(step > 0, table, _levels(images, torch.int64)).to(torch.uint8))


@in_chunks
def histogram(images: Images) -> Int[Tensor, "n c 256"]:
    """How many pixels of each channel have each value."""
    n, c, h, w = images.shape
    rows = torch.arange(n * c, device=images.device, dtype=torch.int32)[:, None] * 256
    return torch.bincount((images.reshape(n * c, h * w) + rows).flatten(), minlength=n * c * 256).view(n, c, 256)


def posterize(images: Images, argument: Argument) -> Images:
    """Keep the first `argument` bits of each value; 0 bits give black."""
    mask = 256 - 2 ** (8 - argument.long())
    return look_up(images, (_levels(images, torch.int64) & mask[:, None, None]).to(torch.uint8))


def solarize(images: Images, argument: Argument) -> Images:
    """Invert the values at or above the threshold."""
    levels = _levels(images, torch.float64)
    return look_up(images, torch.where(levels < argument[:, None, None], levels, 255 - levels).to(torch.uint8))


def invert(images: Images, argument: Argument) -> Images:
    """255 minus each value."""
    return images.bitwise_not()


def brightness(images: Images, argument: Argument) -> Images:
    """Blend with black."""
    black = torch.zeros((), dtype=torch.float32, device=images.device)
    return look_up(images, blend(black, _levels(images, torch.float32), argument[:, None, None]))


def contrast(images: Images, argument: Argument) -> Images:
    """Blend with the grey of the image's mean luma, rounded to an integer."""
    pixels = images.shape[2] * images.shape[3]
    mean = torch.floor(total_luma(images)[:, None, None] / pixels + 0.5).float()
    return look_up(images, blend(mean, _levels(images, torch.float32), argument[:, None, None]))


# -- functions of a neighbourhood or of all channels ------------------------------------------------------------------


@in_chunks
def color(images: Images, argument: Argument) -> Images:
    """Blend with the grey-scale version; one channel is grey already and stays as it is."""
    if images.shape[1] == 1:
        return images.clone()
    return blend(luma(images), images.float(), argument[:, None, None, None])


@in_chunks
def sharpness(images: Images, argument: Argument) -> Images:
    """Blend with the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13; the outermost pixels stay as they are."""
    out = images.clone()
    if min(images.shape[2:]) < 3:
        return out
    x = images.to(torch.int16)
    rows = x[..., :-2] + x[..., 1:-1] + x[..., 2:]
    center = x[..., 1:-1, 1:-1]
    total = rows[..., :-2, :] + rows[..., 1:-1, :] + rows[..., 2:, :] + 4 * center
    # total / 13 + 1/2 is never nearer to an integer than 1/26, so float32 finds the same floor as exact arithmetic.
    smooth = (total.float() * (1 / 13) + 0.5).floor_()
    out[..., 1:-1, 1:-1] = blend(smooth, center.float(), argument[:, None, None, None])
    return out


def blend(first: Tensor, second: Tensor, factor: Float[Tensor, "n ..."]) -> Tensor:
    """first + factor · (second − first) in float32, cut off at 0 and 255, truncated to uint8: Pillow's Image.blend."""
    # Via int16: torch converts float32 to uint8 one value at a time.
    return ((second - first) * factor.float()).add_(first).clamp_(0, 255).to(torch.int16).to(torch.uint8)


@in_chunks
def total_luma(images: Images) -> Float[Tensor, " n"]:
    """The sum of the luma of all pixels, in float64, which holds it exactly."""
    return luma(images).sum((1, 2, 3), dtype=torch.float64)


def luma(images: Images) -> Float[Tensor, "n 1 h w"]:
    """Pillow's conversion to mode L, as whole numbers in float32."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = (images[:, i : i + 1].float() * LUMA[i] for i in range(3))
    return red.add_(green).add_(blue).add_(32768).mul_(1 / 65536).floor_()


# -- geometry ---------------------------------------------------------------------------------------------------------


def rotate(images: Images, argument: Argument, fill: UInt8[Tensor, " c"]) -> Images:
    """Turn counter-clockwise by `argument` degrees about the center."""
    # Pillow's matrix, with cosine and sine rounded to 15 decimals as in Pillow.
    angle = -(torch.remainder(argument, 360.0) * (math.pi / 180))
    cos, sin = torch.round(angle.cos(), decimals=15), torch.round(angle.sin(), decimals=15)
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return affine(images, fill, a=cos, b=sin, c=cos * -x + sin * -y + x, d=-sin, e=cos, f=-sin * -x + cos * -y + y)


def shear_x(images: Images, argument: Argument, fill: UInt8[Tensor, " c"]) -> Images:
    """Move row y to the left by `argument` · y pixels: sheared about the top-left corner, as by Pillow's matrix."""
    return affine(images, fill, b=argument)


def shear_y(images: Images, argument: Argument, fill: UInt8[Tensor, " c"]) -> Images:
    """Move column x up by `argument` · x pixels."""
    return affine(images, fill, d=argument)


def translate_x(images: Images, argument: Argument, fill: UInt8[Tensor, " c"]) -> Images:
    """Move to the left by `argument` pixels, rounded to the nearest whole number."""
    return translate(images, torch.floor(argument + 0.5), 3, fill)


def translate_y(images: Images, argument: Argument, fill: UInt8[Tensor, " c"]) -> Images:
    """Move up by `argument` pixels, rounded to the nearest whole number."""
    return translate(images, torch.floor(argument + 0.5), 2, fill)


def translate(images: Images, pixels: Argument, side: int, fill: UInt8[Tensor, " c"]) -> Images:
    """Move each image by its own whole number of pixels; on a CPU by copying slices, much faster on large images."""
    if images.device.type != "cpu":
        return affine(images, fill, **{"c" if side == 3 else "f": pixels})
    out = fill[:, None, None].expand_as(images).contiguous()
    size = images.shape[side]
    for source, target, move in zip(images, out, pixels.clamp(-size, size).int().tolist(), strict=True):
        rest = size - abs(move)
        target.narrow(side - 1, max(-move, 0), rest).copy_(source.narrow(side - 1, max(move, 0), rest))
    return out


def affine(images: Images, fill: UInt8[Tensor, " c"], **entries: Argument) -> Images:
    """The output pixel (x, y) shows the input at (ax + by + c, dx + ey + f); entries not given are the identity's."""
    matrix = torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float64, device=images.device).repeat(len(images), 1)
    for name, value in entries.items():
        matrix[:, "abcdef".index(name)] = value
    # The sampling point is the middle of the output pixel; the half pixel is added in floating point, before rounding.
    matrix[:, 2::3] += matrix[:, 0::3] * 0.5
    matrix[:, 2::3] += matrix[:, 1::3] * 0.5
    fixed = torch.floor(matrix * 65536.0 + 0.5).to(torch.int32)
    return resample(images, fixed, fill.expand(len(images), -1))


@in_chunks
def resample(images: Images, matrix: Int32[Tensor, "n 6"], fill: UInt8[Tensor, "n c"]) -> Images:
    """Nearest-neighbour sampling in Pillow's 16.16 fixed point, `fill` where the source lies outside."""
    n, c, h, w = images.shape
    a, b, tx, d, e, ty = matrix[:, :, None, None].unbind(1)
    x = torch.arange(w, device=images.device, dtype=torch.int32)
    y = torch.arange(h, device=images.device, dtype=torch.int32)[:, None]
    # A frame of `fill`, one pixel wide, catches every coordinate outside after clamping.
    column = (a * x + (b * y + tx)).bitwise_right_shift_(16).clamp_(-1, w)
    row = (d * x + (e * y + ty)).bitwise_right_shift_(16).clamp_(-1, h)
    index = row.add_(1).mul_(w + 2).add_(column).add_(1).view(n, 1, h * w).long()
    framed = fill[:, :, None, None].expand(n, c, h + 2, w + 2).contiguous()
    framed[:, :, 1:-1, 1:-1] = images
    return framed.view(n, c, -1).gather(2, index.expand(n, c, -1)).view(n, c, h, w)


# -- the rest ---------------------------------------------------------------------------------------------------------


def cutout(images: Images, argument: Argument, fill: UInt8[Tensor, " c"], position: Float[Tensor, "n 2"]) -> Images:
    """Cover a square of `argument` pixels a side; `position` is its center's (y, x) as a fraction of the image."""
    center = torch.floor(position.double() * torch.tensor(images.shape[2:], device=images.device)).long()
    return cover(images, center, argument.long()[:, None], fill[:, None, None])


def cover(
    images: Images, center: Int[Tensor, "n 2"], side: int | Int[Tensor, "n 1"], fill: UInt8[Tensor, "c 1 1"]
) -> Images:
    """Fill a square of side × side pixels, half of them (rounded down) before its center, as far as it lies inside."""
    _, _, h, w = images.shape
    y, x = torch.arange(h, device=images.device), torch.arange(w, device=images.device)
    top, left = center[:, :1] - side // 2, center[:, 1:] - side // 2
    rows, columns = (y >= top) & (y < top + side), (x >= left) & (x < left + side)
    return torch.where(rows[:, None, :, None] & columns[:, None, None, :], fill, images)


def identity(images: Images, argument: Argument) -> Images:
    """The images themselves."""
    return images


def _levels(images: Tensor, dtype: torch.dtype) -> Tensor:
    """The 256 values a pixel can have."""
    return torch.arange(256, device=images.device).to(dtype)
