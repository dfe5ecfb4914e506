"""Mini-batches in an order that is a function of the seed alone: the position in the data is one number, the step."""

import errno
import itertools
import math
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from metaaugment.distributed import share, world_size
from metaaugment.lab.data.files import CorruptImage, ImageFiles
from metaaugment.lab.data.images import Images
from metaaugment.lab.data.splits import Split
from metaaugment.lab.seeds import derived_seed

Batch = tuple[Tensor, Tensor]
# An evaluation batch has at most this many images, and this many pixels: 334 images of 224 × 224.
EVALUATION_BATCH, EVALUATION_PIXELS = 1000, 2**24
SHARED = "use fewer workers, a smaller mini-batch, or more shared memory (for a container: --shm-size)"


class Reader:
    """How files become batches: with how many worker processes, and what happens to files that cannot be read.

    Args:
        workers: processes that read ahead; 0 reads in this one.
        skip: whether unreadable files are left out and counted in `unreadable`, instead of raising `CorruptImage`.
    """

    def __init__(self, workers: int = 0, skip: bool = False) -> None:
        self.workers = workers
        self.skip = skip
        self.unreadable: set[Path] = set()

    def shared_out(self, part: float) -> tuple["Reader", "Reader"]:
        """Two readers that divide this one's workers, the second getting about this part and each at least one; they
        share its record of unreadable files."""
        if self.workers == 0:
            return self, self
        second = max(1, min(round(part * self.workers), self.workers - 1))
        both = Reader(max(1, self.workers - second), self.skip), Reader(second, self.skip)
        for reader in both:
            reader.unreadable = self.unreadable
        return both

    def readable(self, split: Split, places: Iterable[int]) -> list[int]:
        """Of these places in a split, those whose files have not been found unreadable so far."""
        if isinstance(split, Images):
            return list(places)
        return [place for place in places if split.root / split.names[place] not in self.unreadable]

    def batches(self, views: Any, indices: Any, device: torch.device, full: bool = False) -> Iterator[Batch]:
        """Batches of views; with `full`, others of the same batch stand in for those that are left out."""
        loader = DataLoader(
            views,
            batch_sampler=indices,
            collate_fn=_stacked_in_full if full else _stacked,  # in the workers: one tensor to hand over, not hundreds
            num_workers=self.workers,
            multiprocessing_context=_server() if self.workers and world_size() > 1 else None,
            prefetch_factor=2 if self.workers else None,
            worker_init_fn=_obey_the_parent,
            pin_memory=device.type == "cuda",  # copied while the device computes
            generator=torch.Generator(),  # of its own: the network's draws must not depend on reading
        )
        for readable, problems in loader:
            for problem in problems:
                if isinstance(problem, OSError) or not self.skip:  # a disk error is never skipped
                    raise problem
                self.unreadable.add(problem.file)
            if full and not readable:
                raise ValueError(
                    f"no image of a mini-batch can be read: {problems[0]}, to name the first; "
                    "begin another run with a larger mini-batch, or without these files"
                )
            if readable:
                images, labels = readable
                yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class Batches:
    """Endless shuffled mini-batches of a split on a device; an epoch leaves out what does not fill its last one.

    With several processes, each gets its own part of every mini-batch; `batch` counts the images of all of them.

    A split in memory should lie on the device. Files give what training sees of their images, or with `middles` what
    evaluation sees. A random part depends on the seed, the epoch and the file alone, so that neither the number of
    workers nor an interruption changes anything.
    """

    def __init__(
        self,
        split: Split,
        batch: int,
        seed: int,
        device: torch.device,
        reader: Reader | None = None,
        *,
        middles: bool = False,
    ) -> None:
        self.split, self.batch, self.seed, self.device = split, batch, seed, device
        self.reader, self.middles = reader or Reader(), middles

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return len(self.split) // self.batch

    @property
    def unreadable(self) -> list[str]:
        """Names of the files that were left out so far, relative to the split's folder, which may be moved."""
        if isinstance(self.split, Images):
            return []
        return sorted(file.relative_to(self.split.root).as_posix() for file in self.reader.unreadable)

    def leave_out(self, names: Iterable[str]) -> None:
        """Count files among those that were left out: what `unreadable` said before an interruption."""
        if not isinstance(self.split, Images):
            self.reader.unreadable.update(self.split.root / name for name in names)

    def order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, epoch))
        return torch.randperm(len(self.split), generator=generator)[: self.steps * self.batch].view(-1, self.batch)

    def since(self, step: int) -> Generator[Batch]:
        """The batches from a step on, counted over all epochs from 0."""
        if isinstance(self.split, ImageFiles):
            views = _Views(self.split, None if self.middles else self.seed)
            yield from self.reader.batches(views, self._named(step), self.device, full=True)
        else:
            for epoch in itertools.count(step // self.steps):
                for row in self.order(epoch).to(self.device)[step % self.steps :, share(self.batch)]:
                    yield self.split.images[row], self.split.labels[row]
                step = 0

    def places(self, step: int) -> Tensor:
        """The places in the split of the images that this process got at a step; an image that stood in for an
        unreadable file appears again."""
        row = self.order(step // self.steps)[step % self.steps, share(self.batch)].tolist()
        readable = self.reader.readable(self.split, row)
        return torch.tensor(list(itertools.islice(itertools.cycle(readable), len(row))))

    def _named(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """Epoch and place of each image of each batch."""
        for epoch in itertools.count(step // self.steps):
            for row in self.order(epoch)[step % self.steps :, share(self.batch)].tolist():
                yield [(epoch, place) for place in row]
            step = 0


def once(split: Split, device: torch.device, reader: Reader | None = None, batch: int | None = None) -> Iterator[Batch]:
    """All of a split in its order, for evaluation."""
    batch = batch or max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // math.prod(split.sides)))
    places = (range(start, min(start + batch, len(split))) for start in range(0, len(split), batch))
    if isinstance(split, ImageFiles):
        names = ([(0, place) for place in part] for part in places)
        yield from (reader or Reader()).batches(_Views(split, None), names, device)
    else:
        for part in places:
            yield split.images[part.start : part.stop].to(device), split.labels[part.start : part.stop].to(device)


def _server() -> BaseContext:
    """What starts workers when several processes train together: a fork server, which has no threads.

    Forking this process itself may hang: collectives have threads, one of which may hold a Python lock at that moment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # first, because it unblocks the signal that is blocked below
    # torchrun ends whole process groups; the server ignores its signal, and ends with this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _obey_the_parent(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal; workers ignore it, and the process that trains ends them.

    torchrun ends whole process groups, so each worker has a group of its own.
    """
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


View = tuple[Tensor, int] | CorruptImage | OSError  # of a file, or why there is none


def _stacked(views: list[View], full: bool = False) -> tuple[Batch | tuple[()], list[CorruptImage | OSError]]:
    """A batch of the readable views, and the problems of the rest; with `full`, readable ones stand in for these."""
    readable = [view for view in views if isinstance(view, tuple)]
    problems = [view for view in views if not isinstance(view, tuple)]
    if not readable:
        return (), problems
    if full:
        readable = list(itertools.islice(itertools.cycle(readable), len(views)))
    images, labels = torch.stack([image for image, _ in readable]), torch.tensor([label for _, label in readable])
    if get_worker_info() is not None:
        try:
            images.share_memory_()  # here, because a failure in the thread that hands it over goes unnoticed
        except RuntimeError:
            needed = f"each mini-batch that is read ahead takes {images.nbytes / 2**20:,.0f} MiB"
            return (), [OSError(errno.ENOSPC, f"shared memory is full ({needed}); {SHARED}", "/dev/shm")]
    return (images, labels), problems


_stacked_in_full = partial(_stacked, full=True)


class _Views:
    """Files by epoch and place: with a seed, as training sees them in that epoch; without one, as evaluation does."""

    def __init__(self, split: ImageFiles, seed: int | None) -> None:
        self.split, self.seed = split, seed

    def __getitem__(self, name: tuple[int, int]) -> View:
        epoch, place = name
        generator = None
        if self.seed is not None:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, epoch, place))
        try:
            return self.split.image(place, generator), int(self.split.labels[place])
        except (CorruptImage, OSError) as error:
            return error  # as a value: raised in a worker, it would come back wrapped in tracebacks


def own_part(split: Split) -> Split:
    """This process's part of a split that all processes go through together."""
    return split if world_size() == 1 else split.take(torch.arange(len(split))[share(len(split))])


def on_device(split: Split, device: torch.device) -> Split:
    """Images in memory, moved to the device; files as they are."""
    return Images(split.images.to(device), split.labels.to(device)) if isinstance(split, Images) else split
