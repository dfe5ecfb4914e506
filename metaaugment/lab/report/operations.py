"""The image functions: what a magnitude means to each, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaaugment.lab.data.files import CorruptImage, read_image
from metaaugment.ops import INDEX, OPS, PAPER_OPS, Space, find_space
from metaaugment.transformation import Transformation, apply

PICTURE_MAGNITUDES = (0.0, 2.5, 5.0, 7.5, 10.0)
PICTURE_SIDE = 160


# What a function's argument is, and how the function and its argument are put into words.
MEANING = {
    "AutoContrast": ("none", "stretch each color to its full range"),
    "Equalize": ("none", "equalize each color"),
    "Rotate": ("degrees to the left", "rotate by {:.4g} degrees"),
    "Posterize": ("bits kept", "keep {:.0f} bits of each color"),
    "Solarize": ("inverted from here on", "invert values from {:.4g} on"),
    "Color": ("factor, 1 is neutral", "color × {:.4g}"),
    "Contrast": ("factor, 1 is neutral", "contrast × {:.4g}"),
    "Brightness": ("factor, 1 is neutral", "brightness × {:.4g}"),
    "Sharpness": ("factor, 1 is neutral", "sharpness × {:.4g}"),
    "ShearX": ("pixels a row", "shear sideways by {:.4g} pixels a row"),
    "ShearY": ("pixels a column", "shear upwards by {:.4g} pixels a column"),
    "TranslateX": ("pixels to the left", "move sideways by {:.4g} pixels"),
    "TranslateY": ("pixels up", "move up or down by {:.4g} pixels"),
    "Cutout": ("pixels a side", "fill a square of {:.4g} pixels"),
    "Invert": ("none", "invert"),
    "Identity": ("none", "do nothing"),
}


def level_rows(space: str | Space, size: int, magnitudes: Sequence[float] = range(11)) -> list[list[str]]:
    """A header, then one row per function: its name, its argument at some magnitudes, and what the argument is."""
    space = find_space(space)
    m = torch.tensor(magnitudes, dtype=torch.float64)
    rows = [["function", *(f"{value:g}" for value in magnitudes), "argument"]]
    for index, op in enumerate(OPS):
        cells, (unit, _) = [""] * len(m), MEANING[op.name]
        if op.magnitude:
            arguments = space.arguments(torch.full((len(m),), index), m, torch.ones(len(m)), size, size)
            cells = [f"{argument:.4g}" for argument in arguments]
            unit = f"± {unit}" if space.levels[op.name].signed else unit
        rows.append([op.name, *cells, unit])
    return rows


def describe(transformation: Transformation, space: str | Space, height: int, width: int) -> Sequence[str]:
    """The two functions of one transformation in words: "Rotate 12", with the argument the space gives."""
    t, functions = transformation, torch.stack([transformation.first, transformation.second], -1)
    arguments = find_space(space).arguments(functions, t.magnitudes.double(), t.signs, height, width)
    ops = [OPS[index] for index in functions.flatten().tolist()]
    pairs = zip(ops, arguments.flatten().tolist(), strict=True)
    return [f"{op.name} {argument:.3g}" if op.magnitude else op.name for op, argument in pairs]


def print_table(space: str | Space, size: int) -> None:
    """The level table of a space, for a terminal of 80 columns."""
    space = find_space(space)
    header, *rows = level_rows(space, size, PICTURE_MAGNITUDES)
    title = f"Space {space.name}: each argument at five magnitudes, {size}×{size} pixels"
    caption = f"{space.source}. ± means a random sign."
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for column in header:
        table.add_column(column, justify="left" if column in ("function", "argument") else "right", no_wrap=True)
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index == len(PAPER_OPS) - 1)
    Console().print(table)


def draw(file: Path, image: Path | None, space: str | Space) -> None:
    """A picture of the paper's functions at five magnitudes, on a photo."""
    from matplotlib.figure import Figure  # here, because the table needs none of it

    from metaaugment.lab.report.picture import save, show

    space = find_space(space)
    photo = _square(image)
    rows, columns = -(-len(PAPER_OPS) // 2), len(PICTURE_MAGNITUDES)  # of a block; there are two, side by side
    figure = Figure(figsize=(2 * columns * 1.15 + 1.2, rows * 1.25), layout="constrained")
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    for index, op in enumerate(PAPER_OPS):
        block, row = divmod(index, rows)
        t = Transformation(
            torch.full((columns,), index),
            torch.full((columns,), INDEX["Identity"]),
            torch.tensor(PICTURE_MAGNITUDES)[:, None].expand(columns, 2),
            torch.ones(columns, 2),
        )
        shown = apply(photo.expand(columns, -1, -1, -1), t, space, fill=128)
        for column, picture in enumerate(shown):
            axis = axes[row, block * columns + column]
            show(axis, picture)
            for edge in axis.spines.values():
                edge.set_visible(False)
            if column == 0:
                axis.set_ylabel(op.name, fontsize=9)
            if row == 0:
                axis.set_title(f"m = {PICTURE_MAGNITUDES[column]:g}", fontsize=9)
    figure.suptitle(f"The paper's {len(PAPER_OPS)} functions at five magnitudes, space {space.name}")
    save(figure, file)


def _square(file: Path | None) -> Tensor:
    """The middle of a photo, uint8 [1, 3, side, side]."""
    if file is None:
        from sklearn.datasets import load_sample_image

        photo = Image.fromarray(load_sample_image("china.jpg"))
    else:
        try:
            photo = read_image(file)
        except CorruptImage as error:
            raise ValueError(f"{error}; give another") from None
    middle = ImageOps.fit(photo, (PICTURE_SIDE, PICTURE_SIDE))
    return torch.from_numpy(np.array(middle)).permute(2, 0, 1)[None]
