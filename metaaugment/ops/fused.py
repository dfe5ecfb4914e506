"""One function per sample on a GPU: two Triton launches per slot, whatever the mix of functions in the batch.

The first launch makes the tables of the point functions, some of which need sums over the image; the second computes
pixels. A program works on one image, so the function is a scalar to it and each `if` below is a true branch. Results
equal those of `kernels.py` bit for bit: there is no fused multiply-add, and precisions are the same.

Nothing here waits for the device, so after a first call, which compiles, a call can be captured in a CUDA graph.
Without a GPU, Triton's interpreter (TRITON_INTERPRET=1) runs it on the CPU, as the tests do.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

import contextlib

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from metaaugment.ops.space import Space, level_table
from metaaugment.ops.table import INDEX

AUTOCONTRAST = tl.constexpr(INDEX["AutoContrast"])
EQUALIZE = tl.constexpr(INDEX["Equalize"])
ROTATE = tl.constexpr(INDEX["Rotate"])
POSTERIZE = tl.constexpr(INDEX["Posterize"])
SOLARIZE = tl.constexpr(INDEX["Solarize"])
COLOR = tl.constexpr(INDEX["Color"])
CONTRAST = tl.constexpr(INDEX["Contrast"])
BRIGHTNESS = tl.constexpr(INDEX["Brightness"])
SHARPNESS = tl.constexpr(INDEX["Sharpness"])
SHEAR_X = tl.constexpr(INDEX["ShearX"])
SHEAR_Y = tl.constexpr(INDEX["ShearY"])
TRANSLATE_X = tl.constexpr(INDEX["TranslateX"])
TRANSLATE_Y = tl.constexpr(INDEX["TranslateY"])
INVERT = tl.constexpr(INDEX["Invert"])
CUTOUT = tl.constexpr(INDEX["Cutout"])

PIXELS_A_PROGRAM = 1024


def apply_functions(
    images: UInt8[Tensor, "n c h w"],
    ops: Int[Tensor, "n k"],
    magnitudes: Float[Tensor, "n k"],
    signs: Shaped[Tensor, "n k"],
    positions: Float[Tensor, "n k 2"],
    space: Space,
    fill: tuple[int, ...],
) -> UInt8[Tensor, "n c h w"]:
    """Apply to each image its k functions in order; `ops` holds their indices in `OPS`. All tensors on one GPU."""
    n, channels, height, width = images.shape
    pixels = height * width
    tiles = triton.cdiv(pixels, PIXELS_A_PROGRAM)
    tables = torch.empty((n, channels, 256), dtype=torch.uint8, device=images.device)
    drawn = (ops.contiguous(), magnitudes.contiguous(), signs.contiguous(), level_table(space, images.device))
    positions, slots = positions.contiguous(), ops.shape[1]
    packed_fill = sum(color << 8 * channel for channel, color in enumerate(fill))
    on_device = torch.cuda.device(images.device) if images.is_cuda else contextlib.nullcontext()
    with on_device:
        for slot in range(slots):
            out = torch.empty_like(images)
            make_tables[(n * channels,)](
                images, *drawn, tables, slot, slots, height, width,
                CHANNELS=channels, BLOCK=1024 if pixels <= 1024 else 4096, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            make_pixels[(n * tiles,)](
                images, *drawn, positions, tables, out, slot, slots, height, width, tiles, packed_fill,
                CHANNELS=channels, BLOCK=PIXELS_A_PROGRAM, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            images = out
    return images


_SIZES = ["slot", "slots", "height", "width"]  # specializing on their values is not worth the compilations


@triton.jit(do_not_specialize=_SIZES)
def make_tables(
    images, ops, magnitudes, signs, levels, tables, slot, slots, height, width,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The 256 output values of one channel of one image, where its function is a point function."""
    program = tl.program_id(0).to(tl.int64)
    sample = program // CHANNELS
    op = tl.load(ops + sample * slots + slot)
    argument = argument_of(op, magnitudes, signs, levels, sample * slots + slot, height, width)
    factor = argument.to(tl.float32)
    pixels = height * width
    source = images + program * pixels
    table = tables + program * 256 + tl.arange(0, 256)
    level = tl.arange(0, 256)
    block = tl.arange(0, BLOCK)

    if op == AUTOCONTRAST:
        low = tl.full((), 255, tl.int32)
        high = tl.full((), 0, tl.int32)
        for begin in range(0, pixels, BLOCK):
            inside = begin + block < pixels
            low = tl.minimum(low, tl.min(tl.load(source + begin + block, mask=inside, other=255).to(tl.int32)))
            high = tl.maximum(high, tl.max(tl.load(source + begin + block, mask=inside, other=0).to(tl.int32)))
        scale = tl.full((), 255.0, tl.float64) / tl.maximum(high - low, 1).to(tl.float64)
        offset = -low.to(tl.float64) * scale
        stretched = (level.to(tl.float64) * scale + offset).to(tl.int32)
        stretched = tl.minimum(tl.maximum(stretched, 0), 255)
        tl.store(table, tl.where(high > low, stretched, level).to(tl.uint8))
    elif op == EQUALIZE:
        count = tl.zeros((256,), tl.int32)
        for begin in range(0, pixels, BLOCK):
            inside = begin + block < pixels
            values = tl.load(source + begin + block, mask=inside, other=0).to(tl.int32)
            count += tl.histogram(values, 256, mask=inside)
        brightest = tl.max(tl.where(count > 0, level, 0))
        step = (pixels - tl.sum(tl.where(level == brightest, count, 0))) // 255
        below = tl.cumsum(count, 0) - count
        equal = tl.minimum((step // 2 + below) // tl.maximum(step, 1), 255)
        tl.store(table, tl.where(step > 0, equal, level).to(tl.uint8))
    elif op == POSTERIZE:
        tl.store(table, (level & (256 - (1 << (8 - argument.to(tl.int32))))).to(tl.uint8))
    elif op == SOLARIZE:
        tl.store(table, tl.where(level.to(tl.float64) < argument, level, 255 - level).to(tl.uint8))
    elif op == INVERT:
        tl.store(table, (255 - level).to(tl.uint8))
    elif op == BRIGHTNESS:
        tl.store(table, blend(tl.full((), 0.0, tl.float32), level.to(tl.float32), factor))
    elif op == CONTRAST:
        total = tl.full((), 0, tl.int64)
        first = images + sample * CHANNELS * pixels
        for begin in range(0, pixels, BLOCK):
            inside = begin + block < pixels
            total += tl.sum(tl.where(inside, luma(first + begin + block, inside, pixels, CHANNELS), 0).to(tl.int64))
        mean = (2 * total + pixels) // (2 * pixels)
        tl.store(table, blend(mean.to(tl.float32), level.to(tl.float32), factor))


@triton.jit(do_not_specialize=[*_SIZES, "tiles", "fill"])
def make_pixels(
    images, ops, magnitudes, signs, levels, positions, tables, out, slot, slots, height, width, tiles, fill,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A stretch of pixels of one image, all channels."""
    program = tl.program_id(0).to(tl.int64)
    sample = program // tiles
    op = tl.load(ops + sample * slots + slot)
    argument = argument_of(op, magnitudes, signs, levels, sample * slots + slot, height, width)
    factor = argument.to(tl.float32)
    pixels = height * width
    pixel = ((program % tiles) * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    inside = pixel < pixels
    y = pixel // width
    x = pixel - y * width
    source = images + sample * CHANNELS * pixels + pixel
    target = out + sample * CHANNELS * pixels + pixel

    point = (op == AUTOCONTRAST) | (op == EQUALIZE) | (op == POSTERIZE) | (op == SOLARIZE)
    point = point | (op == CONTRAST) | (op == BRIGHTNESS) | (op == INVERT)
    geometric = (op == ROTATE) | (op == SHEAR_X) | (op == SHEAR_Y) | (op == TRANSLATE_X) | (op == TRANSLATE_Y)
    if point:
        look_up(source, target, inside, pixels, tables + sample * CHANNELS * 256, CHANNELS)
    elif geometric:
        resample(source - pixel, target, inside, x, y, op, argument, height, width, fill, CHANNELS)
    elif op == SHARPNESS:
        sharpen(source, target, inside, x, y, factor, height, width, CHANNELS)
    elif op == CUTOUT:
        cut_out(
            source,
            target,
            inside,
            x,
            y,
            argument,
            positions + (sample * slots + slot) * 2,
            height,
            width,
            fill,
            CHANNELS,
        )
    elif op == COLOR:
        colorize(source, target, inside, factor, pixels, CHANNELS)
    else:
        for channel in tl.static_range(CHANNELS):
            value = tl.load(source + channel * pixels, mask=inside, other=0)
            tl.store(target + channel * pixels, value, mask=inside)


@triton.jit
def look_up(source, target, inside, pixels, table, CHANNELS: tl.constexpr):
    for channel in tl.static_range(CHANNELS):
        value = tl.load(source + channel * pixels, mask=inside, other=0).to(tl.int32)
        tl.store(target + channel * pixels, tl.load(table + channel * 256 + value), mask=inside)


@triton.jit
def resample(image, target, inside, x, y, op, argument, height, width, fill, CHANNELS: tl.constexpr):
    a, b, tx, d, e, ty = matrix_of(op, argument, height, width)
    column = (a * x + (b * y + tx)) >> 16
    row = (d * x + (e * y + ty)) >> 16
    found = inside & (column >= 0) & (column < width) & (row >= 0) & (row < height)
    for channel in tl.static_range(CHANNELS):
        place = channel * height * width
        value = tl.load(image + place + row * width + column, mask=found, other=0)
        tl.store(target + place, tl.where(found, value, fill_of(fill, channel)), mask=inside)


@triton.jit
def sharpen(source, target, inside, x, y, factor, height, width, CHANNELS: tl.constexpr):
    inner = inside & (x > 0) & (x < width - 1) & (y > 0) & (y < height - 1)
    for channel in tl.static_range(CHANNELS):
        center = source + channel * height * width
        value = tl.load(center, mask=inside, other=0).to(tl.int32)
        total = 4 * value
        for dy in tl.static_range(-1, 2):
            for dx in tl.static_range(-1, 2):
                total += tl.load(center + dy * width + dx, mask=inner, other=0).to(tl.int32)
        smooth = ((2 * total + 13) // 26).to(tl.float32)
        sharp = blend(smooth, value.to(tl.float32), factor)
        tl.store(target + channel * height * width, tl.where(inner, sharp, value.to(tl.uint8)), mask=inside)


@triton.jit
def cut_out(source, target, inside, x, y, argument, position, height, width, fill, CHANNELS: tl.constexpr):
    side = argument.to(tl.int32)
    top = tl.floor(tl.load(position).to(tl.float64) * height).to(tl.int32) - side // 2
    left = tl.floor(tl.load(position + 1).to(tl.float64) * width).to(tl.int32) - side // 2
    covered = (y >= top) & (y < top + side) & (x >= left) & (x < left + side)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(source + channel * height * width, mask=inside, other=0)
        tl.store(target + channel * height * width, tl.where(covered, fill_of(fill, channel), value), mask=inside)


@triton.jit
def colorize(source, target, inside, factor, pixels, CHANNELS: tl.constexpr):
    # A single channel is its own luma, so blending leaves it as it is.
    grey = luma(source, inside, pixels, CHANNELS).to(tl.float32)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(source + channel * pixels, mask=inside, other=0).to(tl.float32)
        tl.store(target + channel * pixels, blend(grey, value, factor), mask=inside)


@triton.jit
def fill_of(fill, channel: tl.constexpr):
    return ((fill >> (8 * channel)) & 255).to(tl.uint8)


@triton.jit
def argument_of(op, magnitudes, signs, levels, place, height, width):
    """`Level`'s formula in float64."""
    row = levels + op * 7
    around, start, slope = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    per, of, rounding, signed = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    unit = tl.where(per == 1, width, tl.where(per == 2, height, 1)).to(tl.float64)
    value = (tl.load(magnitudes + place).to(tl.float64) * slope + start) * unit / of
    nearest = tl.floor(value + 0.5)
    odd = nearest - 2 * tl.floor(nearest * 0.5) == 1
    nearest = tl.where((nearest - value == 0.5) & odd, nearest - 1, nearest)  # halves go to the even neighbour
    truncated = value.to(tl.int64).to(tl.float64)
    value = tl.where(rounding == 1, truncated, tl.where(rounding == 2, nearest, value))
    return around + tl.where(signed == 1, tl.load(signs + place).to(tl.float64), 1.0) * value


@triton.jit
def matrix_of(op, argument, height, width):
    """The affine matrix of a geometric function in 16.16 fixed point, sampling at the middle of a pixel."""
    one = tl.full((), 1.0, tl.float64)
    a, e = one, one
    b = tl.where(op == SHEAR_X, argument, 0.0)
    d = tl.where(op == SHEAR_Y, argument, 0.0)
    shift = tl.floor(argument + 0.5)
    tx = tl.where(op == TRANSLATE_X, shift, 0.0)
    ty = tl.where(op == TRANSLATE_Y, shift, 0.0)
    if op == ROTATE:
        angle = -((argument - tl.floor(argument / 360.0) * 360.0) * 0.017453292519943295)
        cos = tl.floor(tl.cos(angle) * 1e15 + 0.5) / 1e15
        sin = tl.floor(tl.sin(angle) * 1e15 + 0.5) / 1e15
        middle_x = width.to(tl.float64) / 2.0
        middle_y = height.to(tl.float64) / 2.0
        a, b, d, e = cos, sin, -sin, cos
        tx = cos * -middle_x + sin * -middle_y + middle_x
        ty = -sin * -middle_x + cos * -middle_y + middle_y
    tx = tx + a * 0.5 + b * 0.5
    ty = ty + d * 0.5 + e * 0.5
    return fixed(a), fixed(b), fixed(tx), fixed(d), fixed(e), fixed(ty)


@triton.jit
def fixed(value):
    return tl.floor(value * 65536.0 + 0.5).to(tl.int32)


@triton.jit
def blend(first, second, factor):
    mixed = first + (second - first) * factor
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32).to(tl.uint8)


@triton.jit
def luma(red, inside, pixels, CHANNELS: tl.constexpr):
    """Pillow's mode L of the pixels at `red`; each further channel lies `pixels` further on."""
    value = tl.load(red, mask=inside, other=0).to(tl.int32)
    if CHANNELS == 3:
        green = tl.load(red + pixels, mask=inside, other=0).to(tl.int32)
        blue = tl.load(red + 2 * pixels, mask=inside, other=0).to(tl.int32)
        value = (value * 19595 + green * 38470 + blue * 7471 + 32768) >> 16
    return value
