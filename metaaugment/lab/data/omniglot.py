"""Omniglot: 1,623 characters of 50 alphabets, each drawn by 20 people, from the official tree of PNG files."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from metaaugment.lab.data.entry import Archive, Entry, Missing, Progress, Reduced, black, find_complete, folders
from metaaugment.lab.data.files import CorruptImage, read_image
from metaaugment.lab.data.images import Images
from metaaugment.lab.data.splits import Splits, split


@dataclass(frozen=True)
class Layout:
    """What the official archives hold, PART/ALPHABET/characterNN/*.png, and how much of each character is held out."""

    characters: dict[str, int]
    drawings: int = 20
    val: int = 2
    test: int = 3


OMNIGLOT = Layout({"images_background": 964, "images_evaluation": 659})
NAMES = ("omniglot", "omniglot-py")
SIZE = 32
LAKE = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"


def read(layout: Layout, root: Path, seed: int, size: int, progress: Progress) -> Splits:
    """All drawings, uint8 [n, 3, size, size], ink bright on black; split by the seed, 15 / 2 / 3 of each character.

    A character is a class, named ALPHABET/characterNN: those of images_background come first. Drawings are reduced by
    Lanczos, which keeps strokes thinner than a pixel visible. Takes some ten seconds on one core.
    """
    folder = locate(layout, root)
    drawings = [(part, name, files) for part in layout.characters for name, files in characters(folder / part)]
    images = np.empty((len(drawings), layout.drawings, size, size), np.uint8)
    for c, (part, name, files) in enumerate(drawings):
        for d, file in enumerate(files):
            images[c, d] = _read(folder, folder / part / name / file, size)
        progress("reading Omniglot", c + 1, len(drawings))
    labels = torch.arange(len(drawings)).repeat_interleave(layout.drawings)
    # Expanded, not repeated: only what is taken of it has three channels in memory.
    everything = Images(torch.from_numpy(images.reshape(-1, 1, size, size)).expand(-1, 3, -1, -1), labels)
    parts = split(labels, seed, [layout.val] * len(drawings), [layout.test] * len(drawings))
    note = (
        f"Omniglot: of each character's {layout.drawings} drawings {layout.val} for validation and {layout.test} for "
        f"the test, by seed {seed}"
    )
    return Splits.cut(everything, parts, tuple(name for _, name, _ in drawings), note)


def locate(layout: Layout, root: Path) -> Path:
    """The folder of a complete tree, by the number of its files. Raises `Missing` where there is none."""
    first, *_ = parts = tuple(layout.characters)

    def holds(folder: Path) -> bool:
        return any((folder / part).is_dir() for part in parts)

    return find_complete(root, NAMES, holds, partial(_problems, layout), (f"{NAMES[0]}/{first}", first))


def characters(part: Path) -> Iterator[tuple[str, list[str]]]:
    """ALPHABET/characterNN and the names of its drawings, in order."""
    for alphabet in folders(part):
        for character in folders(part / alphabet):
            files = sorted(os.listdir(part / alphabet / character))
            drawings = [file for file in files if file.endswith(".png") and not file.startswith(".")]
            yield f"{alphabet}/{character}", drawings


def _problems(layout: Layout, folder: Path) -> Iterator[str]:
    for part, expected in layout.characters.items():
        if not (folder / part).is_dir():
            yield f"{folder / part} is missing"
            return
        found = 0
        for name, files in characters(folder / part):
            found += 1
            if len(files) != layout.drawings:
                yield f"{folder / part / name} has {len(files)} drawings where {layout.drawings} are expected"
        if found != expected:
            yield f"{folder / part} has {found:,} characters where {expected:,} are expected"


def _read(folder: Path, file: Path, size: int) -> np.ndarray:
    try:
        picture = read_image(file)
    except (OSError, CorruptImage) as error:
        reason = error.reason if isinstance(error, CorruptImage) else error.strerror
        raise Missing(f"{file} is not an image ({reason})", folder, incomplete=True) from None
    return np.asarray(ImageOps.invert(picture.convert("L")).resize((size, size), Image.Resampling.LANCZOS))


def _archive(part: str, md5: str) -> Archive:
    return Archive(f"{LAKE}/{part}.zip", md5, f"{NAMES[0]}/{part}", max_bytes=100_000_000)


ENTRY = Entry(
    "Omniglot",
    read=lambda ask: read(OMNIGLOT, ask.root, ask.seed, ask.size, ask.progress),
    locate=lambda root: locate(OMNIGLOT, root),
    size=SIZE,
    sizes=range(8, 106),
    fill=black,
    archives=(
        _archive("images_background", "68d2efa1b9178cc56df9314c21c6e718"),
        _archive("images_evaluation", "6b91aef0f799c5bb55b94e3f2daec811"),
    ),
    like="svhn",
    # 3,246 images in all, on which the paper ran PBA.
    searched={"pba": Reduced(2, "wrn-40-2")},
)
