"""Data sets: what is read is what the files hold; splits are disjoint, stratified, and the seed's."""

import hashlib
import io
import os
import pickle
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from rich.status import Status
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader

from metaaugment.lab.data import DATASETS, CorruptImage, DataSet, ImageFiles, Images, cifar, dataset, omniglot, status
from metaaugment.lab.data.files import random_part, read_image
from metaaugment.lab.data.splits import apportion, split
from metaaugment.lab.experiments.experiment import data_of
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place

from trees import cifar_content, use_cifar, write_cifar10, write_cifar100, write_folder, write_omniglot

PARTS = ("train", "val", "test")


def in_each(data: DataSet) -> list[list[int]]:
    """How many images each class has, in each part."""
    return [getattr(data, part).labels.bincount().tolist() for part in PARTS]


def keys(part: Images) -> list[bytes]:
    """Something that tells each image from every other."""
    return [image.numpy().tobytes() for image in part.images]


# Images in memory


def test_images_are_a_data_set_to_torch() -> None:
    images = Images(torch.arange(5 * 12, dtype=torch.uint8).view(5, 3, 2, 2), torch.tensor([4, 3, 2, 1, 0]))
    image, label = images[1]
    assert (image.tolist(), label) == (images.images[1].tolist(), 3)
    assert type(label) is int
    batches = list(DataLoader(images, batch_size=2))  # pyright: ignore[reportArgumentType]
    assert torch.cat([batch[0] for batch in batches]).equal(images.images)
    assert torch.cat([batch[1] for batch in batches]).equal(images.labels)


def test_statistics_are_numpys_and_do_not_depend_on_the_order() -> None:
    images = Images(torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8), torch.zeros(50, dtype=torch.long))
    values = images.images.numpy() / 255
    mean, std = images.statistics()
    assert mean == pytest.approx(values.mean((0, 2, 3)))
    assert std == pytest.approx(values.std((0, 2, 3)))
    assert images.take(torch.randperm(50)).statistics() == (mean, std)


# Splits


def test_split_is_disjoint_complete_and_stratified() -> None:
    labels = torch.randint(0, 4, (200,))
    parts = split(labels, 7, [2, 3, 4, 5], [1, 1, 1, 1])
    assert torch.cat(parts).sort().values.tolist() == list(range(200))
    assert labels[parts[0]].bincount().tolist() == [2, 3, 4, 5]
    assert labels[parts[1]].bincount().tolist() == [1, 1, 1, 1]
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def test_split_is_the_seeds_for_ever() -> None:
    """The numbers themselves: published results stay comparable only as long as they do not change."""
    labels = torch.arange(12) % 2
    assert [part.tolist() for part in split(labels, 0, [2, 2])] == [[3, 4, 7, 10], [0, 1, 2, 5, 6, 8, 9, 11]]


def test_apportion_by_hand() -> None:
    assert apportion(10, [50, 50]) == [5, 5]
    assert apportion(10, [10, 20, 30]) == [2, 3, 5]  # 1.67, 3.33, 5
    assert apportion(1, [1, 1, 1]) == [1, 0, 0]


# Digits


def test_digits() -> None:
    data = dataset("digits")
    assert [len(getattr(data, part)) for part in PARTS] == [1100, 100, 597]
    assert data.classes == tuple("0123456789")
    assert (data.num_classes, data.channels, data.fill) == (10, 3, (0, 0, 0))
    assert data.train.images.shape == (1100, 3, 32, 32)
    assert (data.mean, data.std) == data.train.statistics()
    assert data.fingerprint() == dataset("digits").fingerprint() != dataset("digits", seed=1).fingerprint()
    everything = load_digits().target
    for part in PARTS:
        share = len(getattr(data, part)) / 1797
        counts = getattr(data, part).labels.bincount().numpy()
        assert np.abs(counts - share * np.bincount(everything)).max() <= 1.5
    # scikit-learn's, once each: at 8 pixels a side nothing is resized.
    data = dataset("digits", size=8)
    found = np.concatenate([getattr(data, part).images[:, 0].numpy() for part in PARTS])
    expected = load_digits().images * 255 / 16
    assert np.abs(np.sort(found.reshape(1797, -1), 0) - np.sort(expected.reshape(1797, -1), 0)).max() <= 0.5
    assert data.train.images[:, 0].equal(data.train.images[:, 2])


def test_a_rehearsal_has_validation_images_for_its_test() -> None:
    whole = dataset("digits")
    half = whole.rehearsal(0.5, 0)
    assert half.train is whole.train
    assert "50 validation images stand in for the test images" in half.note
    kept, held_back = (torch.bincount(part.labels, minlength=10) for part in (half.val, half.test))
    assert torch.equal(kept + held_back, torch.bincount(whole.val.labels, minlength=10))
    assert (kept == held_back).all()  # of each class, which has ten
    together = torch.cat([half.val.images, half.test.images]).flatten(1)
    assert {tuple(row) for row in together.tolist()} == {tuple(row) for row in whole.val.images.flatten(1).tolist()}
    assert torch.equal(half.test.labels, whole.rehearsal(0.5, 0).test.labels)
    assert half.fingerprint() not in (whole.fingerprint(), whole.rehearsal(0.5, 1).fingerprint())
    with pytest.raises(
        ValueError, match=r"held_back is 0\.001, which does not split the 10 validation images of class 0"
    ):
        whole.rehearsal(0.001, 0)


def test_a_rehearsal_may_have_training_images_for_its_test() -> None:
    whole = dataset("digits", per_class=10)
    part = whole.rehearsal(0.3, 0, of="training")
    assert part.val is whole.val
    assert "30 training images stand in for the test images" in part.note
    assert part.train.labels.bincount().tolist() == [7] * 10
    assert part.test.labels.bincount().tolist() == [3] * 10
    together = torch.cat([part.train.images, part.test.images]).flatten(1).tolist()
    assert sorted(together) == sorted(whole.train.images.flatten(1).tolist())
    assert part.fingerprint() != whole.rehearsal(0.3, 1, of="training").fingerprint()
    with pytest.raises(ValueError, match=r"held_back is 0\.001, which is none of the 100 training images"):
        whole.rehearsal(0.001, 0, of="training")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_no_class_is_left_without_training_images(share: float) -> None:
    """Classes of one, two, none and forty."""
    labels = torch.arange(4).repeat_interleave(torch.tensor([1, 2, 0, 40]))
    images = Images(torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8), labels)
    data = DataSet("mine", images, images, images, tuple("abcd"), (0.5,) * 3, (0.2,) * 3, (0,) * 3)
    part = data.rehearsal(share, 0, of="training")
    left = part.train.labels.bincount(minlength=4)
    assert left[0] == 1
    assert left[1] >= 1
    assert left[3] == 40 - round(40 * share)
    assert len(part.train) + len(part.test) == len(labels)


def drawn(labels: Tensor, share: float, seed: int) -> tuple[DataSet, Tensor, Tensor]:
    """A data set with these validation labels, and where in them the images are that are held back, and left."""
    images = torch.arange(len(labels)).view(-1, 1, 1, 1)
    val = Images(torch.cat([images % 256, images // 256, 0 * images], 1).to(torch.uint8), labels)
    names = tuple(str(c) for c in range(int(labels.max()) + 3))  # two more, without validation images
    data = DataSet("mine", val, val, val, names, (0.5,) * 3, (0.2,) * 3, (0,) * 3).rehearsal(share, seed)
    held_back, left = (
        part.images[:, 0, 0, 0].long() + 256 * part.images[:, 1, 0, 0].long() for part in (data.test, data.val)
    )
    return data, held_back, left


@pytest.mark.parametrize(
    ("classes", "each", "share", "seed", "digest"),
    [
        (1623, 2, 0.5, 0, "93b50330fbc10ca4"),  # Omniglot
        (1623, 2, 0.5, 1, "fc505c4e690a7010"),
        (10, 100, 0.5, 0, "dbb888397681fdd3"),  # CIFAR-10
        (10, 100, 0.5, 1, "9bf1bf350bdc0d94"),
        (100, 10, 0.5, 0, "a7cd500456d4e24a"),  # CIFAR-100
        (10, 500, 0.3, 0, "9f262c28ce772f8d"),
    ],
)
def test_what_is_held_back_of_equal_classes_stays_the_same(
    classes: int, each: int, share: float, seed: int, digest: str
) -> None:
    """As it was when results were made of it."""
    _, *parts = drawn(torch.arange(classes).repeat(each), share, seed)
    written = b"|".join(part.numpy().astype("<i8").tobytes() for part in parts)
    assert hashlib.sha256(written).hexdigest()[:16] == digest


@pytest.mark.parametrize("share", [0.5, 0.4])
def test_classes_with_one_validation_image_are_shared_out(share: float) -> None:
    """19 of them, in turn with classes of five and without any; which are held back is the seed's."""
    sizes = torch.tensor([1, 5, 1, 0] * 9 + [1])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    held = []
    for seed in range(20):
        data, held_back, left = drawn(labels, share, seed)
        assert sorted([*held_back.tolist(), *left.tolist()]) == list(range(64))
        assert len(held_back) == round(share * 64)
        kept, back = (part.labels.bincount(minlength=len(sizes)) for part in (data.val, data.test))
        assert (back[sizes == 5] * 2 - 5).abs().max() == 1  # of five two or three
        held.append(back[sizes == 1])
        assert set((kept + back)[sizes == 1].tolist()) == {1}
        assert f"{len(held_back)} validation images stand in" in data.note
    often = torch.stack(held).double().mean(0)
    assert ((often > 0.1) & (often < 0.9)).all()  # none is always on the same side


def test_a_single_validation_image_cannot_be_shared_out() -> None:
    assert [len(part) for part in drawn(torch.tensor([3, 5]), 0.5, 0)[1:]] == [1, 1]
    for labels, share, n in (([3], 0.5, 1), ([3, 5], 0.1, 2)):
        said = f"held_back is {share}, which does not split the {n} validation images: both"
        with pytest.raises(ValueError, match=said):
            drawn(torch.tensor(labels), share, 0)


# CIFAR


@pytest.fixture(params=["binary", "python"])
def cifar10(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path, version=request.param))
    return next(tmp_path.iterdir())


def content(layout: cifar.Layout, files: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = zip(*(cifar_content(layout, file) for file in files), strict=True)
    return np.concatenate(pixels).reshape(-1, 3, 32, 32), np.concatenate(labels)


def test_official_sizes() -> None:
    """The files of the official binary versions have these lengths."""
    assert cifar.CIFAR10.train_records * (cifar.CIFAR10.label_bytes + cifar.PIXELS) == 30_730_000
    assert cifar.CIFAR100.train_records * (cifar.CIFAR100.label_bytes + cifar.PIXELS) == 153_700_000
    assert (len(cifar.CIFAR10.classes), len(cifar.CIFAR100.classes)) == (10, 100)
    assert list(cifar.CIFAR100.classes) == sorted(cifar.CIFAR100.classes)
    assert sum(omniglot.OMNIGLOT.characters.values()) == 1623
    assert omniglot.OMNIGLOT.drawings == 15 + omniglot.OMNIGLOT.val + omniglot.OMNIGLOT.test


def test_cifar10_is_what_the_files_hold(cifar10: Path) -> None:
    data = dataset("cifar10", cifar10.parent)
    pixels, labels = content(cifar.CIFAR10, cifar.CIFAR10.train)
    label_of = {image.tobytes(): label for image, label in zip(pixels, labels, strict=True)}
    found = {**dict(zip(keys(data.train), data.train.labels.tolist(), strict=True))}
    held = {**dict(zip(keys(data.val), data.val.labels.tolist(), strict=True))}
    assert not found.keys() & held.keys()
    assert found | held == label_of
    assert data.val.labels.bincount().tolist() == [2] * 10
    pixels, labels = content(cifar.CIFAR10, (cifar.CIFAR10.test,))
    assert np.array_equal(data.test.images, pixels)
    assert np.array_equal(data.test.labels, labels)
    assert data.fill == tuple(round(255 * value) for value in data.mean)


@pytest.mark.parametrize("version", ["binary", "python"])
def test_cifar100_takes_the_fine_labels(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cifar(monkeypatch, "cifar100", write_cifar100(tmp_path, version=version))
    data = dataset("cifar100", tmp_path)
    assert data.num_classes == 100
    assert data.test.labels.tolist() == list(range(100))
    assert data.val.labels.bincount().tolist() == [1] * 100
    assert np.array_equal(data.test.images, content(cifar.CIFAR100, ("test",))[0])


def test_root_may_be_the_folder_itself_or_stand_in_the_environment(
    cifar10: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAAUGMENT_DATA", str(cifar10.parent))
    assert dataset("cifar10").fingerprint() == dataset("cifar10", cifar10).fingerprint()


def test_both_versions_are_the_same_and_a_complete_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path, version="binary"))
    binary = dataset("cifar10", tmp_path).fingerprint()
    write_cifar10(tmp_path, version="python")
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    assert dataset("cifar10", tmp_path).fingerprint() == binary


@pytest.fixture
def pickled_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of CIFAR-10's Python version."""
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path, version="python"))
    return tmp_path / "cifar-10-batches-py" / "test_batch"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_of_every_protocol(protocol: int, pickled_batch: Path, tmp_path: Path) -> None:
    pixels, labels = cifar_content(cifar.CIFAR10, "test_batch")
    pickled_batch.write_bytes(pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol=protocol))
    assert np.array_equal(dataset("cifar10", tmp_path).test.images.reshape(20, -1), pixels)


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """As Python 2 wrote the official files: byte strings, and numpy's names of that time."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    shape = b"".join(b"M" + struct.pack("<H", side) for side in pixels.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\1\x87R(K\3" + text(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    raw = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    array += b"(K\1" + shape + dtype + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\2}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_pickles_of_python_2(pickled_batch: Path, tmp_path: Path) -> None:
    pixels, labels = cifar_content(cifar.CIFAR10, "test_batch")
    written = python2_pickle(pixels, labels.tolist())
    with warnings.catch_warnings(action="ignore"):  # numpy's, of its own old names
        judge = pickle.loads(written, encoding="bytes")
    assert np.array_equal(judge[b"data"], pixels)
    pickled_batch.write_bytes(written)
    test = dataset("cifar10", tmp_path).test
    assert np.array_equal(test.images.reshape(20, -1), pixels)
    assert test.labels.tolist() == labels.tolist()


class Evil:
    """Unpickled, it calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("place", ["data", "labels", "more", "key"])
def test_a_pickle_runs_nothing(place: str, protocol: int, pickled_batch: Path, tmp_path: Path) -> None:
    pixels, labels = cifar_content(cifar.CIFAR10, "test_batch")
    evil = Evil(os.mkdir, str(tmp_path / "evil"))
    honest = {"data": pixels, "labels": labels.tolist(), "length": b"x" * 70_000}
    written = pickle.dumps({evil: 1, **honest} if place == "key" else {**honest, place: evil}, protocol=protocol)
    pickle.loads(written)
    (tmp_path / "evil").rmdir()  # it does run where it is let
    pickled_batch.write_bytes(written)
    with pytest.raises(ValueError, match=r"test_batch: not a pickle of data: it asks for posix\.mkdir"):
        dataset("cifar10", tmp_path)
    assert not (tmp_path / "evil").exists()


OTHER = (
    "builtins eval",
    "numpy load",
    "numpy ndarray.__class__",
    "numpy.core.multiarray scalar",
    "copyreg _reconstructor",
)


@pytest.mark.parametrize("name", OTHER)
def test_a_pickle_names_nothing_else(name: str, pickled_batch: Path, tmp_path: Path) -> None:
    module, attribute = name.split()
    stack_global = b"\x80\4" + b"".join(b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, attribute)) + b"\x93"
    padding = b"B" + struct.pack("<I", 70_000) + bytes(70_000) + b"0"  # as long as the file should be, and dropped
    pickled_batch.write_bytes(stack_global[:2] + padding + stack_global[2:] + b".")
    with pytest.raises(ValueError, match=f"it asks for {module}.{attribute}"):
        dataset("cifar10", tmp_path)


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("data_batch_3.bin", lambda x: x[:-1], "data_batch_3.bin has 61,459 bytes where 61,460 are expected"),
        ("test_batch.bin", lambda x: x + b"\0", "test_batch.bin has 61,461 bytes where 61,460 are expected"),
        ("data_batch_5.bin", lambda x: b"", "data_batch_5.bin has 0 bytes where 61,460 are expected"),
        ("data_batch_2.bin", lambda x: b"\x0a" + x[1:], "the label 10 is not one of CIFAR-10's, which are 0 to 9"),
    ],
)
def test_damaged_binary(
    file: str, change: Callable[[bytes], bytes], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path))
    rewrite(tmp_path / "cifar-10-batches-bin" / file, change)
    with pytest.raises(ValueError, match=f"CIFAR-10 is not complete: .*{sentence}; move .*bin away and get it again"):
        dataset("cifar10", tmp_path)


def pickled(**changes: object) -> Callable[[bytes], bytes]:
    def change(written: bytes) -> bytes:
        content = {**pickle.loads(written), **{key.encode(): value for key, value in changes.items()}}
        return pickle.dumps({key: value for key, value in content.items() if value is not None})

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x[:-1000], "not a pickle of data"),
        (lambda x: x[:100], "has 100 bytes where 61,440 to 311,296 are expected"),
        (lambda x: bytes(len(x)), "not a pickle of data"),
        (lambda x: pickle.dumps([bytes(70_000)]), "a pickled list where a dictionary is expected"),
        (pickled(data=None, more=bytes(70_000)), "it has no 'data', only batch_label, labels, more"),
        (pickled(labels=None), "it has no 'labels'"),
        (pickled(labels=[0] * 19), "no list of 20 whole numbers under 'labels'"),
        (pickled(labels=["0"] * 20), "no list of 20 whole numbers"),
        (pickled(labels=[0] * 19 + [10]), "the label 10 is not one of CIFAR-10's"),
        (pickled(labels=[2**70] * 20), "too large|too big"),
        (pickled(labels=[-1] * 20), "the label -1 is not one of CIFAR-10's"),
        (pickled(data=np.zeros((25, 3072), np.uint8)), "76,800 bytes of images where 61,440 are expected"),
        (pickled(data=np.zeros((20, 3072), np.int16)), "of type 'i2' where u1"),
        (pickled(data=bytes(70_000)), "its images are not an array"),
        (pickled(data=np.zeros((20, 3072), np.uint8, order="F")), "its images are not an array in C order"),
    ],
)
def test_damaged_pickle(change: Callable[[bytes], bytes], sentence: str, pickled_batch: Path, tmp_path: Path) -> None:
    rewrite(pickled_batch.with_name("data_batch_4"), change)
    with pytest.raises(ValueError, match=f"data_batch_4.*{sentence}"):
        dataset("cifar10", tmp_path)


# Omniglot


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(omniglot, "OMNIGLOT", write_omniglot(tmp_path))
    return tmp_path / "omniglot"


def test_omniglot(letters: Path) -> None:
    data = dataset("omniglot", letters.parent)
    assert data.classes == (
        *("Alphabet_0/character01", "Alphabet_0/character02", "Alphabet_1/character01"),
        *("Alphabet_0/character01", "Alphabet_0/character02"),
    )
    assert in_each(data) == [[15] * 5, [2] * 5, [3] * 5]
    assert data.train.images.shape == (75, 3, 32, 32)
    assert data.fill == (0, 0, 0)


def test_omniglots_drawings_are_the_files_once_each(letters: Path) -> None:
    """At full size nothing is reduced: ink is 255, paper 0."""
    data = dataset("omniglot", letters.parent, size=105)
    for label, folder in enumerate(sorted(letters.glob("*/*/character*"))):
        expected = {(~np.asarray(Image.open(file))).tobytes() for file in folder.glob("*.png")}
        found = [(x[0] == 255).numpy().tobytes() for part in PARTS for x, y in getattr(data, part) if y == label]
        assert len(found) == 20
        assert set(found) == expected
    assert set(data.train.images.unique().tolist()) == {0, 255}
    assert data.train.images[:, 0].equal(data.train.images[:, 1])


def test_omniglot_is_reduced_by_lanczos(letters: Path) -> None:
    data = dataset("omniglot", letters.parent)
    files = sorted((letters / "images_background/Alphabet_0/character01").glob("*.png"))
    pictures = [Image.open(file).convert("L").point([255 - value for value in range(256)]) for file in files]
    expected = {picture.resize((32, 32), Image.Resampling.LANCZOS).tobytes() for picture in pictures}
    found = {x[2].numpy().tobytes() for part in PARTS for x, y in getattr(data, part) if y == 0}
    assert found == expected


def test_incomplete_omniglot_is_named(letters: Path) -> None:
    character = letters / "images_evaluation/Alphabet_0/character02"
    drawing = next(character.iterdir())
    drawing.write_bytes(b"no image")
    with pytest.raises(ValueError, match=rf"{drawing.name} is not an image"):
        dataset("omniglot", letters)
    drawing.unlink()
    with pytest.raises(ValueError, match=r"Alphabet_0/character02 has 19 drawings where 20 are expected"):
        dataset("omniglot", letters)
    for file in character.iterdir():
        file.unlink()
    character.rmdir()
    with pytest.raises(ValueError, match=r"images_evaluation has 1 characters where 2 are expected"):
        dataset("omniglot", letters)


def test_omniglot_tells_its_progress(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, shown = [], []
    dataset("omniglot", letters, progress=lambda *what: told.append(what))
    assert told == [("reading Omniglot", done, 5) for done in range(1, 6)]
    monkeypatch.setattr(Status, "update", lambda status, text: shown.append(text))
    data_of(RECIPES["omniglot-wrn-40-2"](), Place(data=letters), Console(quiet=True))
    assert shown == [f"reading Omniglot: {done} of 5" for done in range(1, 6)]


# Image files


def save(file: Path, pixels: object, mode: str | None = None, **options: object) -> ImageFiles:
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image if mode is None else image.convert(mode)).save(file, **options)
    return ImageFiles(file.parent, (file.name,), torch.tensor([3]), size=8)


def test_evaluation_view_is_the_middle(tmp_path: Path) -> None:
    """A shorter side of 256 is left as it is, so that the view is a plain cut."""
    pixels = np.random.default_rng(0).integers(0, 256, (256, 300, 3))
    files = replace(save(tmp_path / "a.png", pixels), size=224)
    image, label = files[0]
    assert label == 3
    assert image.dtype == torch.uint8
    assert np.array_equal(image.permute(1, 2, 0), pixels[16:240, 38:262])


@pytest.mark.parametrize(("height", "width"), [(333, 500), (500, 375), (90, 100), (32, 31)])
def test_evaluation_view_is_the_whole_scaled_and_then_cut(height: int, width: int, tmp_path: Path) -> None:
    """The plain route, in two steps."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3))
    image = replace(save(tmp_path / "a.png", pixels), size=56)[0][0]
    shorter = min(width, height)
    scaled = Image.open(tmp_path / "a.png").resize((64 * width // shorter, 64 * height // shorter), Image.BILINEAR)
    left, top = (round((side - 56) / 2) for side in scaled.size)
    expected = np.asarray(scaled.crop((left, top, left + 56, top + 56))).astype(int)
    assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 1


def test_evaluation_view_of_a_strip_takes_little_memory(tmp_path: Path) -> None:
    """Scaled as a whole it would have 4 billion pixels."""
    files = replace(save(tmp_path / "a.png", np.full((65_000, 1), 9)), size=224)
    assert files[0][0].unique().tolist() == [9]


def coordinates(width: int, height: int) -> Image.Image:
    """Red is the column, green the row, in 0..255."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, 0 * red], -1).round().astype(np.uint8))


@pytest.mark.parametrize("area_min", [0.08, 0.5])
def test_training_view_is_the_first_draw_that_fits(area_min: float, tmp_path: Path) -> None:
    """A second route to the same pixels: area and ratio one by one, and the part as Pillow scales it."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 130, 3))
    files = replace(save(tmp_path / "a.png", pixels), size=24, area_min=area_min)
    shares = []
    for seed in range(50):
        draws = torch.rand(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).numpy()
        areas = (area_min + (1 - area_min) * draws[:, 0]) * 90 * 130
        ratios = np.exp(np.log(3 / 4) + draws[:, 1] * (np.log(4 / 3) - np.log(3 / 4)))
        widths, heights = np.sqrt(areas * ratios).round(), np.sqrt(areas / ratios).round()
        fitting = np.flatnonzero((widths <= 130) & (heights <= 90))
        if not len(fitting):
            continue
        w, h = int(widths[fitting[0]]), int(heights[fitting[0]])
        left, top = (draws[fitting[0], 2:] * (131 - w, 91 - h)).astype(int).tolist()
        with Image.open(tmp_path / "a.png") as picture:
            part = picture.resize((24, 24), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
        assert np.array_equal(files.image(0, torch.Generator().manual_seed(seed)).permute(1, 2, 0), np.asarray(part))
        shares.append(w * h / (90 * 130))
    assert len(shares) > 25
    assert area_min - 0.01 < min(shares) < area_min + 0.1


@pytest.mark.parametrize(("height", "width"), [(90, 130), (130, 90), (24, 24), (7, 300)])
def test_with_an_area_of_1_training_and_evaluation_see_the_whole_image(height: int, width: int, tmp_path: Path) -> None:
    """Both sides are scaled to the size; an image that has it already is left as it is."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    files = replace(save(tmp_path / "a.png", pixels), size=24, area_min=1.0)
    expected = pixels if height == width else Image.fromarray(pixels).resize((24, 24), Image.Resampling.BILINEAR)
    for view in (files.image(0), files.image(0, torch.Generator().manual_seed(0)), files[0][0]):
        assert np.array_equal(view.permute(1, 2, 0), np.asarray(expected))


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000)])
def test_a_strip_gives_its_middle(width: int, height: int) -> None:
    """No part of a permitted shape has 8 % of it: 13 or 14 of its 1,000 pixels remain."""
    view = np.asarray(random_part(coordinates(width, height), 16, torch.Generator().manual_seed(0))).astype(float)
    along = view[..., 0 if width > height else 1]
    assert 125 <= along.min() <= along.max() <= 130


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (2, 3)])
def test_tiny_images(size: tuple[int, int], tmp_path: Path) -> None:
    files = save(tmp_path / "a.png", np.full((*size, 3), 77))
    assert files.image(0).unique().tolist() == [77]
    assert files.image(0, torch.Generator()).unique().tolist() == [77]


def shown(file: Path) -> list[int]:
    """The color of a picture of one color."""
    image, _ = ImageFiles(file.parent, (file.name,), torch.tensor([0]), size=8)[0]
    assert image.flatten(1).min(1).values.equal(image.flatten(1).max(1).values)
    return image[:, 0, 0].tolist()


RED = np.tile(np.array([250, 10, 30]), (20, 20, 1))


def test_kinds_of_images_become_rgb(tmp_path: Path) -> None:
    """Whole numbers of 16 bits are reduced, however wide they are stored."""
    deep = np.full((20, 20), 200 * 256 + 17)
    Image.fromarray(RED.astype(np.uint8)).quantize(2).save(tmp_path / "palette.gif")
    save(tmp_path / "grey.png", np.full((20, 20), 99))
    save(tmp_path / "two.png", np.full((20, 20), 255), "1")
    save(tmp_path / "cmyk.tif", RED, "CMYK")
    Image.fromarray(deep.astype(np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(deep.astype(np.int32)).save(tmp_path / "wide.tif")
    Image.fromarray(np.full((20, 20), 65_535, np.int32)).save(tmp_path / "widest.tif")
    found = {file.name: shown(file) for file in tmp_path.iterdir()}
    assert found.pop("cmyk.tif") == pytest.approx([250, 10, 30], abs=2)
    assert found == {
        "palette.gif": [250, 10, 30], "grey.png": [99] * 3, "two.png": [255] * 3, "deep.png": [200] * 3,
        "wide.tif": [200] * 3, "widest.tif": [255] * 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "of"),
    [
        (np.array([[0, 70_000], [1, 2]], np.int32), "whole numbers of unknown range, from 0 to 70000"),
        (np.array([[-1, 65_535], [1, 2]], np.int32), "whole numbers of unknown range, from -1 to 65535"),
        (np.array([[0, 1], [1, 2]], np.float32), "floating-point numbers of unknown range"),
    ],
)
def test_pixels_of_unknown_range_are_refused(values: np.ndarray, of: str, tmp_path: Path) -> None:
    """Whole numbers were cut off at 16 bits, so that an image could become all white or all black."""
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(CorruptImage, match=rf"a\.tif cannot be read as an image \(its pixels are {of}\)"):
        ImageFiles(tmp_path, ("a.tif",), torch.tensor([0]), size=8)[0]


@pytest.mark.parametrize(("name", "white"), [("a.png", 1023), ("a.png", 4095), ("a.tif", 16_383), ("a.pgm", 65_535)])
def test_grey_of_fewer_than_16_bits_keeps_all_levels(name: str, white: int, tmp_path: Path) -> None:
    """Each of 256 known levels, with other lower bits; without the right white, 12 bits leave 16 levels."""
    levels = np.arange(256).reshape(16, 16)
    deep = levels * (white + 1) // 256 + np.random.default_rng(0).integers(0, (white + 1) // 256, (16, 16))
    Image.fromarray(deep.astype(np.uint16)).save(tmp_path / name)
    files = ImageFiles(tmp_path, (name,), torch.tensor([0]), size=16, area_min=1.0)
    for generator in (None, torch.Generator()):
        assert replace(files, white=white).image(0, generator)[0].equal(torch.from_numpy(levels).byte())
        assert len(files.image(0, generator).unique()) == (white + 1) // 256
    assert np.array_equal(np.asarray(read_image(tmp_path / name, white))[..., 0], levels)


def test_white(tmp_path: Path) -> None:
    """256 levels of equal width, by hand: of 0 to 999, each has 3.9 values. Images of 8 bits are as they are."""
    Image.fromarray(np.array([[0, 3, 4, 499, 500, 996, 999]], np.uint16)).save(tmp_path / "a.png")
    assert np.asarray(read_image(tmp_path / "a.png", 999))[0, :, 0].tolist() == [0, 0, 1, 127, 128, 254, 255]
    with pytest.raises(CorruptImage, match=r"a\.png .* \(it has a pixel of 999, above the 995 that counts as white\)"):
        read_image(tmp_path / "a.png", 995)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
    save(tmp_path / "a.png", pixels)
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.png", 4095)), pixels)


def write_deep(root: Path, brightest: int, name: str = "png") -> Path:
    """Two classes of grey images of 16 bits, of which one pixel of the last one is the brightest."""
    for place in range(24):
        file = root / "ab"[place % 2] / f"{place}.{name}"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(place).integers(0, brightest, (24, 24), np.uint16)
        pixels[0, 0] = brightest
        Image.fromarray(pixels).save(file)
    return root


@pytest.mark.parametrize(
    ("brightest", "levels", "white"),
    [(4095, 16, 4095), (2500, 10, 4095), (1000, 4, 1023), (16_383, 64, 16_383), (32_767, 128, 32_767)],
)
def test_images_that_leave_few_levels_are_said_so(brightest: int, levels: int, white: int, tmp_path: Path) -> None:
    data = dataset("folder", write_deep(tmp_path, brightest))
    assert data.dim is not None
    assert data.dim.white == white
    assert f"the brightest pixel in 24 grey images of more than 8 bits is {brightest}" in data.note
    assert f"{levels} of 256 levels are left" in data.note
    right = dataset("folder", tmp_path, white=white)
    assert right.dim is None
    assert "levels" not in right.note
    assert isinstance(right.train, ImageFiles)
    assert right.train.white == white
    assert np.asarray(read_image(right.train.files[0], white)).max() == 256 * brightest // (white + 1)


def test_images_that_use_their_range_are_not_remarked_on(tmp_path: Path) -> None:
    """Nor are images of 8 bits, black ones, and files that are no images."""
    assert dataset("folder", write_deep(tmp_path / "wide", 40_000)).dim is None
    assert dataset("folder", write_deep(tmp_path / "black", 1)).dim is not None
    for file in (tmp_path / "black").glob("*/*"):
        Image.fromarray(np.zeros((9, 9), np.uint16)).save(file)
    assert dataset("folder", tmp_path / "black").dim is None
    root = write_folder(tmp_path / "usual", {"a": 12, "b": 12})
    (root / "a" / "broken.png").write_bytes(b"no image")
    assert dataset("folder", root, white=4095).dim is None


def test_a_white_that_images_exceed_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    write_deep(tmp_path, 5000)
    with pytest.raises(ValueError, match=r"^white is 4095; .*\.png has a pixel of 5000, so it must be at least that$"):
        dataset("folder", tmp_path, white=4095)
    for white in (0, 65_536):
        with pytest.raises(ValueError, match=rf"^white is {white}; it must be 1 to 65535$"):
            dataset("folder", tmp_path, white=white)


def deep_color(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits in three channels, which Pillow does not write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_color_of_more_than_8_bits(tmp_path: Path) -> None:
    """Pillow reads its upper 8 bits and has no others; few levels are said so, and another white is refused."""
    write_folder(tmp_path, {"a": 8, "b": 8})
    (tmp_path / "a" / "deep.png").write_bytes(deep_color(np.full((20, 20, 3), [4095, 512, 0])))
    assert shown(tmp_path / "a" / "deep.png") == [15, 2, 0]
    data = dataset("folder", tmp_path)
    assert "16 of 256 levels are left; convert these images to 8 bits a channel" in data.note
    assert data.dim is not None
    assert data.dim.white is None
    with pytest.raises(CorruptImage, match=r"several channels of more than 8 bits.*, for which white must be 65535"):
        read_image(tmp_path / "a" / "deep.png", 4095)
    with pytest.raises(ValueError, match=r"^white is 4095; .*deep\.png cannot be read with it: .* it must be 65535$"):
        dataset("folder", tmp_path, white=4095)
    (tmp_path / "a" / "deep.png").write_bytes(deep_color(np.full((20, 20, 3), [60_000, 512, 0])))
    assert dataset("folder", tmp_path).dim is None


def test_what_is_clear_is_white(tmp_path: Path) -> None:
    clear = np.concatenate([RED, np.zeros((20, 20, 1))], -1)
    save(tmp_path / "clear.png", clear)
    assert shown(tmp_path / "clear.png") == [255] * 3
    clear[..., 3] = 255
    save(tmp_path / "opaque.png", clear)
    assert shown(tmp_path / "opaque.png") == [250, 10, 30]
    save(tmp_path / "palette.png", np.zeros((20, 20)), "P", transparency=bytes(256))
    assert shown(tmp_path / "palette.png") == [255] * 3


def test_orientation_is_as_a_viewer_shows_it(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right by a quarter
    pixels = np.zeros((64, 64, 3))
    pixels[:32] = 255  # bright above: bright at the right when turned
    image, _ = save(tmp_path / "a.png", pixels, exif=exif)[0]
    assert image[:, :, 6:].float().mean() > 200
    assert image[:, :, :2].float().mean() < 50


def jpeg() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


UNREADABLE = {
    "empty": b"", "text": b"no image at all", "half a JPEG": jpeg()[: len(jpeg()) // 2], "start of a JPEG": jpeg()[:20],
    "zeros": bytes(1000), "start of a GIF": b"GIF89a", "start of a PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
}  # fmt: skip


@pytest.mark.parametrize("written", UNREADABLE)
def test_unreadable_file_is_named(written: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(UNREADABLE[written])
    files = ImageFiles(tmp_path, ("bad.jpg",), torch.tensor([0]))
    with pytest.raises(CorruptImage, match=r"bad\.jpg cannot be read as an image \(.+\)$"):
        files[0]


def test_files_go_to_worker_processes(tmp_path: Path) -> None:
    files = save(tmp_path / "a.png", RED).take(torch.tensor([0, 0]))
    again = pickle.loads(pickle.dumps(files))
    assert again[1][0].equal(files[0][0])
    assert again.files == (tmp_path / "a.png",) * 2
    problem = pickle.loads(pickle.dumps(CorruptImage(tmp_path / "a.png", "why")))
    assert (problem.file, problem.reason) == (tmp_path / "a.png", "why")


# Folders


def names(part: ImageFiles) -> list[str]:
    return list(part.names)


def test_a_folder_is_split_by_the_seed(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 20, "dog": 10, "ant": 3}, side=4)
    data = dataset("folder", tmp_path)
    assert data.classes == ("ant", "cat", "dog")
    assert in_each(data) == [[1, 14, 7], [1, 2, 1], [1, 4, 2]]
    everything = [name for part in PARTS for name in names(getattr(data, part))]
    assert sorted(everything) == sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.glob("*/*"))
    for part in PARTS:
        for name, label in zip(getattr(data, part).names, getattr(data, part).labels, strict=True):
            assert name.startswith(data.classes[label])
    assert names(dataset("folder", tmp_path).train) == names(data.train)
    assert names(dataset("folder", tmp_path, seed=1).train) != names(data.train)
    assert data.mean == (0.485, 0.456, 0.406)
    assert data.fill == (124, 116, 104)
    assert "10%" in data.note
    assert "20%" in data.note


def halves(**counts: tuple[int, int]) -> dict[str, int]:
    """The folders a and b in each of these."""
    return {f"{part}/{name}": count for part, both in counts.items() for name, count in zip("ab", both, strict=True)}


@pytest.mark.parametrize(
    ("counts", "classes", "labels"),
    [
        *(
            (halves(train=(5, 6), test=(3, 4), **{val: (2, 2)}), ("a", "b"), [[5, 6], [2, 2], [3, 4]])
            for val in ("val", "validation", "valid", "Val")
        ),
        (halves(Training=(9, 9), Testing=(3, 4)), ("a", "b"), [[8, 8], [1, 1], [3, 4]]),  # once taken for two classes
        (halves(train=(11, 11), val=(2, 2)), ("a", "b"), [[9, 9], [2, 2], [2, 2]]),
        ({"train": 5, "bus": 5}, ("bus", "train"), [[3, 3], [1, 1], [1, 1]]),
        ({"train": 5, "train/steam": 5, "bus": 5, "car": 5}, ("bus", "car", "train"), [[3, 3, 7], [1] * 3, [1, 1, 2]]),
    ],
)
def test_which_folders_are_splits_and_which_classes(
    counts: dict[str, int], classes: tuple[str, ...], labels: list[list[int]], tmp_path: Path
) -> None:
    data = dataset("folder", write_folder(tmp_path, counts, side=4))
    assert data.classes == classes
    assert in_each(data) == labels
    assert "not used" not in data.note
    if "test/a" in counts:
        assert all(name.lower().startswith(part) for part in PARTS for name in names(getattr(data, part)))
    elif "val/a" in counts:
        assert all(name.startswith("train/") for name in names(data.test))
        assert "for the test 20% of each class, cut from the training images by seed 0" in data.note


def test_val_and_test_may_lack_classes_of_train(tmp_path: Path) -> None:
    """Whether their folders are empty or not there; labels are train's."""
    tails = {f"train/{name}": 1 for name in ("a", "c", "e", "g", "h")}
    heads = {f"{part}/{name}": n for part, n in (("train", 9), ("val", 2), ("test", 3)) for name in ("b", "d")}
    write_folder(tmp_path, {**tails, **heads, "val/f": 1, "train/f": 2, "test/c": 0, "test/f": 0}, side=4)
    data = dataset("folder", tmp_path, size=8)
    assert data.classes == tuple("abcdefgh")
    counts = [getattr(data, part).labels.bincount(minlength=8).tolist() for part in PARTS]
    assert counts == [[1, 9, 1, 9, 1, 2, 1, 1], [0, 2, 0, 2, 0, 1, 0, 0], [0, 3, 0, 3, 0, 0, 0, 0]]
    for part in PARTS:
        for name, label in zip(getattr(data, part).names, getattr(data, part).labels, strict=True):
            assert name.split("/")[1] == data.classes[label]
    assert "val has no images of class a, c, e and 2 more; test has no images of class a, c, e and 3 more" in data.note
    rehearsed = data.rehearsal(0.5, 0)
    assert sorted([len(rehearsed.val), len(rehearsed.test)]) == [2, 3]


def test_imagenets_validation_folder_is_the_test_set(tmp_path: Path) -> None:
    write_folder(tmp_path / "imagenet", {"train/n1": 100, "train/n2": 10, "val/n1": 2, "val/n2": 2}, side=4)
    for root in (tmp_path, tmp_path / "imagenet"):
        data = dataset("imagenet", root, size=16)
        assert in_each(data) == [[98, 9], [2, 1], [2, 2]]
        assert all(name.startswith("val/") for name in names(data.test))
        assert data.test[0][0].shape == (3, 16, 16)
        assert "2 of ImageNet's 1,000 classes" in data.note
    write_folder(tmp_path / "imagenet", {"train/n3": 9}, side=4)
    with pytest.raises(ValueError, match=r"val lacks n3; it must have the class folders of .*train"):
        dataset("imagenet", tmp_path)  # what is missing there was not unpacked


RARE = ("jfif", "jpe", "JIF", "pnm", "pbm")  # forty JPEGs called .jfif were passed over in silence


def test_only_images_count_and_other_files_are_said(tmp_path: Path) -> None:
    """Over all splits, the most frequent extensions first, and no more than three of them."""
    counts = {f"{part}/{name}": 6 for part in PARTS for name in ("a", "b/deeper")}
    write_folder(tmp_path, {**counts, "train/.hidden": 5, "meta": 0}, side=4)
    for place, extension in enumerate(RARE):
        file = tmp_path / "train" / "a" / f"{place:03d}.png"
        file.rename(file.with_suffix(f".{extension}"))
    for name in ("train/a/.a.png", "README.md"):
        (tmp_path / name).write_bytes(b"")
    data = dataset("folder", tmp_path, size=8)
    assert data.classes == ("a", "b")
    assert in_each(data) == [[6, 6]] * 3
    assert sorted(Path(name).suffix for name in names(data.train) if ".png" not in name) == sorted(
        f".{x}" for x in RARE
    )
    assert all(data.train[place][0].shape == (3, 8, 8) for place in range(12))
    assert "not read" not in data.note
    assert "not used: meta" in data.note
    others = ("train/a/1.RAW", "val/b/deeper/2.raw", "test/a/3.heic", "test/b/README", "test/b/4.xml")
    for name in others:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "val" / "a" / "5.png.png").symlink_to(tmp_path / "gone.png")
    note = dataset("folder", tmp_path).note
    assert "6 files were not read: .raw, " in note
    assert " and 2 more" in note
    for name in others:
        (tmp_path / name).unlink()
    assert "1 file was not read: a broken link" in dataset("folder", tmp_path).note


@pytest.mark.parametrize("strays", [("train",), ("val",), ("train", "val", "test", ".")])
def test_a_stray_picture_does_not_make_classes_of_the_splits(strays: tuple[str, ...], tmp_path: Path) -> None:
    """Train, val and test became the classes, and test images were trained on."""
    counts = {f"{part}/{name}": n for part, n in (("train", 5), ("val", 2), ("test", 3)) for name in ("cat", "dog")}
    write_folder(tmp_path, counts, side=4)
    before = dataset("folder", tmp_path)
    assert "not used" not in before.note
    for place in strays:
        save(tmp_path / place / "overview.png", np.zeros((4, 4)))
    data = dataset("folder", tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.fingerprint() == before.fingerprint()
    for place in strays:
        assert f"1 image directly in {(tmp_path / place).name}" in data.note


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "root", {"a": 5}, side=4)
    write_folder(tmp_path / "elsewhere", {"b": 5}, side=4)
    (root / "b").symlink_to(tmp_path / "elsewhere" / "b")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a")
    (root / "a" / "circle.png").symlink_to(root / "a" / "circle.png")
    (root / "a" / "nowhere.png").symlink_to(root / "gone.png")
    data = dataset("folder", root)
    assert data.classes == ("a", "b")
    assert sum(len(getattr(data, part)) for part in PARTS) == 10


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({}, "has no class folders; put the images of each class in a folder"),
        ({".": 3}, "has no class folders .its images lie directly in it."),
        ({"a": 5}, "has one class folder, a; a classifier needs at least 2"),
        ({"a": 5, "b": 0}, "no images in class b of"),
        ({"a": 5, "b": 2}, r"too few images in class b \(2\) of .* for validation and the test, which takes 3 of"),
        (
            {"z": 9} | {name: 1 + place % 2 for place, name in enumerate("abcdefg")},
            r"in class a \(1\), b \(2\), c \(1\) and 4 more of .*; add images, remove these classes, or .* val and",
        ),
        ({"train/a": 5, "train/b": 1, "test/a": 1, "test/b": 1}, r"class b \(1\) of .* validation, which takes 2"),
        ({"train/a": 5, "train/b": 5, "val/a": 1, "val/c": 1}, "val has class c, which .*train lacks; add training"),
        ({"train/a": 5, "train/b": 0, "val/a": 1, "val/b": 1}, "no images in class b of .*train"),
        ({"train/a": 5, "train/b": 5, "val/a": 0, "val/b": 0}, "val has images of fewer than 2 classes of .*train;"),
        ({"train/a": 5, "train/b": 5, "val": 3}, "val has no class folders .its images lie directly in it."),
        ({"train/a": 5, "train/b": 5, "val/a": 1, "valid/a": 1}, "has both val and valid; keep one of them"),
        ({"val/a": 5, "val/b": 5, "more/a": 5}, "has val but no train; add train"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(counts: dict[str, int], sentence: str, tmp_path: Path) -> None:
    write_folder(tmp_path, counts, side=4)
    with pytest.raises(ValueError, match=sentence):
        dataset("folder", tmp_path)


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*gone"):
        dataset("folder", tmp_path / "gone")
    with pytest.raises(
        ValueError, match=r"^root is None; the data set folder has no default folder; name a folder of your own images$"
    ):
        dataset("folder")
    with pytest.raises(ValueError, match=r"ImageNet is not there: .*register at https://image-net.org"):
        dataset("imagenet", tmp_path)
    write_folder(tmp_path, {"train/a": 1}, side=4)
    with pytest.raises(ValueError, match=r"ImageNet is not complete: .*/val is missing; register"):
        dataset("imagenet", tmp_path)


# All of them


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("cifar10", {"size": 64}, "size is 64; images of CIFAR-10 have 32 pixels a side"),
        ("digits", {"size": 0}, "size is 0; images of digits have 8 to 64 pixels a side"),
        ("digits", {"held_out": (0.1, 0.1)}, "the splits of digits are fixed"),
        ("digits", {"per_class": 0}, "per_class is 0; it must be 1 to 11"),
        *(("digits", {"seed": seed}, f"seed is {seed}; it must be 0 to 4294967295") for seed in (-1, 2**32)),
        *(
            ("folder", {"held_out": shares}, r"the shares held out are .*; each must be above 0, and their sum below 1")
            for shares in ((0.0, 0.2), (0.5, 0.5), (-0.1, 0.2), (1.0, 0.1), (float("nan"), 0.1))
        ),
        ("digits", {"per_class": 998}, r"^per_class is 998; it must be 1 to 11\d, the size of the largest class$"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 5, "b": 5}, side=4)
    with pytest.raises(ValueError, match=sentence):
        dataset(name, tmp_path, **options)


def test_per_class_keeps_a_few_of_each(cifar10: Path) -> None:
    whole, few, fewer = (dataset("cifar10", cifar10, per_class=k) for k in (None, 5, 3))
    assert few.train.labels.bincount().tolist() == [5] * 10
    assert set(keys(fewer.train)) < set(keys(few.train)) < set(keys(whole.train))
    assert few.val.images.equal(whole.val.images)
    assert few.test.images.equal(whole.test.images)
    assert few.mean == few.train.statistics()[0]
    assert "; 5 training images of each class kept" in few.note


def test_per_class_keeps_smaller_classes_whole(tmp_path: Path) -> None:
    counts = {"train/a": 1, "train/b": 4, "train/c": 9, "val/b": 2, "val/c": 3, "test/b": 2, "test/c": 3}
    write_folder(tmp_path, counts, side=4)
    whole, few, fewer = (dataset("folder", tmp_path, per_class=k) for k in (None, 5, 3))
    assert [data.train.labels.bincount().tolist() for data in (few, fewer)] == [[1, 4, 5], [1, 3, 3]]
    assert set(names(fewer.train)) < set(names(few.train)) < set(names(whole.train))
    assert names(few.val) == names(whole.val)
    assert "; at most 5 training images of each class kept" in few.note
    with pytest.raises(ValueError, match=r"^per_class is 10; it must be 1 to 9, the size of the largest class$"):
        dataset("folder", tmp_path, per_class=10)


def test_a_constant_channel_can_be_normalized_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path))
    for file in (tmp_path / "cifar-10-batches-bin").iterdir():
        rewrite(file, lambda written: bytes(len(written)))
    assert dataset("cifar10", tmp_path).std == (1.0, 1.0, 1.0)


def test_fingerprint_changes_with_any_image_label_or_order() -> None:
    data = dataset("digits", size=8)
    before = data.fingerprint()
    images, labels = data.val.images.clone(), data.val.labels.clone()
    images[17, 0, 3, 3] ^= 1
    labels[5] = (labels[5] + 1) % 10
    backwards = torch.arange(len(data.val)).flip(0)
    assert replace(data).fingerprint() == before
    for parts in (
        {"val": Images(images, data.val.labels)}, {"val": Images(data.val.images, labels)},
        {"val": data.val.take(backwards)}, {"val": data.test, "test": data.val},
    ):  # fmt: skip
        assert replace(data, **parts).fingerprint() != before
    assert len(before) == 16


def test_fingerprint_of_files_is_of_names_and_sizes(tmp_path: Path) -> None:
    write_folder(tmp_path / "x", {"a": 5, "b": 5}, side=4)
    data = dataset("folder", tmp_path / "x")
    before = data.fingerprint()
    (tmp_path / "x").rename(tmp_path / "y")
    assert dataset("folder", tmp_path / "y").fingerprint() == before
    (tmp_path / "y" / data.val.names[0]).write_bytes(b"shorter")
    assert dataset("folder", tmp_path / "y").fingerprint() != before
    (tmp_path / "y" / data.val.names[0]).unlink()
    assert dataset("folder", tmp_path / "y").fingerprint() != before


# Which are there


def states(root: Path) -> dict[str, str]:
    return {found.name: found.state for found in status(root)}


def test_status_of_an_empty_folder(tmp_path: Path) -> None:
    assert states(tmp_path) == {"digits": "complete", **dict.fromkeys(list(DATASETS)[1:-1], "missing")}
    found = {entry.name: entry for entry in status(tmp_path)}
    assert found["cifar10"].where == tmp_path / "cifar-10-batches-bin"
    assert found["cifar10"].how == f"get it: metaaugment data get cifar10 --data {tmp_path}"
    assert "image-net.org" in found["imagenet"].how
    assert found["digits"].how == ""


def test_status_finds_what_is_there(cifar10: Path, letters: Path) -> None:
    root = letters.parent
    assert states(root)["cifar10"] == states(root)["omniglot"] == "complete"
    next(iter(sorted(cifar10.iterdir()))).unlink()
    next(letters.glob("*/*/*/*.png")).unlink()
    write_folder(root / "imagenet", {"train/a": 1, "train/b": 1, "val/a": 1, "val/b": 1}, side=4)
    assert "data_batch_1" in states(root)["cifar10"]
    assert states(root)["cifar10"].startswith("incomplete: ")
    assert "has 19 drawings where 20 are expected" in states(root)["omniglot"]
    assert "train has 2 class folders where 1,000 are expected" in states(root)["imagenet"]
