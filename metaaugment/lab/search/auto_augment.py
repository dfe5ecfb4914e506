"""AutoAugment's search: a controller proposes policies, rewarded by the accuracy of networks trained under them."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from metaaugment.lab.baselines.controller import (
    FUNCTIONS,
    LEVELS,
    MAX_LEVEL,
    PROBABILITIES,
    SUB_POLICIES,
    Controller,
    Reinforce,
)
from metaaugment.lab.baselines.found import Function, SubPolicies, SubPolicySampler
from metaaugment.lab.data import DATASETS
from metaaugment.lab.experiments.experiment import Experiment
from metaaugment.lab.experiments.flags import refuse
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.trials import Laboratory, understood
from metaaugment.lab.seeds import CHILD, CONTROLLER, DECISIONS, derived_seed
from metaaugment.lab.training.folder import TRIALS
from metaaugment.lab.training.log import Row
from metaaugment.learner import Learner
from metaaugment.policy import UniformPolicy

BEST = 5  # children whose sub-policies make up the final policy
DECAY = 0.95  # of the moving average of rewards that serves as the baseline

EPOCHS = 30
ROW = {"trial": int, "objective": float, "decisions": list}  # what all rows have


@dataclass(frozen=True)
class Settings:
    """AutoAugment's search, small enough for one GPU: the original trained 15,000 children for 120 epochs each.

    Each child is a network trained from scratch under a policy that a controller proposes; its validation accuracy is
    the controller's reward. The final policy joins the sub-policies of the best five children.
    """

    children: int = 200
    """Networks to train, one after the other."""
    controller_lr: float = 3.5e-3
    """Learning rate of the controller. The original 0.00035 is for thousands of children."""

    def check(self) -> None:
        refuse("children", self.children, self.children >= 1, "a whole number of at least 1")
        good = 0 <= self.controller_lr < float("inf")
        refuse("controller_lr", self.controller_lr, good, "a number of 0 or more")


def trial(recipe: Recipe) -> Recipe:
    """The recipe of a child: at most 30 epochs, on as much of the data as AutoAugment searched on, or all of it."""
    epochs, reduced = min(recipe.epochs, EPOCHS), DATASETS[recipe.dataset].searched.get("autoaugment")
    return replace(
        recipe,
        epochs=epochs,
        warmup_epochs=recipe.warmup_epochs * epochs // recipe.epochs,
        per_class=recipe.per_class or (reduced and reduced.per_class),
        copies=1,
    )


def find(lab: Laboratory, settings: Settings) -> SubPolicies:
    """Train the children that are still missing, and join the sub-policies of the best ones.

    The controller's state is a function of the finished trials alone: a resumed search replays its steps.
    """
    search = _Search(lab.recipe.seed, settings.controller_lr)
    children = lab.folder / "children"
    finished = lab.trials()
    with understood(lab.folder / TRIALS):
        for number, row in enumerate(finished):
            if row["trial"] != number:
                raise ValueError(f"trial {row['trial']} is where trial {number} must be")
            search.learn(row["decisions"], row["objective"])
    for number in range(len(finished), settings.children):
        _remove_all_but(children, str(number))
        lab.stop_if_asked()
        decisions = search.propose(number)
        last, seconds = _train(lab, number, policy([decisions]), children / str(number))
        objective, loss = last["val_accuracy"], last["val_loss"]
        row = {"trial": number, "objective": objective, "val_loss": loss, "seconds": seconds, "decisions": decisions}
        lab.note(row)
        search.learn(decisions, objective)
        if (number + 1) % max(1, settings.children // 20) == 0:
            lab.say(f"child {number + 1} of {settings.children}: {objective:.2%}; recent mean {search.expected:.2%}")
    shutil.rmtree(children, ignore_errors=True)
    best = sorted(_sound(lab.trials()), key=lambda row: -row["objective"])[:BEST]
    return policy([row["decisions"] for row in best])


def _sound(trials: Sequence[Row]) -> list[Row]:
    """Those whose network did not diverge: the accuracy of one that did is chance. Older rows do not say."""
    sound = [row for row in trials if row.get("val_loss", 0) is not None]
    if not sound:
        raise ValueError(
            f"no trial gave a finite result: the networks of all {len(trials)} diverged; search in another folder with "
            "a smaller --lr"
        )
    return sound


class _Search:
    """The controller, and what it has learned from the rewards of its proposals."""

    def __init__(self, seed: int, rate: float) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(derived_seed(seed, CONTROLLER))
        kinds = len(FUNCTIONS), PROBABILITIES, LEVELS
        self.controller = Controller(kinds, 2 * SUB_POLICIES, generator)
        self.reinforce = Reinforce(self.controller, rate)
        self.expected: float | None = None  # exponential moving mean of the rewards

    def propose(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, DECISIONS, number))
        return self.controller.sample(1, generator)[0].tolist()

    def learn(self, decisions: Sequence[int], reward: float) -> None:
        self.expected = reward if self.expected is None else self.expected
        self.reinforce.step(torch.tensor([decisions]), torch.tensor([reward - self.expected]))
        self.expected = DECAY * self.expected + (1 - DECAY) * reward


def policy(decisions: Sequence[Sequence[int]]) -> SubPolicies:
    """The policy that joins the sub-policies of all sequences of decisions, in order."""
    functions = [_function(*one[place : place + 3]) for one in decisions for place in range(0, len(one), 3)]
    pairs = tuple(zip(functions[::2], functions[1::2], strict=True))
    return SubPolicies("autoaugment", "metaaugment search autoaugment", "autoaugment", MAX_LEVEL, pairs)


def _function(function: int, probability: int, level: int) -> Function:
    return Function(FUNCTIONS[function], probability / (PROBABILITIES - 1), level)


def _train(lab: Laboratory, number: int, found: SubPolicies, folder: Path) -> tuple[Row, float]:
    """Train a child; returns the last row of its log, and its cost in seconds."""

    def learner(experiment: Experiment) -> tuple[Learner, None]:
        return experiment.learner(SubPolicySampler(found), UniformPolicy(), space=found.space), None

    started = time.perf_counter()
    experiment = lab.experiment(seed=derived_seed(lab.recipe.seed, CHILD, number))
    trainer = lab.trainer(experiment, folder, learner)
    before = trainer.seconds + sum(row["seconds"] for row in trainer.log.rows)  # spent before an interruption
    trainer.run()
    return trainer.log.rows[-1], before + time.perf_counter() - started


def _remove_all_but(folder: Path, name: str) -> None:
    """Remove what a killed search left behind; the child under way is kept, finished ones are not needed."""
    for child in folder.iterdir() if folder.exists() else ():
        if child.name != name:
            shutil.rmtree(child)
