"""Photos of the user's own, augmented and weighted by a learned policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from matplotlib.figure import Figure
from torch import Tensor

from metaaugment.lab.data.files import AREA_MIN, WHITE, CorruptImage, evaluation_view, read_image
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.report.operations import describe
from metaaugment.lab.report.picture import show
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learned.source import Source


def read(
    files: Sequence[Path], source: Source, area_min: float = AREA_MIN, white: int = WHITE
) -> UInt8[Tensor, "n c h w"]:
    """What evaluation sees of each picture, in the size and channels that a policy was learned on."""
    for file in files:
        if file.is_dir():
            raise ValueError(f"{file} is a folder; name pictures, such as {file}/*.jpg")
    (height, width), side = source.size, max(source.size)
    left, top = (side - width) // 2, (side - height) // 2
    box, mode = (left, top, left + width, top + height), "RGB" if source.channels == 3 else "L"
    try:
        views = [evaluation_view(read_image(file, white), side, area_min).crop(box).convert(mode) for file in files]
    except CorruptImage as error:
        raise ValueError(f"{error}; leave it out") from None
    pixels = torch.stack([torch.from_numpy(np.array(view)).view(height, width, -1) for view in views])
    return pixels.permute(0, 3, 1, 2).contiguous()


def as_learned(policy: LearnedPolicy) -> dict[str, Any]:
    """How the run that learned a policy saw images, for `read`; nothing of a policy that no run of ours has learned."""
    try:
        recipe = Recipe.from_json(policy.provenance["recipe"])
    except (KeyError, ValueError):
        return {}
    return {"area_min": recipe.area_min, "white": recipe.white}


def copies(
    images: UInt8[Tensor, "n c h w"], policy: LearnedPolicy, count: int, generator: torch.Generator | None = None
) -> Figure:
    """Each image in a row of its own, followed by augmented copies; 1 is the mean weight of a row."""
    figure = Figure(figsize=(1.5 * (count + 1), 1.95 * len(images) + 0.3), layout="constrained")
    figure.suptitle("Augmented copies with their weights; 1 is the mean of a row", fontsize=9)
    for row, image in zip(figure.subplots(len(images), count + 1, squeeze=False), images, strict=True):
        augmented, t = policy.transform(image.expand(count, -1, -1, -1), generator)
        weights = policy.weights(augmented, t) * count
        for axis, picture in zip(row, (image, *augmented), strict=True):
            show(axis, picture)
        row[0].set_title("original", fontsize=6.5)
        for place, axis in enumerate(row[1:]):
            words = "\n".join(describe(t[place], policy.space, *image.shape[-2:]))
            axis.set_title(f"{float(weights[place]):.2f}\n{words}", fontsize=6.5)
    return figure
