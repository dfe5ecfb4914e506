"""DADA's search (Li et al., ECCV 2020): one training run that learns a relaxed policy along with the network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.optim import Adam, Optimizer

from metaaugment.lab.baselines.found import FoundPolicy, SubPolicies
from metaaugment.lab.data import DATASETS
from metaaugment.lab.experiments.experiment import Experiment, clipped
from metaaugment.lab.experiments.flags import refuse
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.relaxed import FUNCTIONS, RelaxedLearner, RelaxedPolicy
from metaaugment.lab.search.trials import Laboratory, Tenths
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.trainer import Trainer, Watcher
from metaaugment.lab.words import number_of

SPACE, MAX_LEVEL = "faa", 1
ROW = {"trial": int, "objective": float | None, "val_accuracy": float, "train_loss": float | None}  # what all rows have
BETAS = 0.5, 0.999  # of Adam, for the policy


@dataclass(frozen=True)
class Settings:
    """Search as DADA does: in a single training run, by the gradient of the validation loss.

    Each epoch counts as a trial: --epochs sets how many there are, and --policy-lr the policy's learning rate.
    """

    temperature: float = 0.5
    """Temperature of the relaxed choices that the control variates see; lower is sharper."""
    sub_policies: int = 25
    """Sub-policies in the final policy: the likeliest of the 105 pairs of functions."""

    def check(self) -> None:
        most = math.comb(len(FUNCTIONS), 2)
        refuse("temperature", self.temperature, 0 < self.temperature < math.inf, "above 0")
        refuse("sub_policies", self.sub_policies, 1 <= self.sub_policies <= most, f"1 to {most}")


def trial(recipe: Recipe) -> Recipe:
    """The recipe of the search: 20 epochs on few images, with Adam at 5e-3 updating the policy on every step.

    On CIFAR it has WRN-40-2 and a learning rate of 0.1, as published; on other data the recipe's own network and rate.
    """
    reduced = DATASETS[recipe.dataset].searched.get("dada")
    recipe = replace(
        recipe, method="dada", epochs=20, warmup_epochs=0, copies=1, clip=5.0, per_class=reduced and reduced.per_class,
        policy_optimizer="adam", policy_lr=5e-3, policy_weight_decay=0.0, policy_clip=None, every=1,
    )  # fmt: skip
    if reduced and reduced.network:
        recipe = replace(recipe, network=reduced.network, batch=128, lr=0.1, weight_decay=2e-4)
    return recipe


def work(rows: Sequence[Row]) -> str:
    """What the rows are, in words: epochs of the one training run."""
    return f"{number_of('epoch', len(rows))} of one training"


def find(lab: Laboratory, settings: Settings) -> FoundPolicy:
    """Train to the end, noting each epoch as a trial; an interrupted training resumes from its checkpoint."""
    if lab.recipe.policy_optimizer != "adam":
        raise ValueError(f"--policy-optimizer is {lab.recipe.policy_optimizer!r}; this search learns by adam only")
    # A captured step makes two passes with the same draws; this search needs a third, for its central difference.
    lab = replace(lab, place=replace(lab.place, capture=False))
    trainer = lab.trainer(lab.experiment(), lab.folder / "training", lambda experiment: relaxed(experiment, settings))
    trainer.watchers = [Notes(lab), Tenths(lab, lambda epoch, row: f"{epoch}: {_news(policy_of(trainer), row)}")]
    lab.stop_if_asked()
    trainer.run()
    source = f"the search of DADA (Li et al., ECCV 2020) by metaaugment, on {lab.data.name}"
    return SubPolicies("dada", source, SPACE, MAX_LEVEL, tuple(policy_of(trainer).likeliest(settings.sub_policies)))


def relaxed(experiment: Experiment, settings: Settings) -> tuple[RelaxedLearner, Optimizer]:
    """The learner of an experiment, with a relaxed policy, and the optimizer of that policy."""
    recipe = experiment.recipe
    policy = RelaxedPolicy(temperature=settings.temperature).to(experiment.device)
    learner = RelaxedLearner(experiment.network, policy, alpha=recipe.lr, **experiment.handling(SPACE))
    optimizer = Adam(learner.policy_parameters(), recipe.policy_lr, BETAS, weight_decay=recipe.policy_weight_decay)
    return learner, clipped(optimizer, recipe.policy_clip)


def policy_of(trainer: Trainer) -> RelaxedPolicy:
    policy = trainer.learner.policy
    assert isinstance(policy, RelaxedPolicy)
    return policy


def _news(policy: RelaxedPolicy, row: Row) -> str:
    share, names = policy.favourite()
    scores = f"validation loss {row['val_loss']:.4f}, accuracy {row['val_accuracy']:.2%}"
    return f"{scores}; most drawn: {' and '.join(names)}, {share:.2%}"


class Notes(Watcher):
    """Notes each epoch once, as a trial of the search."""

    def __init__(self, lab: Laboratory) -> None:
        self.lab = lab

    def began(self, trainer: Trainer) -> None:
        """Note, from the training's own log, epochs that a killed search finished but did not note."""
        for row in trainer.log.rows:
            self._note(row)

    def ended_epoch(self, trainer: Trainer, row: Row) -> None:
        self._note(row)

    def _note(self, row: Row) -> None:
        if row["val_loss"] is None:  # from here on, gradients are skipped and nothing is learned
            raise ValueError(
                f"the network diverged: its validation loss after epoch {row['epoch']} is not finite; "
                "search in another folder with a smaller --lr"
            )
        if any(trial["trial"] == row["epoch"] for trial in self.lab.trials()):
            return
        note = {"trial": row["epoch"], "objective": -row["val_loss"], "seconds": row["seconds"]}
        self.lab.note(note | {"val_accuracy": row["val_accuracy"], "train_loss": row["train_loss"]})
