"""What all trials of a search share: the recipe, the data, one way to train a network, and the rows that it notes."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim import Optimizer

from metaaugment.files.atomic import append_line
from metaaugment.files.sealed import MALFORMED, Damaged
from metaaugment.guard.faults import first_line
from metaaugment.lab.data import DataSet
from metaaugment.lab.data.batches import Reader
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.experiment import Experiment, assemble
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training.folder import TRIALS
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.json_file import fits, is_number, row_of
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.machine import choose_device
from metaaugment.lab.training.trainer import Phase, Trainer, Watcher
from metaaugment.learner import Learner

# Makes the learner of a trial, and the optimizer of what it learns besides the network.
MakeLearner = Callable[[Experiment], tuple[Learner, Optimizer | None]]
WAY_OUT = "restore an intact copy of it, or begin another search with --out"


@dataclass(frozen=True)
class Laboratory:
    """Where trials run. `recipe` is that of a trial, with the `epochs`, `per_class` and `seed` of the search."""

    recipe: Recipe
    place: Place
    data: DataSet
    folder: Path
    console: Console
    interruption: Interruption = field(default_factory=Interruption)

    @property
    def device(self) -> torch.device:
        return torch.device(choose_device(self.place.device))

    def experiment(self, data: DataSet | None = None, **changes: Any) -> Experiment:
        """A new network on these data (by default the search's own), with some fields of the recipe changed."""
        return assemble(replace(self.recipe, **changes), data or self.data, self.device, Console(quiet=True))

    def trainer(self, experiment: Experiment, folder: Path, learner: MakeLearner | None = None) -> Trainer:
        """The trainer of a trial, resumed from the folder's checkpoint if there is one.

        `learner` makes the trial's learner in place of the recipe's method.
        """
        phases = experiment.phases()
        if learner is not None:
            phases = [Phase(experiment.recipe.epochs, lambda before: learner(experiment))]
        folder.mkdir(parents=True, exist_ok=True)
        reader = Reader(self.place.readers, self.place.corrupt == "skip")
        trainer = run.trainer(experiment, self.place, folder, reader, (), phases)
        trainer.resume()
        return trainer

    def trials(self) -> list[Row]:
        """The trials finished so far; lines left half written by a killed process, or without a cost, are skipped."""
        file = self.folder / TRIALS
        with understood(file):
            lines = file.read_text().splitlines() if file.exists() else ()
        rows = (row_of(line) or {} for line in lines)
        return [row for row in rows if is_number(seconds := row.get("seconds")) and seconds >= 0]

    def note(self, row: Row) -> None:
        """Record a finished trial: `objective`, `seconds` and anything else. Several processes may do so at once."""
        append_line(self.folder / TRIALS, json.dumps(row))

    def stop_if_asked(self) -> None:
        """Raise `Interrupted` after a signal; called between trials, where the search can be resumed."""
        if self.interruption.signum is not None:
            raise Interrupted(self.interruption.signum)

    def say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True)


def another_tenth(before: int, done: int, total: int) -> bool:
    """Whether the work has passed another tenth of the total, which is worth a line of output."""
    return 10 * done // total > 10 * before // total


class Tenths(Watcher):
    """Says how far a training is after each tenth of its epochs: `news` of "epoch N of M" and the epoch's row."""

    def __init__(self, lab: Laboratory, news: Callable[[str, Row], str]) -> None:
        self.lab, self.news = lab, news

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        if another_tenth(trainer.epoch - 1, trainer.epoch, trainer.epochs):
            self.lab.say(self.news(f"epoch {trainer.epoch} of {trainer.epochs}", row))


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Around the reading of a file: whatever is wrong with its content is reported in one sentence."""
    try:
        yield
    except Damaged as error:
        raise Damaged(file, error.reason, WAY_OUT) from None
    except KeyError as error:
        raise Damaged(file, f"cannot be understood: {error} is missing", WAY_OUT) from error
    except MALFORMED as error:
        raise Damaged(file, f"cannot be understood: {first_line(error)}", WAY_OUT) from error


def check_rows(rows: Sequence[Row], form: Mapping[str, Any]) -> None:
    """Refuse rows that lack what those of a search have: the names in `form`, with values of these types."""
    for number, row in enumerate(rows, start=1):
        for name, kind in form.items():
            if name not in row:
                raise ValueError(f"row {number} has no {name!r}, which all rows of this search have")
            if not fits(row[name], kind):
                raise ValueError(f"the {name!r} of row {number} is {row[name]!r}, which is not a valid value")
