"""A transformation is a value, and applying it is pure."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from metaaugment import OPS, Transformation, apply, embed
from metaaugment.lab.bench import pillow
from metaaugment.ops import SPACES, find_space

from images import from_pillow, make, to_pillow

ALL = len(OPS)


def mixed(n: int, functions: int = ALL) -> Transformation:
    return Transformation.draw(torch.randint(0, functions, (n,)), torch.randint(0, functions, (n,)))


def one(first: int = 2, second: int = 13, m: float = 5.0, sign: float = 1) -> Transformation:
    pair = torch.tensor([first]), torch.tensor([second])
    return Transformation(*pair, torch.full((1, 2), m), torch.full((1, 2), sign))


def photos(n: int, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    noise = torch.randint(-20, 21, (n, channels, height, width))
    return (make("photo", height, width, channels).int() + noise).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 32, 32), (3, 33, 47)], ids=str)
def test_mixed_batch_equals_pillow_one_by_one(shape: tuple[int, int, int], space: str) -> None:
    """Both functions in order, all sixteen, whatever stands beside them in the batch."""
    channels, height, width = shape
    n, fill = 300, (9, 99, 199)[:channels]
    images, t = photos(n, height, width, channels), mixed(n)
    results = apply(images, t, space, fill)
    ops = torch.stack([t.first, t.second], 1)
    arguments = find_space(space).arguments(ops, t.magnitudes, t.signs, height, width)
    assert t.positions is not None
    for i in range(n):
        picture = to_pillow(images[i])
        for slot in range(2):
            y, x = t.positions[i, slot].tolist()
            name = OPS[int(ops[i, slot])].name
            picture = pillow.apply_function(picture, name, float(arguments[i, slot]), fill, (y, x))
        assert torch.equal(results[i], from_pillow(picture)), f"{[OPS[j].name for j in ops[i]]} {t.magnitudes[i]}"


def test_a_sample_does_not_depend_on_its_batch() -> None:
    images, t = photos(64), mixed(64)
    together = apply(images, t)
    assert torch.equal(together, torch.cat([apply(images[i : i + 1], t[i : i + 1]) for i in range(64)]))
    order = torch.randperm(64)
    assert torch.equal(together[order], apply(images[order], t[order]))
    assert apply(images[:0], t[:0]).shape == (0, 3, 32, 32)
    images, t = photos(40, 224, 224), mixed(40)  # above the size of a chunk: kernels see a few images at a time
    assert torch.equal(apply(images, t), torch.cat([apply(images[i : i + 1], t[i : i + 1]) for i in range(40)]))


def test_longer_sequences_are_transformations_in_turn() -> None:
    """A pair is its first function with Identity behind it, then its second; so three functions are two of these."""
    images, t = photos(20), mixed(20, functions=14)
    identity = torch.full((20,), 13)
    once = apply(images, Transformation(t.first, identity, t.magnitudes, t.signs))
    assert torch.equal(apply(once, Transformation(identity, t.second, t.magnitudes, t.signs)), apply(images, t))


def test_applying_is_pure() -> None:
    images, t = photos(50), mixed(50)
    before, state = images.clone(), torch.get_rng_state()
    assert torch.equal(apply(images, t), apply(images, t))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
    identity = torch.full((50,), 13)
    result = apply(images, Transformation.draw(identity, identity))
    assert torch.equal(result, images)
    assert result.data_ptr() != images.data_ptr()


def test_memory_layout_makes_no_difference() -> None:
    images, t = photos(30), mixed(30)
    expected = apply(images, t)
    assert torch.equal(apply(images.to(memory_format=torch.channels_last), t), expected)
    spread = torch.zeros(60, 3, 32, 64, dtype=torch.uint8)
    spread[::2, :, :, ::2] = images
    assert torch.equal(apply(spread[::2, :, :, ::2], t), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_float_images_give_the_uint8_result_over_255(dtype: torch.dtype) -> None:
    images, t = photos(100), mixed(100)
    result = apply((images.double() / 255).to(dtype), t, fill=7)
    assert result.dtype == dtype
    if dtype != torch.bfloat16:  # which has too few digits to hold 256 levels
        assert torch.equal(result, apply(images, t, fill=7).to(dtype) / 255)
    assert 0 <= result.min() <= result.max() <= 1


def test_cutout_is_centered_where_no_position_is_given() -> None:
    result = apply(torch.ones(1, 1, 32, 32, dtype=torch.uint8), one(first=15, m=4.0))
    assert (result[0, 0] == 0).nonzero().aminmax(dim=0).min.tolist() == [12, 12]
    assert (result == 0).sum() == 8 * 8


def test_draws_come_from_the_generator() -> None:
    first, second = torch.randint(0, 14, (2, 1000))
    state = torch.get_rng_state()
    drawn = [Transformation.draw(first, second, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[0].magnitudes, drawn[1].magnitudes)
    assert torch.equal(drawn[0].signs, drawn[1].signs)
    assert not torch.equal(drawn[0].magnitudes, drawn[2].magnitudes)


def test_draws_are_uniform_with_fair_signs() -> None:
    """Within five standard errors."""
    n = 20_000
    t = Transformation.draw(torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long))
    assert 0 <= t.magnitudes.min() < 0.01
    assert 9.99 < t.magnitudes.max() <= 10
    assert abs(t.magnitudes.mean().item() - 5) < 5 * 10 / math.sqrt(12 * 2 * n)
    assert abs(t.signs.double().mean().item()) < 5 / math.sqrt(2 * n)
    assert t.positions is not None
    assert (t.positions.mean(0) - 0.5).abs().max() < 5 / math.sqrt(12 * n)
    drawn = torch.cat([t.magnitudes, t.signs, t.positions.flatten(1)], 1)
    correlation = np.corrcoef(drawn.numpy().T) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(n)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (torch.zeros(1, 3, 4, 4, dtype=torch.int64), r"dtype torch.int64; use torch.uint8, or floating point"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.bool), r"dtype torch.bool"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), r"shape \(3, 4, 4\); a batch is \[n, channels, height, width\]"),
        (torch.zeros(1, 2, 4, 4, dtype=torch.uint8), r"2 channels \(its second axis\); 1 \(grey\) and 3 \(RGB\)"),
        (torch.zeros(1, 4, 4, 4, dtype=torch.uint8), r"4 channels"),
        (torch.zeros(1, 3, 0, 4, dtype=torch.uint8), r"0 by 4 pixels; sides of 1 to 16383"),
        (torch.zeros(1, 1, 20_000, 1, dtype=torch.uint8), r"20000 by 1 pixels"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), r"2 images but 1 transformations"),
        (torch.full((1, 3, 4, 4), 1.5), r"images holds 1.5; floating-point images lie in \[0, 1\]"),
        (torch.full((1, 3, 4, 4), math.nan), r"images holds nan"),
        (np.zeros((1, 3, 4, 4), np.uint8), r"images is a ndarray; give a torch tensor"),
        (None, r"images is a NoneType; give a torch tensor"),
    ],
)
def test_wrong_images_are_named(images: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        apply(images, one())


@pytest.mark.parametrize("fill", [-1, 256, (1, 2), (1, 2, 3, 4), 0.5, None, "abc", [1, "2", 3]])
def test_wrong_fill_is_named(fill: int) -> None:
    with pytest.raises(
        ValueError, match=rf"fill is {re.escape(str(fill))}; .* whole number from 0 to 255, or 3 of them"
    ):
        apply(photos(1), one(), fill=fill)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (torch.tensor([16]), torch.tensor([0]), "first holds the function index 16"),
        (torch.tensor([0]), torch.tensor([-1]), "second holds the function index -1"),
        (torch.tensor([0.0]), torch.tensor([0]), "first has dtype torch.float32"),
        (torch.tensor([True]), torch.tensor([0]), "first is torch.bool"),
        (torch.tensor([0, 1]), torch.tensor([0]), r"second has shape \(1,\)"),
        (torch.tensor([[0]]), torch.tensor([[0]]), r"first has shape \(1, 1\)"),
        ([0], [0], "first is list; it must be a tensor"),
    ],
)
def test_drawing_for_wrong_functions_is_named(first: torch.Tensor, second: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Transformation.draw(first, second)


def test_the_parts_of_a_batch() -> None:
    t = mixed(5)
    assert len(t[2]) == 1
    for place in (np.int64(2), torch.tensor(2)):
        assert torch.equal(t[place].magnitudes, t[2].magnitudes)
    assert len(list(t)) == 5
    assert torch.equal(torch.cat([part.magnitudes for part in t]), t.magnitudes)
    with pytest.raises(IndexError):
        t[5]


def test_fill_as_array_or_tensor() -> None:
    images, t = photos(20), mixed(20)
    expected = apply(images, t, fill=(3, 4, 5))
    for fill in ([3, 4, 5], np.array([3, 4, 5]), torch.tensor([3, 4, 5])):
        assert torch.equal(apply(images, t, fill=fill), expected)  # type: ignore[arg-type]
        floats = apply(images / 255, t, fill=fill)  # type: ignore[arg-type]
        assert torch.equal((floats * 255).round().to(torch.uint8), expected)
    assert torch.equal(apply(images, t, fill=np.int64(9)), apply(images, t, fill=9))  # type: ignore[arg-type]


def test_torchs_default_dtype_has_no_say() -> None:
    images, t = photos(100), mixed(100)
    expected = apply(images, t), embed(mixed(3, functions=14)).dtype
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(apply(images, t), expected[0])
        assert embed(mixed(3, functions=14)).dtype == expected[1]
    finally:
        torch.set_default_dtype(torch.float32)


ZEROS, ONES = torch.zeros(2, dtype=torch.long), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *((lambda m=m: one(m=m), r"magnitudes holds \S+; magnitudes lie in \[0, 10\]")
          for m in (-0.01, 10.01, math.nan, math.inf)),
        (lambda: one(first=-1), r"first holds the function index -1; indices are 0 to 15"),
        (lambda: one(first=16), r"first holds the function index 16; indices are 0 to 15"),
        (lambda: one(sign=0.5), r"signs holds 0.5; signs are \+1 or -1"),
        (lambda: Transformation(ZEROS, ZEROS, ONES[0], ONES), r"magnitudes has shape \(2,\); .* must be \(2, 2\)"),
        (lambda: Transformation(ZEROS, torch.zeros(3).long(), ONES, ONES), r"second has shape \(3,\)"),
        (lambda: Transformation(ZEROS.float(), ZEROS, ONES, ONES),
         r"first has dtype torch.float32; function indices must be integers"),
        (lambda: Transformation(ZEROS, ZEROS, ONES, ONES, torch.full((2, 2, 2), 32.0)),
         r"positions holds 32; positions are fractions"),
        (lambda: apply(photos(1), one(), space="imagenet"), "unknown space 'imagenet'; choose one of metaaugment"),
    ],
)  # fmt: skip
def test_wrong_parts_are_named(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
