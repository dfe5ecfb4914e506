"""What a run has seen of its policy: samples with their weights, as `look.safetensors` keeps them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaaugment.files import sealed
from metaaugment.lab.report.operations import describe
from metaaugment.lab.words import printable
from metaaugment.ops import find_space
from metaaugment.transformation import Transformation

# Share of the epochs seen that counts as recent: earlier samples were weighted by a policy that has changed since.
RECENT = 0.5


@dataclass(frozen=True, eq=False)
class Pictures:
    """Samples to show: their places among all samples, augmented, as they were, and the images most like them."""

    sample: list[int]
    images: Tensor  # uint8 [m, c, h, w]
    originals: Tensor
    negatives: Tensor | None = None  # validation images of another class, the nearest by their feature
    negative_labels: Sequence[int] = ()
    similarity: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Card:
    """A sample as it is shown: what was done to it, the weight and loss that it got, and the image most like it."""

    image: Tensor
    original: Tensor
    label: str
    functions: Sequence[str]  # both, with their arguments
    weight: float
    loss: float
    negative: Tensor | None = None
    negative_label: str = ""
    similarity: float = 0.0

    @property
    def words(self) -> str:
        return f"{self.label}, {', then '.join(self.functions)}: weight {self.weight:.2f}, loss {self.loss:.2g}"


@dataclass(frozen=True, eq=False)
class Seen:
    """Augmented samples, each with the weight that the policy gave it; 1 is the mean weight."""

    epoch: int
    space: str
    classes: list[str]
    epochs: np.ndarray
    place: np.ndarray  # in the training split
    label: np.ndarray
    transformation: Transformation
    weight: np.ndarray
    loss: np.ndarray
    pictures: Pictures

    def recent(self) -> np.ndarray:
        """Mask of the samples from the later epochs."""
        first, last = self.epochs.min(), self.epochs.max()
        return self.epochs >= last - RECENT * (last - first)

    def name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)

    def card(self, place: int, side: int | None = None) -> Card:
        """The sample at a place among the pictures; `side`: of the images in pixels, if they are shown smaller."""
        shown, sample = self.pictures, self.pictures.sample[place]
        side = side or shown.images.shape[-1]
        label, functions = int(self.label[sample]), describe(self.transformation[sample], self.space, side, side)
        weight, loss = float(self.weight[sample]), float(self.loss[sample])
        card = Card(shown.images[place], shown.originals[place], self.name(label), functions, weight, loss)
        if shown.negatives is None:
            return card
        other = self.name(shown.negative_labels[place])
        return replace(card, negative=shown.negatives[place], negative_label=other, similarity=shown.similarity[place])


def read(file: Path) -> Seen:
    """Raises ValueError for a file that is damaged or inconsistent, OSError for one that cannot be read."""
    tree = sealed.load(file, "look")
    try:
        return _seen(tree)
    except ValueError as error:
        raise ValueError(f"{file} does not fit together: {error}") from None
    except sealed.MALFORMED as error:
        raise ValueError(f"{file} is of another version ({type(error).__name__}: {error})") from None


def _seen(tree: Mapping[str, Any]) -> Seen:
    samples, shown, negatives = tree["samples"], tree["shown"], tree.get("negatives")
    n, m = len(samples["weight"]), len(shown["sample"])
    for name, part, length in (("samples", samples, n), ("shown", shown, m), ("negatives", negatives or {}, m)):
        for key, value in part.items():
            if len(value) != length:
                raise ValueError(f"its {name} have {len(value)} {key}, not {length}")
    if n == 0:
        raise ValueError("it has no samples")
    flat = [samples[key] for key in ("epoch", "place", "label", "weight", "loss")] + [shown["sample"]]
    flat += [negatives["label"], negatives["similarity"]] if negatives else []
    if any(value.ndim != 1 for value in flat):
        raise ValueError("it has several numbers for a sample where one is expected")
    label, sample = samples["label"].long(), shown["sample"].long()
    others = label if negatives is None else torch.cat([label, negatives["label"].long()])
    if others.min() < 0 or (m and not 0 <= int(sample.min()) <= int(sample.max()) < n):
        raise ValueError("it names a class or a sample that is not there")
    for images in (shown["images"], shown["originals"], *([negatives["images"]] if negatives else [])):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"it has images of {images.dtype} {tuple(images.shape)}, not uint8 [m, c, h, w]")
    find_space(tree["space"])
    t = Transformation(samples["first"], samples["second"], samples["magnitudes"].float(), samples["signs"])
    pictures = Pictures(sample.tolist(), shown["images"], shown["originals"])
    if negatives is not None:
        labels, similarity = negatives["label"].long().tolist(), negatives["similarity"].double().tolist()
        pictures = replace(pictures, negatives=negatives["images"], negative_labels=labels, similarity=similarity)
    arrays = {key: samples[key].double().numpy() for key in ("weight", "loss")}
    if not all(np.isfinite(values).all() for values in arrays.values()):
        raise ValueError("it has weights or losses that are not finite")
    names = [printable(name) for name in tree["classes"]]
    return Seen(
        int(tree["epoch"]), str(tree["space"]), names, samples["epoch"].numpy(), samples["place"].numpy(),
        label.numpy(), t, arrays["weight"], arrays["loss"], pictures,
    )  # fmt: skip
