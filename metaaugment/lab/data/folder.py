"""Folders of images: one folder per class, under train, val and test folders if a tree has them."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from metaaugment.lab.data.entry import Entry, Missing, Reduced, find_complete, folders, is_folder, is_hidden
from metaaugment.lab.data.files import ImageFiles
from metaaugment.lab.data.splits import Splits, split
from metaaugment.lab.words import number_of, some
from metaaugment.transformation import MAX_SIDE

# Which files are images; how each is decoded follows from its content.
EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jif", ".jfif", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff",
    ".gif",
)  # fmt: skip
KINDS = " ".join(extension.removeprefix(".") for extension in EXTENSIONS)
# The names, in lower case, under which a tree may hold its splits.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test", "testing"),
}
WORDS = {"val": "validation", "test": "the test"}
SIZE = 224
# Shares of each class held out for validation and for the test, where no folder gives them.
HELD_OUT = (0.1, 0.2)
# 2 % for validation; the test set is the official validation folder.
IMAGENET_HELD_OUT = (0.02, 0.0)
IMAGENET_CLASSES = 1000


class Tree(NamedTuple):
    """Class folders: their names in order, and the files of each, relative to the root.

    `others` counts the files in them that are no images, by extension.
    """

    folder: Path
    classes: tuple[str, ...]
    names: list[list[str]]
    others: Counter[str]

    def without_images(self) -> list[str]:
        return [name for name, files in zip(self.classes, self.names, strict=True) if not files]


def read_folder(root: Path, seed: int, held_out: tuple[float, float] = HELD_OUT, size: int = SIZE) -> Splits:
    """A user's images: the splits that have a folder, and the others cut from the training images by the seed.

    If train (training) is a split, as `split_folders` says, so are its neighbors val (validation, valid) and test
    (testing); else the folders of the root are the classes, whatever their names. Raises ValueError for a tree that
    cannot be read or split this way.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; name one that holds a folder of images for each class")
    found = split_folders(root)
    if not found:
        return cut(root, {"train": scan(root, root)}, seed, held_out, size, _unused([], [root]))
    train = scan(root, found["train"])
    trees = {"train": train} | {name: scan_like(train, root, found[name]) for name in WORDS if name in found}
    unused = sorted(set(folders(root)) - {folder.name for folder in found.values()})
    return cut(root, trees, seed, held_out, size, _unused(unused, [root, *found.values()]))


def read_imagenet(root: Path, seed: int, held_out: tuple[float, float], size: int) -> Splits:
    """ImageNet, or some of its classes: its validation images are the test set, ours are cut from the training images.

    Its official test images have no public labels.
    """
    folder = locate_imagenet(root)
    train = scan(folder, folder / "train")
    trees = {"train": train, "test": scan_like(train, folder, folder / "val")}
    if absent := trees["test"].without_images():
        raise ValueError(f"{folder / 'val'} lacks {some(absent)}; it must have the class folders of {train.folder}")
    remarks = ["the official validation images are the test set"]
    if len(trees["train"].classes) != IMAGENET_CLASSES:
        remarks.append(f"{len(trees['train'].classes)} of ImageNet's {IMAGENET_CLASSES:,} classes")
    return cut(folder, trees, seed, held_out, size, remarks)


def locate_imagenet(root: Path) -> Path:
    """The folder with train and val. Raises `Missing` where there is none."""

    def problems(folder: Path) -> list[str]:
        return [f"{folder / name} is missing" for name in ("train", "val") if not (folder / name).is_dir()]

    return find_complete(
        root, ("imagenet",), lambda folder: len(problems(folder)) < 2, problems, ("imagenet/train", "train")
    )


def locate_whole_imagenet(root: Path) -> Path:
    """The same, if both folders have all classes."""
    folder = locate_imagenet(root)
    for name in ("train", "val"):
        found = len(folders(folder / name))
        if found != IMAGENET_CLASSES:
            sentence = f"{folder / name} has {found:,} class folders where {IMAGENET_CLASSES:,} are expected"
            raise Missing(sentence, folder, incomplete=True)
    return folder


def split_folders(root: Path) -> dict[str, Path]:
    """The split folders of a tree by the name of their split; none where the root's folders are the classes.

    A class may be called train, and have folders in it. So what holds images too is a split only beside another one.
    """
    found: dict[str, Path] = {}
    for folder in folders(root):
        for name, spellings in SPLIT_NAMES.items():
            if folder.lower() in spellings:
                if name in found:
                    raise ValueError(f"{root} has both {found[name].name} and {folder}; keep one of them")
                found[name] = root / folder
    nested = {name for name, folder in found.items() if folders(folder)}
    splits = {name for name in nested if len(nested) > 1 or not any(_files(found[name]))}
    if splits and "train" not in found:
        raise ValueError(f"{root} has {found[min(splits)].name} but no train; add train, with a folder for each class")
    return found if "train" in splits else {}


def scan(root: Path, folder: Path) -> Tree:
    """The class folders in a folder. Raises ValueError where there are fewer than two, or one has no images."""
    tree = _tree(root, folder)
    if len(tree.classes) == 1:
        raise ValueError(f"{folder} has one class folder, {tree.classes[0]}; a classifier needs at least 2")
    if empty := tree.without_images():
        raise ValueError(f"no images in class {some(empty)} of {folder}; add some ({KINDS}), or remove the folder")
    return tree


def scan_like(train: Tree, root: Path, folder: Path) -> Tree:
    """The class folders of another split, with the classes of the training images; some of these may have no images.

    Raises ValueError for classes that the training images lack, and for images of fewer than two classes.
    """
    tree = _tree(root, folder)
    if extra := sorted(set(tree.classes) - set(train.classes)):
        raise ValueError(
            f"{folder} has class {some(extra)}, which {train.folder} lacks; add training images, or remove the folder"
        )
    files = dict(zip(tree.classes, tree.names, strict=True))
    if sum(map(bool, tree.names)) < 2:
        raise ValueError(
            f"{folder} has images of fewer than 2 classes of {train.folder}; add some ({KINDS}), or remove the folder"
        )
    return Tree(folder, train.classes, [files.get(name, []) for name in train.classes], tree.others)


def _tree(root: Path, folder: Path) -> Tree:
    classes = folders(folder)
    if not classes:
        flat = " (its images lie directly in it)" if any(_files(folder)) else ""
        raise ValueError(f"{folder} has no class folders{flat}; put the images of each class in a folder of its own")
    above = {_identity(root), _identity(folder)}
    start = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    others = Counter[str]()
    names = [list(_images(folder / name, f"{start}{name}/", set(above), others)) for name in classes]
    return Tree(folder, tuple(classes), names, others)


def cut(
    root: Path, trees: dict[str, Tree], seed: int, held_out: tuple[float, float], size: int, remarks: Iterable[str] = ()
) -> Splits:
    """Three splits: those that have a tree, and the others cut from the training images, a share of each class."""
    train = trees["train"]
    shares = {name: share for name, share in zip(WORDS, held_out, strict=True) if name not in trees}
    if any(not 0 < share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        given = " and ".join(f"{share:g} for {WORDS[name]}" for name, share in shares.items())
        raise ValueError(f"the shares held out are {given}; each must be above 0, and their sum below 1")
    parts = [[_held(share, len(files)) for files in train.names] for share in shares.values()]
    _check_enough(train, shares)
    splits = {name: _image_files(root, tree, size) for name, tree in trees.items()}
    if shares:
        *chosen, rest = split(splits["train"].labels, seed, *parts)
        splits |= {name: splits["train"].take(index) for name, index in zip(shares, chosen, strict=True)}
        splits["train"] = splits["train"].take(rest)
    told = [f"{len(train.classes):,} classes of {root}"]
    for tree in trees.values():
        if absent := tree.without_images():
            told.append(f"{tree.folder.name} has no images of class {some(absent)}")
    for name, share in shares.items():
        told.append(f"for {WORDS[name]} {share:.0%} of each class, cut from the training images by seed {seed}")
    if others := sum((tree.others for tree in trees.values()), Counter[str]()):
        files = "file was" if others.total() == 1 else "files were"
        told.append(f"{others.total():,} {files} not read: {some([kind for kind, _ in others.most_common()])}")
    return Splits(splits["train"], splits["val"], splits["test"], train.classes, "; ".join((*told, *remarks)))


def _held(share: float, n: int) -> int:
    """How many of a class of n are held out: a share, and at least one."""
    return max(1, math.floor(share * n + 0.5))


def _check_enough(train: Tree, shares: dict[str, float]) -> None:
    """Refuse classes of which nothing would be left to train on."""

    def left(n: int) -> int:
        return n - sum(_held(share, n) for share in shares.values())

    few = {name: len(files) for name, files in zip(train.classes, train.names, strict=True) if left(len(files)) < 1}
    if few:
        needed = max(next(enough for enough in itertools.count(n) if left(enough) >= 1) for n in few.values())
        raise ValueError(
            f"too few images in class {some([f'{name} ({n})' for name, n in few.items()])} of {train.folder} to hold "
            f"some out for {' and '.join(WORDS[part] for part in shares)}, which takes {needed} of each; add images, "
            "remove these classes, or hold images out yourself, in folders named train, val and test"
        )


def _unused(names: Sequence[str], above: Sequence[Path]) -> list[str]:
    """A remark on what is not used: folders, and images that lie directly in a folder above the classes."""
    unused = list(names)
    for folder in above:
        if n := sum(1 for _ in _files(folder)):
            unused.append(f"{number_of('image', n)} directly in {folder.name or folder}")
    return [f"not used: {', '.join(unused)}"] if unused else []


def _image_files(root: Path, tree: Tree, size: int) -> ImageFiles:
    counts = torch.tensor([len(files) for files in tree.names])
    labels = torch.arange(len(counts)).repeat_interleave(counts)
    return ImageFiles(root, tuple(itertools.chain.from_iterable(tree.names)), labels, size)


def _files(folder: Path) -> Iterator[str]:
    """Names of the images directly in a folder."""
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if _is_image(entry))


def _images(folder: Path, start: str, seen: set[tuple[int, int]], others: Counter[str]) -> Iterator[str]:
    """Names of the images in a folder and its subfolders, in order; a folder seen before is not entered again.

    Other files are counted in `others`, unless they are hidden.
    """
    if _identity(folder) in seen:
        return
    seen.add(_identity(folder))
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if not is_hidden(entry) and is_folder(entry):
            yield from _images(folder / entry.name, f"{start}{entry.name}/", seen, others)
        elif _is_image(entry):
            yield start + entry.name
        elif not is_hidden(entry):
            others[_kind(entry)] += 1


def _identity(folder: Path) -> tuple[int, int]:
    """Equal for two paths to the same folder; without it, links could lead in circles."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_image(entry: os.DirEntry[str]) -> bool:
    if is_hidden(entry) or not entry.name.lower().endswith(EXTENSIONS):
        return False
    return os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()


def _kind(entry: os.DirEntry[str]) -> str:
    """What a file that is not read is called: its extension, or that it is a link to nothing."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        return "a broken link"
    return os.path.splitext(entry.name)[1].lower() or "no extension"


IMAGENET = Entry(
    "ImageNet",
    read=lambda ask: read_imagenet(ask.root, ask.seed, ask.held_out, ask.size),
    locate=locate_whole_imagenet,
    size=SIZE,
    sizes=range(8, MAX_SIDE + 1),
    how="register at https://image-net.org/download, and unpack the training and validation images of ILSVRC2012 "
    "to {root}/imagenet/train and {root}/imagenet/val, with a folder for each class in both",
    held_out=IMAGENET_HELD_OUT,
    in_files=True,
    fixed_test=True,
    top5=True,
    like="imagenet",
    # AutoAugment and DADA took 120 of its classes; we take all.
    searched=dict.fromkeys(("autoaugment", "dada"), Reduced(50)),
)
ENTRY = Entry(
    "folder",
    read=lambda ask: read_folder(ask.root, ask.seed, ask.held_out, ask.size),
    locate=None,
    size=SIZE,
    sizes=range(8, MAX_SIDE + 1),
    how="name a folder of your own images",
    held_out=HELD_OUT,
    in_files=True,
    like="imagenet",
)
