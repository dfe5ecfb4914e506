"""Where the networks of a population are trained: one trainer, which the trials take turns on."""

import gc
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim import Optimizer

from metaaugment.files.atomic import write_atomically
from metaaugment.files.lock import FileLock
from metaaugment.lab.baselines.found import ScheduleSampler
from metaaugment.lab.experiments.experiment import Experiment
from metaaugment.lab.search.evolution import Functions, Policy
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.seeds import MEMBER, derived_seed
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.trainer import Trainer
from metaaugment.learner import Learner
from metaaugment.policy import UniformPolicy


class Interval(NamedTuple):
    """A piece of work: the epochs that a trial is trained through under a policy."""

    trial: int
    policy: Policy
    epochs: range


class LineageSampler(ScheduleSampler):
    """Augments by one policy, and keeps the policies of all epochs before.

    They are part of its state, and so of the network's checkpoint: every trial that continues from it inherits them.
    """

    def __init__(self, functions: Functions) -> None:
        self.functions, self.policy, self.lineage = functions, functions.start(), []
        super().__init__(functions.schedule([self.policy]), epochs=1)

    def follow(self, policy: Policy) -> None:
        """Augment by another policy, in the memory that a captured step uses."""
        self.policy, self.schedule = policy, self.functions.schedule([policy])
        self.table.copy_(self._table())

    def update(self) -> None:
        super().update()
        self.lineage = [*self.lineage, self.policy]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lineage": self.lineage}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.lineage = state["lineage"]


class Workbench:
    """The one trainer that the trials of a process take turns on, each from the checkpoint in its folder.

    With a trainer for each turn, a network would be built every few epochs and, on a GPU, its step captured again. Each
    trial has its own initial weights, but all share the recipe and the mini-batches, so a checkpoint of one fits all
    others.
    """

    def __init__(self, lab: Laboratory, functions: Functions) -> None:
        self.lab, self.functions = lab, functions
        self._made: tuple[Trainer, LineageSampler] | None = None

    def __call__(self, interval: Interval) -> tuple[float, float]:
        """Train through an interval, or what is left of it; returns validation accuracy and seconds."""
        started, epochs, folder = time.perf_counter(), interval.epochs, folder_of(self.lab, interval.trial)
        # A process that was given up for dead may still be training there.
        with FileLock(self.lab.folder / f"{folder.name}.lock"):
            if epochs.start > 0:
                _check_begun(folder)
            trainer = self._take(folder, interval)
            # Spent on these epochs before an interruption.
            before = sum(row["seconds"] for row in trainer.log.rows[epochs.start :]) + trainer.seconds
            trainer.run()
        return trainer.log.rows[-1]["val_accuracy"], before + time.perf_counter() - started

    def _take(self, folder: Path, interval: Interval) -> Trainer:
        """The trainer, with what a trial's folder has of it, or with a new network."""
        fresh = None if (folder / checkpoint.LAST).exists() else self._begin(folder, interval.trial)
        self._made = self._made or fresh or self._make(folder, interval.trial)
        trainer, sampler = self._made
        trainer.take_up(folder, interval.epochs.stop)
        sampler.follow(interval.policy)
        return trainer

    def _begin(self, folder: Path, trial: int) -> tuple[Trainer, LineageSampler]:
        """Make a trainer, and save its network as the first checkpoint of the trial."""
        trainer, sampler = self._make(folder, trial)
        trainer.save()
        trainer.checkpoints.wait()
        return trainer, sampler

    def _make(self, folder: Path, trial: int) -> tuple[Trainer, LineageSampler]:
        """A trainer with the initial weights of a trial; the recipe of all is the same, so that checkpoints fit."""
        if self.lab.device.type == "cuda":
            gc.collect()  # trainers are reference cycles: the previous one would still hold its memory
        recipe, sampler = self.lab.recipe, LineageSampler(self.functions)
        fresh = self.lab.experiment(seed=derived_seed(recipe.seed, MEMBER, trial))

        def learner(experiment: Experiment) -> tuple[Learner, Optimizer | None]:
            return experiment.learner(sampler, UniformPolicy(), space=self.functions.space), None

        return self.lab.trainer(replace(fresh, recipe=recipe), folder, learner), sampler


def folder_of(lab: Laboratory, trial: int) -> Path:
    return lab.folder / f"trial-{trial:02d}"


def go_on_from(folder: Path, better: Path) -> None:
    """Replace a trial's network, optimizer and lineage by those of the checkpoint in another folder."""
    (folder / checkpoint.BEFORE).unlink(missing_ok=True)
    write_atomically(folder / checkpoint.LAST, lambda part: shutil.copyfile(better / checkpoint.LAST, part))


def epochs_of(folder: Path) -> int:
    """The epochs that a trial's checkpoint has been trained through."""
    return _state(folder)["epoch"]


def lineage(folder: Path) -> list[Policy]:
    """The policy of each epoch that a checkpoint was trained through; refuses that of a network that diverged."""
    state = _state(folder)
    if state["log"][-1]["val_loss"] is None:
        raise ValueError(
            f"the network in {folder} diverged, though it is the best: its validation loss is not finite; search in "
            "another folder with a smaller --lr"
        )
    return state["learner"]["sampler"]["lineage"]


def _state(folder: Path) -> dict[str, Any]:
    _check_begun(folder)
    state = checkpoint.load(folder)
    assert state is not None
    return state


def _check_begun(folder: Path) -> None:
    """Refuse to go on without the checkpoint of a trial, which would begin again under its latest policy."""
    if not (folder / checkpoint.LAST).exists():
        raise ValueError(f"{folder} has no {checkpoint.LAST} any more; begin another search with --out")
