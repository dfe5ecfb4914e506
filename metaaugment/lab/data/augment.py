"""The standard augmentation of a data set, batched on its device; drawn from a generator, applied by pure functions."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from metaaugment.distributed import drawn
from metaaugment.learned.source import shift_and_scale
from metaaugment.ops.kernels import cover

Images = UInt8[Tensor, "n c h w"]
Augmentation = Callable[[Tensor], Tensor]


def flip(images: Images, flipped: Bool[Tensor, " n"]) -> Images:
    """Left and right exchanged where `flipped`."""
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def crop(images: Images, shift: Int[Tensor, "n 2"], fill: UInt8[Tensor, "c 1 1"]) -> Images:
    """The part of each image that begins at its (row, column), filled where it reaches outside: padding and crop."""
    n, c, h, w = images.shape
    sample = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(c, device=images.device)[None, :, None, None]
    row = torch.arange(h, device=images.device) + shift[:, :1]
    column = torch.arange(w, device=images.device) + shift[:, 1:]
    moved = images[sample, channel, row.clamp(0, h - 1)[:, None, :, None], column.clamp(0, w - 1)[:, None, None, :]]
    inside = ((row >= 0) & (row < h))[:, None, :, None] & ((column >= 0) & (column < w))[:, None, None, :]
    return torch.where(inside, moved, fill)


def random_flip(generator: torch.Generator) -> Augmentation:
    """A fair coin for each image."""

    def augment(images: Tensor) -> Tensor:
        chance = drawn(lambda n: torch.rand(n, generator=generator, device=images.device), len(images))
        return flip(images, chance < 0.5)

    return augment


def random_crop(padding: int, fill: Sequence[int], generator: torch.Generator) -> Augmentation:
    """A crop of the image's own size out of the image padded by `padding` pixels."""
    outside = color(fill, generator.device)

    def augment(images: Tensor) -> Tensor:
        def draw(n: int) -> Tensor:
            return torch.randint(-padding, padding + 1, (n, 2), generator=generator, device=images.device)

        return crop(images, drawn(draw, len(images)), outside)

    return augment


def random_cutout(side: int, fill: Sequence[int], generator: torch.Generator) -> Augmentation:
    """DeVries and Taylor's Cutout: the center is any pixel, so the square may extend beyond the border."""
    inside = color(fill, generator.device)

    def augment(images: Tensor) -> Tensor:
        def draw(n: int) -> Tensor:
            rows, columns = (
                torch.randint(0, extent, (n,), generator=generator, device=images.device)
                for extent in images.shape[-2:]
            )
            return torch.stack([rows, columns], 1)

        return cover(images, drawn(draw, len(images)), side, inside)

    return augment


def in_turn(augmentations: Sequence[Augmentation]) -> Augmentation | None:
    """All of them, one after the other; None if there are none."""

    def augment(images: Tensor) -> Tensor:
        for augmentation in augmentations:
            images = augmentation(images)
        return images

    return augment if augmentations else None


def normalization(
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    layout: torch.memory_format,
    dtype: torch.dtype = torch.float32,
) -> Augmentation:
    """From uint8 to what a network takes: zero mean and unit deviation per channel."""
    shift, scale = shift_and_scale(mean, std, device, dtype)

    def prepare(images: Tensor) -> Tensor:
        return ((images - shift) * scale).to(memory_format=layout)

    return prepare


def color(fill: Sequence[int], device: torch.device) -> UInt8[Tensor, "c 1 1"]:
    return torch.tensor(fill, dtype=torch.uint8, device=device)[:, None, None]
