"""Training, validation and test splits: drawn by a seed, class by class."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from metaaugment.lab.data.files import ImageFiles
from metaaugment.lab.data.images import Images

Split = Images | ImageFiles


class Splits(NamedTuple):
    """What a reader gives: three splits, the names of the classes, and what a user should know."""

    train: Split
    val: Split
    test: Split
    classes: tuple[str, ...]
    note: str

    @classmethod
    def cut(cls, images: Images, parts: Sequence[Tensor], classes: tuple[str, ...], note: str) -> "Splits":
        """Of one set of images; `parts`: the indices of validation, test and training images."""
        val, test, train = map(images.take, parts)
        return cls(train, val, test, classes, note)


def split(labels: Int64[Tensor, " n"], seed: int, *parts: Sequence[int]) -> list[Int64[Tensor, " k"]]:
    """Indices of each part, and of the rest: parts[p][c] samples of class c, drawn by the seed, in their old order.

    With the same seed, a larger part contains a smaller one, if the parts before it are the same.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"the split seed is {seed}; it must be 0 to {2**32 - 1}")
    # RandomState and no other generator: its stream is the one that numpy promises never to change.
    random = np.random.RandomState(seed)
    counts = np.bincount(labels.numpy(), minlength=len(parts[0]))
    members = np.split(np.argsort(labels.numpy(), kind="stable"), np.cumsum(counts)[:-1])
    chosen: list[list[np.ndarray]] = [[] for _ in range(len(parts) + 1)]
    for c, mine in enumerate(members):
        ends = np.cumsum([part[c] for part in parts])
        for part, indices in zip(chosen, np.split(random.permutation(mine), ends), strict=True):
            part.append(indices)
    return [torch.from_numpy(np.sort(np.concatenate(part))) for part in chosen]


def apportion(total: int, sizes: Sequence[int]) -> list[int]:
    """`total` samples divided in proportion to the sizes of the classes; the largest remainders get one more."""
    n = sum(sizes) or 1
    shares = [total * size // n for size in sizes]
    remainders = [total * size % n for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda c: -remainders[c])
    for c in by_remainder[: total - sum(shares)]:
        shares[c] += 1
    return shares


def portion(share: float, sizes: Sequence[int], seed: int) -> list[int]:
    """A share of all samples, in proportion to the sizes of the classes.

    A class of one sample goes to one side or the other as a whole: the seed draws as many of these classes as bring the
    share to its size.
    """
    singles = [c for c, size in enumerate(sizes) if size == 1]
    divided = [size if size > 1 else 0 for size in sizes]
    shares = apportion(round(share * sum(divided)), divided)
    further = round(share * sum(sizes)) - sum(shares)
    for c in np.random.RandomState(seed).permutation(len(singles))[:further]:
        shares[singles[c]] = 1
    return shares
