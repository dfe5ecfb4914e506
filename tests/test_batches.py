"""Mini-batches as a function of seed and step alone: in memory and from files, by any number of workers."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from metaaugment.lab.data.batches import Batch, Batches, Reader, on_device, once
from metaaugment.lab.data.files import CorruptImage, ImageFiles
from metaaugment.lab.data.images import Images

from trees import write_folder

CPU = torch.device("cpu")
FILES, BATCH = 10, 4
STEPS = FILES // BATCH  # in an epoch; two images are left over


def in_memory(n: int = FILES) -> Images:
    """The label of an image is its place."""
    return Images(torch.randint(0, 256, (n, 3, 6, 6), dtype=torch.uint8), torch.arange(n))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ImageFiles:
    return write_files(tmp_path_factory.mktemp("files"))


def write_files(root: Path, broken: Iterable[int] = ()) -> ImageFiles:
    """Ten pictures whose label is their place; some hold no image."""
    write_folder(root, {"a": FILES}, side=20)
    names = tuple(sorted(f"a/{file.name}" for file in (root / "a").iterdir()))
    for place in broken:
        (root / names[place]).write_bytes(b"no image at all")
    return ImageFiles(root, names, torch.arange(FILES), size=16)


def shuffled(split: Images | ImageFiles, seed: int = 3, batch: int = BATCH, reader: Reader | None = None) -> Batches:
    return Batches(split, batch, seed, CPU, reader)


def take(batches: Batches, count: int, step: int = 0) -> list[Batch]:
    return list(islice(batches.since(step), count))


def places(batches: Iterable[Batch]) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def same(one: list[Batch], other: list[Batch]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "files", "files of which some are left out"])
def test_any_step_goes_on_where_the_first_would(kind: str, files: ImageFiles, tmp_path: Path) -> None:
    left_out = kind == "files of which some are left out"
    split = in_memory() if kind == "memory" else write_files(tmp_path, broken=[1, 6]) if left_out else files
    batches = shuffled(split, reader=Reader(skip=left_out))
    whole = take(batches, 3 * STEPS)
    if isinstance(split, Images):
        assert all(torch.equal(images, split.images[labels]) for images, labels in whole)
    for step in range(2 * STEPS + 1):
        assert same(take(batches, 3 * STEPS - step, step), whole[step:])


def epochs(batches: Batches, count: int) -> list[list[int]]:
    steps = len(batches.split) // batches.batch
    seen = places(take(batches, count * steps))
    return [[*chain.from_iterable(seen[epoch * steps : (epoch + 1) * steps])] for epoch in range(count)]


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_an_epoch_has_each_image_once_without_the_remainder(kind: str, files: ImageFiles) -> None:
    batches = shuffled(in_memory() if kind == "memory" else files)
    assert batches.steps == STEPS == 2
    for epoch in epochs(batches, 3):
        assert len(epoch) == len(set(epoch)) == STEPS * BATCH
        assert set(epoch) < set(range(FILES))
    if kind == "memory":
        for epoch in epochs(shuffled(in_memory(12)), 3):  # where batches fit
            assert sorted(epoch) == list(range(12)) != epoch
        # The remainder is another each time: of 20 epochs, an image is left out of all with a chance of 0.2²⁰.
        assert set(chain.from_iterable(epochs(batches, 20))) == set(range(FILES))


def test_other_epochs_and_seeds_have_other_orders() -> None:
    """Of 40 images, two orders agree by chance once in 40! times."""
    orders = [tuple(epoch) for seed in range(5) for epoch in epochs(shuffled(in_memory(40), seed), 5)]
    assert len(set(orders)) == 25
    assert [tuple(epoch) for epoch in epochs(shuffled(in_memory(40), 4), 5)] == orders[20:]


def test_each_place_has_each_image_alike() -> None:
    """The first of an epoch, over 2,000 epochs: χ² of 9 degrees of freedom, six standard deviations above its mean."""
    batches = shuffled(in_memory())
    counts = torch.stack([batches.order(epoch)[0, 0] for epoch in range(2000)]).bincount(minlength=FILES).double()
    assert float(((counts - 200) ** 2 / 200).sum()) < 9 + 6 * 18**0.5


# -- files -----------------------------------------------------------------------------------------------------------


def test_workers_change_nothing(files: ImageFiles) -> None:
    """Neither from the first step on nor from within an epoch, nor for evaluation."""
    alone, helped = shuffled(files), shuffled(files, reader=Reader(workers=2))
    assert same(take(helped, 5), take(alone, 5))
    assert same(take(helped, 3, step=3), take(alone, 3, step=3))
    assert same(list(once(files, CPU, Reader(2), batch=3)), list(once(files, CPU, batch=3)))


def by_place(batches: list[Batch]) -> dict[int, Tensor]:
    return {int(label): image for images, labels in batches for image, label in zip(images, labels, strict=True)}


def test_the_view_of_a_file_depends_on_seed_epoch_and_file_alone(files: ImageFiles) -> None:
    """Not on the mini-batch that it is in: by twos and by fives the same pixels."""
    twos, fives = by_place(take(shuffled(files, batch=2), 5)), by_place(take(shuffled(files, batch=5), 2))
    assert set(twos) == set(fives) == set(range(FILES))
    assert all(torch.equal(twos[place], fives[place]) for place in twos)
    later = by_place(take(shuffled(files, batch=5), 2, step=2))
    other = by_place(take(shuffled(files, seed=4, batch=5), 2))
    for views in (later, other):
        assert not any(torch.equal(views[place], fives[place]) for place in fives)


def test_middles_are_what_evaluation_sees(files: ImageFiles) -> None:
    middles = by_place(take(Batches(files, BATCH, 3, CPU, middles=True), 3))
    for images, labels in once(files, CPU):
        assert all(torch.equal(image, middles[place]) for image, place in zip(images, labels.tolist(), strict=True)
                   if place in middles)  # fmt: skip
    parts = by_place(take(shuffled(files), 3))
    assert middles.keys() == parts.keys(), "in the same order"
    assert not any(torch.equal(middles[place], parts[place]) for place in parts)


def test_reading_draws_nothing_from_torchs_own_generator(files: ImageFiles) -> None:
    """A resumed run reads anew, and its network must still draw what it would have drawn."""
    state = torch.get_rng_state()
    take(shuffled(files), 3)
    list(once(files, CPU))
    assert torch.equal(torch.get_rng_state(), state)


# -- files that cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_file_is_named(tmp_path: Path, workers: int) -> None:
    split = write_files(tmp_path, broken=[6])
    with pytest.raises(CorruptImage, match=r"^\S*/a/006\.png cannot be read as an image \(.+\)$"):
        take(shuffled(split, reader=Reader(workers)), 2 * STEPS)
    with pytest.raises(CorruptImage, match=r"/a/006\.png"):
        list(once(split, CPU, Reader(workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_files_are_counted_once_and_the_batch_keeps_its_size(tmp_path: Path, workers: int) -> None:
    broken = [1, 6]
    split = write_files(tmp_path, broken)
    reader = Reader(workers, skip=True)
    batches = shuffled(split, reader=reader)
    taken = take(batches, 6 * STEPS)
    whole = shuffled(split)
    for step, (images, labels) in enumerate(taken):
        asked = whole.order(step // STEPS)[step % STEPS].tolist()
        readable = [place for place in asked if place not in broken]
        # The readable ones in their order, and then from the first one on again.
        assert labels.tolist() == (readable * 2)[:BATCH] == batches.places(step).tolist()
        assert len(images) == BATCH
        assert torch.equal(images[len(readable) :], images[: BATCH - len(readable)])
    assert reader.unreadable == {split.files[place] for place in broken}


def test_evaluation_leaves_unreadable_files_out(tmp_path: Path) -> None:
    reader = Reader(skip=True)
    split = write_files(tmp_path, broken=[0, 1, 2, 7])
    # Of the first three nothing is left, so there is no batch of them.
    assert places(once(split, CPU, reader, batch=3)) == [[3, 4, 5], [6, 8], [9]]
    assert len(reader.unreadable) == 4


def test_a_batch_of_unreadable_files_alone_is_refused(tmp_path: Path) -> None:
    """Left out, it would move all later steps."""
    batches = shuffled(write_files(tmp_path / "one", broken=[5]), batch=1, reader=Reader(skip=True))
    with pytest.raises(ValueError, match=r"no image of a mini-batch can be read: .*005\.png .*, to name the first; "):
        take(batches, FILES)
    every = shuffled(write_files(tmp_path / "all", broken=range(FILES)), reader=Reader(skip=True))
    with pytest.raises(ValueError, match="no image of a mini-batch can be read"):
        take(every, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_gone_is_an_oserror_that_names_it(tmp_path: Path, workers: int) -> None:
    """It is no fault of the image, so it is never skipped; the program prints what `filename` says."""
    split = write_files(tmp_path)
    split.files[3].unlink()
    with pytest.raises(FileNotFoundError) as caught:
        list(once(split, CPU, Reader(workers, skip=True)))
    assert caught.value.filename == str(split.files[3])


# -- evaluation, and the device --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 10, 1000])
def test_once_has_everything_in_order(files: ImageFiles, batch: int) -> None:
    split = in_memory()
    for one in (split, files):
        taken = list(once(one, CPU, batch=batch))
        assert torch.cat([labels for _, labels in taken]).tolist() == list(range(FILES))
        assert all(len(labels) == batch for _, labels in taken[:-1])
        for place, image in enumerate(torch.cat([images for images, _ in taken])):
            assert torch.equal(image, one[place][0])


def test_a_split_in_memory_lies_on_the_device_and_files_stay() -> None:
    """torch's device without memory stands in for one with a GPU."""
    meta = torch.device("meta")
    split = on_device(in_memory(), meta)
    assert isinstance(split, Images)
    assert split.images.device == split.labels.device == meta
    here = in_memory()
    assert on_device(here, CPU).images.data_ptr() == here.images.data_ptr()  # pyright: ignore
    images, labels = next(Batches(split, BATCH, 0, meta).since(1))
    assert images.device == labels.device == meta
    assert images.shape == (BATCH, 3, 6, 6)
    assert [images.device for images, _ in once(in_memory(), meta)] == [meta]
    assert on_device(files := ImageFiles(Path("/"), (), torch.zeros(0)), meta) is files


def test_large_images_are_evaluated_a_few_at_a_time(files: ImageFiles) -> None:
    """Else the first evaluation takes more memory than the training that a user has chosen --batch for."""
    meta = torch.device("meta")
    large = Images(torch.empty(10, 3, 2048, 2048, dtype=torch.uint8, device=meta), torch.zeros(10, device=meta).long())
    assert [len(images) for images, _ in once(large, meta)] == [4, 4, 2]
    assert places(once(replace(files, size=2048), CPU)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(list(once(files, CPU))) == 1


# -- processes that read ----------------------------------------------------------------------------------------------


def test_shared_memory_that_is_full_is_said(files: ImageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over by a thread of the worker, it would end in nothing, and be waited for for ever."""

    def full(tensor: Tensor) -> Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(OSError, match=r"shared memory is full \(each .* MiB\); use fewer workers") as raised:
        take(shuffled(files, reader=Reader(1)), 1)
    assert raised.value.filename == "/dev/shm"
    assert len(take(shuffled(files), 1)) == 1  # which needs none


SHARED = {
    (16, 1 / 9): (14, 2), (16, 2 / 3): (5, 11), (16, 0.99): (1, 15), (2, 0.9): (1, 1), (1, 0.1): (1, 1),
    (0, 0.5): (0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("workers", "part"), SHARED)
def test_readers_are_shared_out(workers: int, part: float) -> None:
    whole = Reader(workers, skip=True)
    both = whole.shared_out(part)
    assert tuple(reader.workers for reader in both) == SHARED[workers, part]
    both[1].unreadable.add(Path("a file"))
    assert whole.unreadable == both[0].unreadable == {Path("a file")}
    assert all(reader.skip for reader in both)
