"""How far a run is: a bar on a terminal, plain lines elsewhere, and TensorBoard where it is wanted."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, track

from metaaugment.lab.training.log import Row
from metaaugment.lab.training.trainer import Trainer, Watcher
from metaaugment.lab.words import duration

REFRESH = 1.0  # seconds between looks at the running loss, each of which waits for the device
NEWS = 30.0  # seconds between progress lines of a loop that has no epochs


class Bar(Watcher):
    """One bar for the whole run, with running loss, last validation accuracy, images per second and the time left."""

    def __init__(self, console: Console) -> None:
        description, news = TextColumn("{task.description}"), TextColumn("{task.fields[news]}")
        self.progress = Progress(description, BarColumn(), news, TimeRemainingColumn(), console=console)
        self.accuracy = ""

    def began(self, trainer: Trainer) -> None:
        steps = trainer.epochs * trainer.train.steps
        done = trainer.epoch * trainer.train.steps + trainer.step
        self.task: TaskID = self.progress.add_task(self._epoch(trainer), total=steps, completed=done, news="")
        self.looked = (time.monotonic(), done)
        self.progress.start()

    def stepped(self, trainer: Trainer) -> None:
        then, before = self.looked
        now, done = time.monotonic(), trainer.epoch * trainer.train.steps + trainer.step
        if now - then >= REFRESH:
            speed = (done - before) * trainer.train.batch * trainer.learner.copies / (now - then)
            loss = float(trainer.sums[0]) / trainer.step
            news = f"loss {loss:.3f}{self.accuracy}  {speed:,.0f} images/s"
            self.progress.update(self.task, completed=done, description=self._epoch(trainer), news=news)
            self.looked = (now, done)

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        self.accuracy = f"  validation {row['val_accuracy']:.2%}"
        self.progress.update(self.task, completed=trainer.epoch * trainer.train.steps)

    def ended(self, trainer: Trainer) -> None:
        self.progress.stop()

    def _epoch(self, trainer: Trainer) -> str:
        return f"epoch {min(trainer.epoch + 1, trainer.epochs)}/{trainer.epochs}"


class Lines(Watcher):
    """One line per epoch."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def began(self, trainer: Trainer) -> None:
        self.started, self.first = time.monotonic(), trainer.epoch

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        each = (time.monotonic() - self.started) / (trainer.epoch - self.first)
        loss = "not finite" if row["train_loss"] is None else f"{row['train_loss']:.4f}"
        self.console.print(
            f"epoch {row['epoch']}/{trainer.epochs}  loss {loss}  validation {row['val_accuracy']:.2%}  "
            f"{row['images_per_second']:,.0f} images/s  {duration(each * (trainer.epochs - trainer.epoch))} left",
        )


class TensorBoard(Watcher):
    """Every number of the log, by epoch."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the package tensorboard; install it with: pip install tensorboard"
            ) from None
        self.folder, self.make = str(folder), SummaryWriter

    def began(self, trainer: Trainer) -> None:
        self.writer = self.make(self.folder)

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        for name, value in row.items():
            if name != "epoch" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()

    def ended(self, trainer: Trainer) -> None:
        self.writer.close()


def counted(console: Console) -> Callable[[Iterable[int], str], Iterable[int]]:
    """A wrapper that shows what a loop does and how far it is: a bar on a terminal, elsewhere a line now and then."""

    def steps(loop: Iterable[int], what: str) -> Iterable[int]:
        if console.is_terminal:
            return track(loop, what, console=console, transient=True)
        return _told(list(loop), what, console)

    return steps


def _told(loop: Sequence[int], what: str, console: Console) -> Iterator[int]:
    began = told = time.monotonic()
    for done, step in enumerate(loop):
        now = time.monotonic()
        if now - told >= NEWS:
            told, left = now, (now - began) / done * (len(loop) - done)
            console.print(f"{what}: {done} of {len(loop)}, {duration(left)} left")
        yield step
