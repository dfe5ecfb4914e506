"""Every function gives Pillow's result, bit for bit."""

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from metaaugment import OPS, PAPER_OPS, Transformation, apply
from metaaugment.lab.bench import pillow
from metaaugment.ops import kernels

from images import CONTENTS, from_pillow, make, to_pillow

SIZES = ((1, 1), (2, 3), (28, 28), (32, 32), (33, 47), (224, 224))
FILL = (17, 128, 250)
MAGNITUDES = (*map(float, range(11)), *np.random.default_rng(0).uniform(0, 10, 5).astype(np.float32).tolist(), 9.999999)


def default_argument(name: str, m: float, sign: int, height: int, width: int) -> float:
    """The default space once more, in the plain arithmetic of its definition."""
    match name:
        case "Rotate":
            return sign * 3.0 * m
        case "Posterize":
            return 8 - int(0.4 * m)
        case "Solarize":
            return 256 - 25.6 * m
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return 0.1 + 0.18 * m
        case "ShearX" | "ShearY":
            return sign * 0.03 * m
        case "TranslateX":
            return sign * m * width / 32
        case "TranslateY":
            return sign * m * height / 32
        case "Cutout":
            return int(m * 2 * width / 32)
        case _:
            return 0.0


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_equals_pillow(size: tuple[int, int], content: str, channels: int) -> None:
    image, fill = make(content, *size, channels), FILL[:channels]
    cases = list(product(range(len(OPS)), MAGNITUDES, (1, -1)))
    ops, magnitudes, signs = (torch.tensor(values) for values in zip(*cases, strict=True))
    positions = torch.rand(len(cases), 2, 2)
    identity = torch.full_like(ops, 13)
    t = Transformation(ops, identity, magnitudes[:, None].expand(-1, 2), signs[:, None].expand(-1, 2), positions)
    ours = apply(image.expand(len(cases), -1, -1, -1), t, fill=fill)
    picture = to_pillow(image)
    for index, (op, m, sign) in enumerate(cases):
        name = OPS[op].name
        argument = default_argument(name, float(np.float32(m)), sign, *size)
        position = (float(positions[index, 0, 0]), float(positions[index, 0, 1]))
        expected = from_pillow(pillow.apply_function(picture, name, argument, fill, position))
        assert torch.equal(ours[index], expected), f"{name} at {sign * m}, {content} {size}"


def test_autocontrast_of_every_range() -> None:
    """255 / (high − low) rounds differently as a reciprocal and a product; some ranges show it."""
    low, high = torch.triu_indices(256, 256, offset=1)
    images = torch.arange(256).clamp(low[:, None], high[:, None]).to(torch.uint8)[:, None, None, :]
    ours = kernels.autocontrast(images, torch.zeros(len(images), dtype=torch.float64))
    for image, result in zip(images, ours, strict=True):
        assert torch.equal(result, from_pillow(ImageOps.autocontrast(to_pillow(image))))


@pytest.mark.parametrize("name", ["Brightness", "Contrast", "Color", "Sharpness"])
def test_enhancers_with_factors_of_every_space(name: str) -> None:
    """Factors below 0.1 and up to 2, and negative ones, which no space has: blending clips, then truncates."""
    factors = torch.cat([torch.linspace(-0.5, 2.5, 61), torch.rand(200) * 2]).double()
    image = make("noise", 16, 16)
    kernel = OPS[[op.name for op in OPS].index(name)].kernel
    ours = kernel(image.expand(len(factors), -1, -1, -1).contiguous(), factors)
    for factor, result in zip(factors.tolist(), ours, strict=True):
        assert torch.equal(result, from_pillow(pillow.apply_function(to_pillow(image), name, factor, FILL)))


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_bits(bits: int) -> None:
    image = make("noise", 16, 16)
    result = kernels.posterize(image[None], torch.tensor([float(bits)], dtype=torch.float64))
    assert torch.equal(result[0], from_pillow(ImageOps.posterize(to_pillow(image), bits)))
    assert not kernels.posterize(image[None], torch.zeros(1, dtype=torch.float64)).any()


@pytest.mark.parametrize("threshold", [0, 1, 128, 255, 256])
def test_solarize_thresholds(threshold: int) -> None:
    image = make("noise", 16, 16)
    result = kernels.solarize(image[None], torch.tensor([float(threshold)], dtype=torch.float64))
    assert torch.equal(result[0], from_pillow(ImageOps.solarize(to_pillow(image), threshold)))


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (5, 300)])
def test_rotation_at_any_angle(size: tuple[int, int]) -> None:
    """TrivialAugment turns by up to 135 degrees."""
    angles = torch.cat([torch.linspace(-135, 135, 61), torch.rand(100) * 270 - 135, torch.tensor([1e-12, -1e-12])])
    image = make("photo", *size)
    fill = torch.tensor(FILL, dtype=torch.uint8)
    ours = kernels.rotate(image.expand(len(angles), -1, -1, -1).contiguous(), angles.double(), fill)
    for angle, result in zip(angles.double().tolist(), ours, strict=True):
        assert torch.equal(result, from_pillow(to_pillow(image).rotate(angle, fillcolor=FILL))), angle


def test_translation_moves_to_the_nearest_pixel() -> None:
    """Halves go up, as in Pillow; all sub-pixel positions agree with it."""
    moves = torch.arange(-40, 41).double() / 8
    image = make("noise", 4, 6)
    fill = torch.tensor(FILL, dtype=torch.uint8)
    ours = kernels.translate_x(image.expand(len(moves), -1, -1, -1).contiguous(), moves, fill)
    for move, result in zip(moves.tolist(), ours, strict=True):
        moved = to_pillow(image).transform((6, 4), Image.Transform.AFFINE, (1, 0, move, 0, 1, 0), fillcolor=FILL)
        assert torch.equal(result, from_pillow(moved)), move


@pytest.mark.parametrize("content", ["photo", "noise", "grey"])
@pytest.mark.parametrize("side", [28, 32, 224])
def test_no_function_makes_a_natural_image_constant(content: str, side: int) -> None:
    assert not made_constant(content, side)


def test_functions_that_can_make_an_image_constant() -> None:
    """Where Pillow's semantics do it; docs/decisions.md lists them with the images they do it to."""
    found = {name for content in ("two values", "one hot pixel", "narrow range") for name in made_constant(content, 32)}
    assert found == {"Solarize"}  # white on black: two values that add up to 255 meet when one of them is inverted
    # A narrow range falls into one step.
    narrow = torch.tensor([64, 79], dtype=torch.uint8).expand(1, 1, 2, 2)
    assert kernels.posterize(narrow, torch.tensor([4.0], dtype=torch.float64)).unique().tolist() == [64]
    # A tenth of the brightness or contrast leaves one value of a dark or flat image.
    dark = torch.tensor([[2, 2], [2, 3]], dtype=torch.uint8)[None, None]
    for function in (kernels.brightness, kernels.contrast):
        assert len(function(dark, torch.tensor([0.1], dtype=torch.float64)).unique()) == 1
    # A pixel one level brighter than all others is lost to rounding when colors or neighbours are averaged.
    speck = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    speck[0, 0, 1, 1] = 101
    assert len(kernels.color(speck, torch.tensor([0.1], dtype=torch.float64)).unique()) == 1
    assert len(kernels.sharpness(speck, torch.tensor([0.1], dtype=torch.float64)).unique()) == 1
    # What lies at the edge alone leaves with it.
    edge = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    edge[..., 0] = 255
    black = torch.zeros(1, dtype=torch.uint8)
    assert not kernels.translate_x(edge, torch.tensor([1.0], dtype=torch.float64), black).any()


def made_constant(content: str, side: int) -> set[str]:
    """The paper's functions that turn a non-constant image constant at some magnitude of the default space."""
    image = make(content, side, side)
    magnitudes = torch.linspace(0, 10, 41)
    cases = list(product(range(len(PAPER_OPS)), magnitudes.tolist(), (1, -1)))
    ops, m, signs = (torch.tensor(values) for values in zip(*cases, strict=True))
    t = Transformation(ops, torch.full_like(ops, 13), m[:, None].expand(-1, 2), signs[:, None].expand(-1, 2))
    flat = apply(image.expand(len(ops), -1, -1, -1), t).flatten(1)
    constant = flat.amin(1) == flat.amax(1)
    return {PAPER_OPS[op].name for op in ops[constant].unique().tolist()}
