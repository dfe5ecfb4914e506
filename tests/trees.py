"""Small data sets in their official layouts, on disk.

A writer of CIFAR or Omniglot returns the layout that describes what it wrote; a test substitutes it for the official
one: `use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path))`.
"""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metaaugment.lab.data import DATASETS, cifar, omniglot


def write_cifar10(
    root: Path, records: int = 20, test_records: int = 20, held_out: int = 20, version: str = "binary"
) -> cifar.Layout:
    """Five training files of `records` images each, and a test file, with labels in turn; "binary" or "python"."""
    layout = replace(cifar.CIFAR10, train_records=records, test_records=test_records, held_out=held_out)
    return _write_cifar(root, layout, version)


def write_cifar100(
    root: Path, records: int = 300, test_records: int = 100, held_out: int = 100, version: str = "binary"
) -> cifar.Layout:
    layout = replace(cifar.CIFAR100, train_records=records, test_records=test_records, held_out=held_out)
    return _write_cifar(root, layout, version)


def use_cifar(monkeypatch: pytest.MonkeyPatch, name: str, layout: cifar.Layout) -> None:
    """Read this data set as the layout says, not as the official archives hold it."""
    monkeypatch.setattr(cifar, name.upper(), layout)
    monkeypatch.setitem(DATASETS, name, cifar.entry(replace(layout, file="some.tar.gz", md5="the MD5 of nothing")))


def cifar_content(layout: cifar.Layout, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, 3072] and labels [n] of a file: noise around a brightness per class, so that it can be learned."""
    n = layout.records(file)
    random = np.random.default_rng([*file.encode()])
    labels = np.arange(n) % len(layout.classes)
    brightness = 40 + labels * 160 // len(layout.classes)
    return (brightness[:, None] + random.integers(0, 56, (n, cifar.PIXELS))).astype(np.uint8), labels


def _write_cifar(root: Path, layout: cifar.Layout, version: str) -> cifar.Layout:
    folder = root / (layout.binary if version == "binary" else layout.python)
    folder.mkdir(parents=True)
    for file in (*layout.train, layout.test):
        pixels, labels = cifar_content(layout, file)
        if version == "binary":
            coarse = [labels // 5] * (layout.label_bytes - 1)
            np.column_stack([*coarse, labels, pixels]).astype(np.uint8).tofile(folder / f"{file}.bin")
        else:
            content = {b"data": pixels, layout.label_key.encode(): labels.tolist(), b"batch_label": b"a batch"}
            (folder / file).write_bytes(pickle.dumps(content, protocol=2))
    return layout


def write_omniglot(root: Path, background: int = 3, evaluation: int = 2, side: int = 105) -> omniglot.Layout:
    """So many characters of 20 drawings, two to an alphabet: black strokes whose length tells the character."""
    layout = omniglot.Layout({"images_background": background, "images_evaluation": evaluation})
    for part, count in layout.characters.items():
        for character in range(count):
            folder = root / "omniglot" / part / f"Alphabet_{character // 2}" / f"character{character % 2 + 1:02d}"
            folder.mkdir(parents=True)
            for drawing in range(layout.drawings):
                image = np.full((side, side), 255, np.uint8)
                image[5 * drawing : 5 * drawing + 4, 10 : 40 + 5 * character] = 0
                Image.fromarray(image).convert("1").save(folder / f"{character:04d}_{drawing + 1:02d}.png")
    return layout


def write_folder(root: Path, classes: Mapping[str, int], side: int = 40) -> Path:
    """So many pictures in each folder, such as {"train/cat": 12}: a color for each class, and some noise."""
    kinds = sorted({Path(name).name for name in classes})
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng([*name.encode()])
        color = np.random.default_rng(kinds.index(Path(name).name)).integers(40, 200, 3)
        for i in range(count):
            pixels = color + random.integers(0, 56, (side, side + 8, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:03d}.png")
    return root
