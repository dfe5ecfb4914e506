"""Flip, crop and Cutout against slow loops over single images, what they are drawn from, and normalization."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from metaaugment.lab.data import augment
from metaaugment.ops.kernels import cover

CPU = torch.device("cpu")
FILL = {1: (77,), 3: (10, 200, 60)}
Drawn = Callable[[torch.Generator], augment.Augmentation]


def noise(n: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- second routes, image by image -----------------------------------------------------------------------------------


def slow_flip(image: np.ndarray) -> np.ndarray:
    out = np.empty_like(image)
    width = image.shape[2]
    for x in range(width):
        out[:, :, x] = image[:, :, width - 1 - x]
    return out


def slow_crop(image: np.ndarray, top: int, left: int, padding: int, fill: tuple[int, ...]) -> np.ndarray:
    """Pad all around, then cut: the textbook's random crop, whose corner is (top, left) of the padded image."""
    _, h, w = image.shape
    padded = np.empty((len(fill), h + 2 * padding, w + 2 * padding), np.uint8)
    padded[:] = np.array(fill)[:, None, None]
    padded[:, padding : padding + h, padding : padding + w] = image
    return padded[:, top : top + h, left : left + w]


def slow_cutout(image: np.ndarray, y: int, x: int, side: int, fill: tuple[int, ...]) -> np.ndarray:
    """DeVries and Taylor's code: half of the side to each side of the center, cut off at the border."""
    out, (_, h, w) = image.copy(), image.shape
    for row in range(max(0, y - side // 2), min(h, y + side // 2)):
        for column in range(max(0, x - side // 2), min(w, x + side // 2)):
            out[:, row, column] = fill
    return out


# -- pure functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (5, 8), (1, 1)])
def test_flip_equals_a_loop(channels: int, height: int, width: int) -> None:
    images, flipped = noise(6, channels, height, width), torch.tensor([True, False, True, True, False, False])
    found = augment.flip(images, flipped)
    for image, coin, result in zip(images.numpy(), flipped.tolist(), found.numpy(), strict=True):
        assert np.array_equal(result, slow_flip(image) if coin else image)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width", "padding"), [(32, 32, 4), (6, 9, 2), (4, 3, 7)])
def test_crop_equals_padding_and_a_cut(channels: int, height: int, width: int, padding: int) -> None:
    """For every corner; with 7 pixels around 4 by 3 nothing of the image may be left."""
    side = range(2 * padding + 1)
    corners = torch.tensor([(top, left) for top in side for left in side])
    images, fill = noise(len(corners), channels, height, width), FILL[channels]
    found = augment.crop(images, corners - padding, augment.color(fill, CPU))
    for image, (top, left), result in zip(images.numpy(), corners.tolist(), found.numpy(), strict=True):
        assert np.array_equal(result, slow_crop(image, top, left, padding, fill))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width", "side"), [(32, 32, 16), (20, 18, 16), (5, 7, 2), (4, 4, 16)])
def test_cutout_equals_a_loop(channels: int, height: int, width: int, side: int) -> None:
    """For every center."""
    centers = torch.tensor([(y, x) for y in range(height) for x in range(width)])
    images, fill = noise(len(centers), channels, height, width), FILL[channels]
    found = cover(images, centers, side, augment.color(fill, CPU))
    for image, (y, x), result in zip(images.numpy(), centers.tolist(), found.numpy(), strict=True):
        assert np.array_equal(result, slow_cutout(image, y, x, side, fill))


def test_cutout_by_hand() -> None:
    """Sides that are left of 16 by 16 at the border; the center is the first pixel of its lower right quarter."""
    covered = {(16, 16): (16, 16), (8, 24): (16, 16), (7, 25): (15, 15), (0, 0): (8, 8), (31, 31): (9, 9)}
    black = torch.zeros(len(covered), 1, 32, 32, dtype=torch.uint8)
    found = cover(black, torch.tensor(list(covered)), 16, augment.color((255,), CPU))[:, 0] == 255
    rows, columns = found.any(2).sum(1).tolist(), found.any(1).sum(1).tolist()
    assert dict(zip(covered, zip(rows, columns, strict=True), strict=True)) == covered
    odd = cover(black[:1], torch.tensor([[4, 4]]), 3, augment.color((9,), CPU))
    assert odd[0, 0].nonzero().tolist() == [[y, x] for y in (3, 4, 5) for x in (3, 4, 5)]


# -- draws -----------------------------------------------------------------------------------------------------------

RANDOM: dict[str, Drawn] = {
    "flip": augment.random_flip,
    "crop": lambda drawn: augment.random_crop(4, FILL[3], drawn),
    "cutout": lambda drawn: augment.random_cutout(16, FILL[3], drawn),
}


@pytest.mark.parametrize("name", RANDOM)
def test_draws_come_from_the_generator_only(name: str) -> None:
    images = noise(64, 3, 32, 32)
    before, state = images.clone(), torch.get_rng_state()
    first = RANDOM[name](generator(1))
    results = [first(images), first(images)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    again = RANDOM[name](generator(1))
    assert torch.equal(again(images), results[0])
    assert torch.equal(again(images), results[1])
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(RANDOM[name](generator(2))(images), results[0])
    assert torch.equal(images, before)
    assert (results[0].dtype, results[0].shape) == (torch.uint8, images.shape)


def test_a_coin_is_fair() -> None:
    n = 20_000
    images = torch.tensor([0, 1], dtype=torch.uint8).expand(n, 1, 1, 2)
    flipped = int((augment.random_flip(generator())(images)[:, 0, 0, 0] == 1).sum())
    # Five standard deviations: a fair coin fails once in two million.
    assert abs(flipped - n / 2) < 5 * (n / 4) ** 0.5


def assert_uniform(places: Tensor, height: int, width: int) -> None:
    """χ² over all places; its mean is the degrees of freedom, and six standard deviations are one in ten million."""
    cells = height * width
    counts = torch.bincount(places[:, 0] * width + places[:, 1], minlength=cells).double()
    assert len(counts) == cells
    expected = len(places) / cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < cells - 1 + 6 * (2 * (cells - 1)) ** 0.5


def test_shifts_are_uniform() -> None:
    """The one bright pixel in the middle shows where an image went: any of (2 · 4 + 1)² places."""
    images = torch.zeros(81 * 300, 1, 9, 9, dtype=torch.uint8)
    images[:, :, 4, 4] = 255
    places = augment.random_crop(4, (0,), generator())(images)[:, 0].nonzero()
    assert len(places) == len(images)
    assert_uniform(places[:, 1:], 9, 9)


def test_centers_are_uniform() -> None:
    """A Cutout of one pixel shows its center: any pixel of an image that is no square."""
    images = torch.zeros(40 * 500, 1, 5, 8, dtype=torch.uint8)
    places = augment.random_cutout(1, (255,), generator())(images)[:, 0].nonzero()
    assert len(places) == len(images)
    assert_uniform(places[:, 1:], 5, 8)


def test_each_image_has_its_own_draw() -> None:
    """Neighbors in a batch differ as often as two draws do: 80 of 81 times."""
    images = torch.zeros(8100, 1, 9, 9, dtype=torch.uint8)
    images[:, :, 4, 4] = 255
    places = augment.random_crop(4, (0,), generator())(images)[:, 0].nonzero()[:, 1:]
    alike = int((places[1:] == places[:-1]).all(1).sum())
    assert 50 < alike < 150  # 100 are expected, ± 10


# -- in turn, and normalization --------------------------------------------------------------------------------------


def test_in_turn_goes_from_first_to_last() -> None:
    both = augment.in_turn([lambda images: images + 1, lambda images: images * 2])
    assert both is not None
    assert both(torch.tensor([3])).tolist() == [8]
    assert augment.in_turn([]) is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalization_by_hand(layout: torch.memory_format) -> None:
    """(p / 255 − mean) / std."""
    images = torch.tensor([0, 51, 255], dtype=torch.uint8)[:, None, None, None].repeat(1, 2, 4, 4)
    found = augment.normalization((0.2, 0.5), (0.4, 0.1), CPU, layout)(images)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=layout)
    expected = torch.tensor([[-0.5, -5], [0, -3], [2, 5]])[:, :, None, None].expand(3, 2, 4, 4)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
