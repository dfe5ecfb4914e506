"""CIFAR-10 and CIFAR-100, from the binary or the Python version of the official archives."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from metaaugment.lab.data import pickles
from metaaugment.lab.data.entry import Archive, Entry, Missing, Reduced, find_complete
from metaaugment.lab.data.images import Images
from metaaugment.lab.data.splits import Splits, apportion, split

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
TORONTO = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class Layout:
    """What the official archives hold. Files of the binary version end in .bin, those of the Python version do not."""

    title: str
    binary: str
    python: str
    train: tuple[str, ...]
    test: str
    classes: tuple[str, ...]
    # The binary version has this many label bytes before each image, of which the last is used; the Python version has
    # the labels under this key.
    label_bytes: int
    label_key: str
    train_records: int
    file: str
    md5: str
    test_records: int = 10_000
    held_out: int = 1_000

    def records(self, file: str) -> int:
        """Images in a file."""
        return self.test_records if file == self.test else self.train_records


# fmt: off
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)
# fmt: on
CIFAR10 = Layout(
    "CIFAR-10",
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    train=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    test="test_batch",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    label_bytes=1,
    label_key="labels",
    train_records=10_000,
    file="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
)
CIFAR100 = Layout(
    "CIFAR-100",
    "cifar-100-binary",
    "cifar-100-python",
    train=("train",),
    test="test",
    classes=CIFAR100_CLASSES,
    label_bytes=2,
    label_key="fine_labels",
    train_records=50_000,
    file="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
)


def read(layout: Layout, root: Path, seed: int) -> Splits:
    """All images, uint8 [n, 3, 32, 32]; 1,000 training images, equally many per class, are held out for validation."""
    folder = locate(layout, root)
    train, test = _read(layout, folder, layout.train), _read(layout, folder, (layout.test,))
    sizes = train.labels.bincount(minlength=len(layout.classes)).tolist()
    val, rest = split(train.labels, seed, apportion(layout.held_out, sizes))
    return Splits(
        train.take(rest),
        train.take(val),
        test,
        layout.classes,
        f"{layout.title}: {len(val):,} of {len(train):,} training images held out for validation by seed {seed}; "
        "the official test set",
    )


def locate(layout: Layout, root: Path) -> Path:
    """The folder of a complete data set, by the sizes of its files. Raises `Missing` where there is none."""
    names = (layout.binary, layout.python)
    known_by = f"{layout.binary}/{_binary(layout.test)}", f"{layout.python}/{layout.test}"
    return find_complete(root, names, partial(_holds, layout), partial(_problems, layout), known_by)


def _binary(file: str) -> str:
    return f"{file}.bin"


def _is_binary(layout: Layout, folder: Path) -> bool:
    return any((folder / _binary(file)).is_file() for file in (*layout.train, layout.test))


def _holds(layout: Layout, folder: Path) -> bool:
    return _is_binary(layout, folder) or any((folder / file).is_file() for file in (*layout.train, layout.test))


def _problems(layout: Layout, folder: Path) -> Iterator[str]:
    """What is wrong with the files' sizes."""
    binary = _is_binary(layout, folder)
    for file in (*layout.train, layout.test):
        path = folder / (_binary(file) if binary else file)
        records = layout.records(file)
        least = records * ((layout.label_bytes if binary else 0) + PIXELS)
        # A pickle's size depends on what wrote it; four times its pixels is more than usual protocols take.
        most = least if binary else 4 * least + 2**16
        if not path.is_file():
            yield f"{path} is missing"
        elif not least <= path.stat().st_size <= most:
            expected = f"{least:,}" if binary else f"{least:,} to {most:,}"
            yield f"{path} has {path.stat().st_size:,} bytes where {expected} are expected"


def _read(layout: Layout, folder: Path, files: tuple[str, ...]) -> Images:
    """The images and labels of some files, one after the other."""
    read_one = _read_binary if _is_binary(layout, folder) else _read_python
    total = sum(layout.records(file) for file in files)
    # Filled file by file: concatenating the files would take twice the memory.
    images, labels = np.empty((total, *SHAPE), np.uint8), np.empty(total, np.int64)
    start = 0
    for file in files:
        place = slice(start, start + layout.records(file))
        try:
            pixels, labels[place] = read_one(layout, folder, file)
            _check_labels(layout, labels[place])
        except (ValueError, TypeError, OverflowError) as error:
            raise Missing(f"{folder / file}: {error}", folder, incomplete=True) from None
        images[place] = pixels.reshape(-1, *SHAPE)
        start = place.stop
    return Images(torch.from_numpy(images), torch.from_numpy(labels))


def _check_labels(layout: Layout, labels: np.ndarray) -> None:
    least, most = labels.min(), labels.max()
    if least < 0 or most >= len(layout.classes):
        wrong = least if least < 0 else most
        raise ValueError(f"the label {wrong} is not one of {layout.title}'s, which are 0 to {len(layout.classes) - 1}")


def _read_binary(layout: Layout, folder: Path, file: str) -> tuple[np.ndarray, np.ndarray]:
    rows = np.fromfile(folder / _binary(file), np.uint8).reshape(layout.records(file), layout.label_bytes + PIXELS)
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]


def _read_python(layout: Layout, folder: Path, file: str) -> tuple[np.ndarray, np.ndarray]:
    records = layout.records(file)
    content = pickles.load(folder / file)
    for key in ("data", layout.label_key):
        if key not in content:
            found = ", ".join(name if name.isprintable() else ascii(name) for name in sorted(content))
            raise ValueError(f"it has no {key!r}, only {found or 'nothing'}")
    pixels, labels = pickles.array(content["data"]), content[layout.label_key]
    if pixels.size != records * PIXELS:
        raise ValueError(f"{pixels.size:,} bytes of images where {records * PIXELS:,} are expected")
    if not isinstance(labels, list) or len(labels) != records or not all(type(label) is int for label in labels):
        raise ValueError(f"no list of {records:,} whole numbers under {layout.label_key!r}")
    return pixels, np.asarray(labels)


def entry(layout: Layout) -> Entry:
    # AutoAugment, PBA and DADA searched on 4,000 images of CIFAR-10.
    few = 4_000 // len(layout.classes)
    return Entry(
        layout.title,
        read=lambda ask: read(layout, ask.root, ask.seed),
        locate=lambda root: locate(layout, root),
        size=32,
        sizes=range(32, 33),
        archives=(Archive(f"{TORONTO}/{layout.file}", layout.md5, layout.binary, max_bytes=200_000_000),),
        fixed_test=True,
        like=f"cifar{len(layout.classes)}",
        searched={"autoaugment": Reduced(few), **dict.fromkeys(("pba", "dada"), Reduced(few, "wrn-40-2"))},
    )
