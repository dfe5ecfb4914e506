"""Labeled images in memory."""

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images and their labels; a data set for torch's DataLoader, which indexes them one by one."""

    images: UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self.images.shape[2:]
        return height, width

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[UInt8[Tensor, "c h w"], int]:
        return self.images[i], int(self.labels[i])

    def take(self, index: Int64[Tensor, " k"]) -> "Images":
        """The images at these indices, in this order."""
        return Images(self.images[index], self.labels[index])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, for values in 0..1.

        Computed with whole numbers up to the last division, so that the order of summation does not matter.
        """
        moments = [_moments(self.images[:, channel]) for channel in range(self.images.shape[1])]
        return tuple(mean for mean, _ in moments), tuple(std for _, std in moments)

    def digest(self) -> bytes:
        """SHA-256 of shapes, labels and pixels."""
        sha = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        sha.update(self.labels.cpu().numpy().astype("<i8").data)
        sha.update(self.images.cpu().contiguous().numpy().data)
        return sha.digest()


def _moments(values: UInt8[Tensor, "..."]) -> tuple[float, float]:
    counts = torch.bincount(values.flatten(), minlength=256).tolist()
    n = sum(counts)
    first = sum(value * count for value, count in enumerate(counts))
    second = sum(value**2 * count for value, count in enumerate(counts))
    return first / (255 * n), (n * second - first**2) ** 0.5 / (255 * n)
