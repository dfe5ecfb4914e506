"""A data set: three splits, the names of the classes, and what images are normalized and filled with."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from metaaugment.lab.data.depth import Dim
from metaaugment.lab.data.entry import Refused
from metaaugment.lab.data.splits import Split, apportion, portion, split

STAND_IN = "stand in for the test images, which are not looked at"


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training, validation and test images.

    `mean`, `std`: of each channel, for values in 0..1. `fill`: the color of what geometry uncovers, 0..255.
    `note`: what a user should know, such as how it was split. `dim`: images of which few levels are left, if there are.
    """

    name: str
    train: Split
    val: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fill: tuple[int, ...]
    note: str = ""
    dim: Dim | None = None

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def channels(self) -> int:
        return len(self.mean)

    def rehearsal(self, share: float, seed: int, of: str = "validation") -> "DataSet":
        """The same without its test images: a share of the validation or training images, drawn class by class, stands
        in for them.

        A class with a single validation image is held back or left as a whole: the seed draws as many of these classes
        as bring the share to its size. Of the training images of a class, at least one is always left.
        """
        name = {"training": "train", "validation": "val"}[of]
        part: Split = getattr(self, name)
        sizes = torch.bincount(part.labels, minlength=self.num_classes).tolist()
        counts = self._of_training(share, sizes) if of == "training" else self._of_validation(share, sizes, seed)
        held_back, left = split(part.labels, seed, counts)
        note = f"{self.note}; {len(held_back):,} {of} images {STAND_IN}"
        return replace(self, **{name: part.take(left)}, test=part.take(held_back), note=note)

    def _of_training(self, share: float, sizes: Sequence[int]) -> list[int]:
        """How many images of each class are held back."""
        shares = apportion(round(share * sum(sizes)), sizes)
        counts = [min(count, max(size - 1, 0)) for count, size in zip(shares, sizes, strict=True)]
        if not sum(counts):
            none = f"{share:g}, which is none of the {sum(sizes)} training images"
            raise Refused("held_back", none, "choose a larger share")
        return counts

    def _of_validation(self, share: float, sizes: Sequence[int], seed: int) -> list[int]:
        counts = portion(share, sizes, seed)
        divided = [part for part in zip(self.classes, counts, sizes, strict=True) if part[2] > 1]
        parts = [(f"{size} validation images of class {name}", count, size) for name, count, size in divided]
        for images, count, size in (*parts, (f"{sum(sizes)} validation images", sum(counts), sum(sizes))):
            if not 0 < count < size:
                undivided = f"{share:g}, which does not split the {images}: both parts need at least one"
                raise Refused("held_back", undivided, "choose a share closer to 0.5, or hold out more")
        return counts

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any image, label or order (files: with any name or size)."""
        sha = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for part in (self.train, self.val, self.test):
            sha.update(part.digest())
        return sha.hexdigest()[:16]
