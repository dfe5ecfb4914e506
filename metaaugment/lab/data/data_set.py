"""A data set: three splits, the names of the classes, and what images are normalized and filled with."""

import hashlib
from dataclasses import dataclass, replace

import torch

from metaaugment.lab.data.depth import Dim
from metaaugment.lab.data.refused import Refused
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
        return self._training_rehearsed(share, seed) if of == "training" else self._validation_rehearsed(share, seed)

    def _training_rehearsed(self, share: float, seed: int) -> "DataSet":
        sizes = torch.bincount(self.train.labels, minlength=self.num_classes).tolist()
        shares = apportion(round(share * sum(sizes)), sizes)
        counts = [min(count, max(size - 1, 0)) for count, size in zip(shares, sizes, strict=True)]
        if not sum(counts):
            of = f"{share:g}, which is none of the {len(self.train)} training images"
            raise Refused("held_back", of, "choose a larger share")
        held_back, left = split(self.train.labels, seed, counts)
        note = f"{len(held_back):,} training images {STAND_IN}"
        return replace(self, train=self.train.take(left), test=self.train.take(held_back), note=f"{self.note}; {note}")

    def _validation_rehearsed(self, share: float, seed: int) -> "DataSet":
        sizes = torch.bincount(self.val.labels, minlength=self.num_classes).tolist()
        counts = portion(share, sizes, seed)
        parts = [
            (f"{size} validation images of class {name}", count, size)
            for name, size, count in zip(self.classes, sizes, counts, strict=True)
            if size > 1
        ]
        for images, count, size in (*parts, (f"{len(self.val)} validation images", sum(counts), len(self.val))):
            if not 0 < count < size:
                what = f"{share:g}, which does not split the {images}: both parts need at least one"
                raise Refused("held_back", what, "choose a share closer to 0.5, or hold out more")
        held_back, left = split(self.val.labels, seed, counts)
        note = f"{len(held_back):,} validation images {STAND_IN}"
        return replace(self, val=self.val.take(left), test=self.val.take(held_back), note=f"{self.note}; {note}")

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any image, label or order (files: with any name or size)."""
        sha = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for part in (self.train, self.val, self.test):
            sha.update(part.digest())
        return sha.hexdigest()[:16]
