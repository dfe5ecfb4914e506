"""Does the policy learn anything, and could it learn more? Measured on a network that is held fixed.

A policy can learn what its inputs say about the alignment s_i = ⟨∇L_i(w), ∇L_val(w)⟩. So s is computed for training
samples augmented as in the run, and three things are measured: how much of it is noise from the draw of validation
images, how much can be predicted, and how much of that is already in the policy's outputs. All three are correlations,
repeated over random halves of the validation set: a prediction is fitted to s by one half and judged on other samples
against s by the other half, so that it gains nothing from the noise of a small set. The gradient is taken at w, not at
ŵ, so that it does not depend on the policy.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch

from metaaugment.lab.data.batches import Batches, once
from metaaugment.lab.data.splits import Split
from metaaugment.lab.experiments.alignment import REPEATS, SMALLEST, Samples, Steps, collect, halves
from metaaugment.lab.experiments.prediction import by_image, correlation, predictability
from metaaugment.lab.seeds import JUDGES, derived_seed
from metaaugment.lab.training.evaluation import evaluate
from metaaugment.lab.training.json_file import Within, typed
from metaaugment.lab.training.machine import threads
from metaaugment.lab.words import series
from metaaugment.learner import Learner
from metaaugment.policy import FeaturePolicy, as_policy, innermost

MANY = 20_000  # fewer samples may find less: for WRN-40-2 on CIFAR-100, 8,192 found 0.15 and 38,400 found 0.21

# What s is predicted from. The pair of functions is all that a policy for the whole data set knows.
PAPER, CLUES, LABEL = "feature, embedding", "feature, embedding, clues", "feature, embedding, clues, label"
INPUTS: dict[str, tuple[str, ...]] = {
    "pair": ("pair",),
    **{names: tuple(names.split(", ")) for names in ("embedding", "feature", PAPER, "clues", CLUES, LABEL)},
}
Count = Annotated[int, Within(0, 1e9)]
Amount = Annotated[float, Within(0, 1e9)]


@dataclass(frozen=True)
class Correlation:
    """Mean and standard deviation over the repetitions."""

    mean: Annotated[float, Within(-1.01, 1.01)]
    deviation: Annotated[float, Within(0, 2)]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Correlation":
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.deviation / math.sqrt(REPEATS)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}"


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the verdict."""

    samples: Count
    validation: Count
    update: Count | None  # validation images per policy update of the run
    accuracy: Amount  # on the validation images
    chance: Amount  # the highest accuracy of a network that knows nothing about them
    noise: dict[int, Correlation]  # of s by two disjoint validation draws, keyed by their size
    predicted: dict[str, Correlation]  # of s with a prediction of it, keyed by what that is made from
    captured: Correlation | None  # of the policy's outputs and s
    sees: str = PAPER  # what the policy of the run sees, a key of `predicted`
    learns: bool = True  # whether the run learns that policy
    regresses: bool = False  # whether the policy learns to predict s
    epoch: Count | None = None  # epochs that the run had finished when diagnosed; older diagnoses do not say
    step: Count | None = None  # steps that it had finished in the epoch after these
    seed: int | None = None  # from which samples and halves were drawn

    @property
    def half(self) -> Correlation:
        return self.noise[max(self.noise)]

    @property
    def best(self) -> Correlation:
        return max(self.predicted.values(), key=lambda found: found.mean)

    @property
    def own(self) -> Correlation:
        """The best prediction from the policy's inputs, or from a part of them."""
        seen = set(INPUTS[self.sees])
        among = [found for name, found in self.predicted.items() if set(INPUTS[name]) <= seen]
        return max(among, key=lambda found: found.mean)

    def worth_learning(self, found: Correlation) -> bool:
        """Whether a prediction is no accident, and explains at least a twenty-fifth of what is not noise.

        What is not noise is the variance of s that two halves of the validation images have in common."""
        return found.mean > 2 * found.error and found.mean**2 >= 0.04 * max(self.half.mean, 0.0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Diagnosis":
        """What `to_json` gave; ValueError for anything else."""
        try:
            found = typed(cls, values, always=("sees", "learns"))
        except ValueError as error:
            raise ValueError(f"the diagnosis is damaged: its {error}") from None
        if not found.noise or not {found.sees, *INPUTS} <= found.predicted.keys():
            raise ValueError("the diagnosis is damaged: numbers are missing")
        return replace(found, predicted={name: found.predicted[name] for name in INPUTS})

    def verdict(self) -> str:
        """The first of these judgements that applies: what was found, and what to do about it."""
        own = self.own
        if self.accuracy <= self.chance:
            return (
                f"Nothing can be learned: the network is right on {self.accuracy:.1%} of the validation images, no "
                f"more than by chance (up to {self.chance:.1%}). It has hardly begun to train, or validation and "
                "training images are labelled differently."
            )
        if self.half.mean <= max(2 * self.half.error, 0.05):
            return (
                f"The validation set is too small to tell: two halves of its {self.validation} images agree on which "
                f"samples help with a correlation of only {self.half}. Hold out more."
            )
        if not self.worth_learning(self.best):
            return (
                "There is nothing to learn at this point: which samples help cannot be predicted from anything that a "
                f"policy may see (at best {self.best}).{self._sharper()}{self._before()}"
            )
        possible = f"A prediction from {_listed(INPUTS[self.sees])} reaches {own}{self._more()}."
        if self.captured is None:
            return f"There is something to learn, but this run has no policy to learn it. {possible}"
        follow = f"its outputs correlate with the alignment at {self.captured.mean:.2f}"
        if self.worth_learning(self.captured) and self.captured.mean >= 0.5 * own.mean:
            return f"It {'learned' if self.learns else 'fits'}: {follow}. {possible}{self._sharper()}"
        if not self.learns:
            return (
                f"The policy was not learned in this run, and fits it badly: {follow}. {possible} "
                "One that is learned in this run could do better."
            )
        if not self.worth_learning(own):
            way = "" if (more := self._further()) is None else f" {_let_it_see(more)}"
            return (
                f"There is nothing to learn at this point from what the policy sees. {possible}{self._sharper()}"
                f"{self._before()}{way}"
            )
        return f"It could learn more: {follow}. {possible} {self._change()}"

    def _sharper(self) -> str:
        if self.samples >= MANY:
            return ""
        return f" This is a lower bound: a diagnosis with more than {self.samples:,} --samples may find more."

    def _before(self) -> str:
        if self.captured is None or not self.learns:
            return ""
        return (
            " Whether it learned before cannot be told from this: training under a policy that works uses up what can "
            "be predicted. What it learned is in its weights, which metaaugment report shows."
        )

    def _further(self) -> str | None:
        """CLUES or LABEL, if it predicts over two errors more than the policy's inputs; LABEL must also beat CLUES."""
        further, best = None, self.own
        for name in (CLUES, LABEL):
            found = self.predicted[name]
            if found.mean - best.mean > 2 * max(found.error, best.error):
                further, best = name, found
        return further

    def _more(self) -> str:
        name = self._further()
        if name is None:
            return ""
        added = [more for more in INPUTS[name] if more not in INPUTS[self.sees]]
        return f"; one that also sees the {_listed(added)} reaches {self.predicted[name].mean:.2f}"

    def _change(self) -> str:
        """The change that is most likely to help."""
        more = self._further()
        if more is not None and self.predicted[more].mean > 1.5 * max(self.own.mean, 0.05):
            return _let_it_see(more)
        sizes = [size for size in self.noise if self.update is not None and size <= self.update]
        if sizes and self.noise[max(sizes)].mean < 0.3 and max(sizes) < max(self.noise):
            return (
                f"An update with {self.update} validation images is mostly noise: train with a larger --policy-batch, "
                f"up to all {self.validation}."
            )
        if self.regresses:
            return "Train with a higher --policy-lr."
        kind = "label" if self.sees == LABEL else "clue"
        return (
            f"Train with a higher --policy-lr, or by regression: --policy-network regressing-exponential-{kind}-policy."
        )


def _listed(inputs: Sequence[str]) -> str:
    """What a policy sees, in words."""
    names = {"embedding": "transformation", "clues": "loss"}
    return series((names.get(name, name) for name in inputs), "and")


def _let_it_see(more: str) -> str:
    name = f"exponential-{'label' if more == LABEL else 'clue'}-policy"
    return f"Train with --policy-network {name}, which sees more, and watch its weights, which may collapse."


def diagnose(
    learner: Learner,
    train: Batches,
    validation: Split,
    samples: int | None = None,
    seed: int = 0,
    update: int | None = None,
    steps: Steps = lambda loop, what: loop,
    learns: bool | None = None,
) -> Diagnosis:
    """Measure what the policy of a learner could learn, and what it has learned.

    Args:
        learner: the one to diagnose, in its present state; nothing of it is changed.
        train: mini-batches of the training split.
        samples: about how many training samples to look at; by default 2048, or five mini-batches if that is more.
        update: number of validation images per policy update.
        learns: whether the policy was learned in this run; by default, whether this learner learns it.
    """
    batch = train.batch * learner.copies
    epoch, step = divmod(learner.steps, train.steps)
    samples = max(2048, 5 * batch) if samples is None else samples
    check_enough(validation, samples, batch)
    accuracy, chance = beside_chance(learner, train, validation)
    if train.reader.unreadable:
        validation = validation.take(torch.tensor(train.reader.readable(validation, range(len(validation)))))
        check_enough(validation, samples, batch)
    seen = collect(learner, train, validation, samples, seed, steps)
    predicted: dict[str, list[float]] = {name: [] for name in INPUTS}
    # Networks as small as these gain nothing from several, which wait for each other while other processes compute.
    with threads(1):
        for turn in steps(range(REPEATS * len(INPUTS)), "what can be predicted"):
            repeat, name = turn // len(INPUTS), list(INPUTS)[turn % len(INPUTS)]
            drawn = derived_seed(seed, JUDGES, repeat)
            predicted[name].append(predictability(seen, INPUTS[name], *seen.halves[repeat], drawn))
    return Diagnosis(
        samples=len(seen.halves[0][0]),
        validation=len(validation),
        update=update,
        accuracy=accuracy,
        chance=chance,
        noise={size: Correlation.of([correlation(*both) for both in drawn]) for size, drawn in seen.alignment.items()},
        predicted={name: Correlation.of(values) for name, values in predicted.items()},
        captured=captured(seen, seed),
        sees=_seen_by(learner),
        learns=learner.due_at(learner.every) if learns is None else learns,
        regresses=as_policy(learner.policy).has_own("objective"),
        epoch=epoch,
        step=step,
        seed=seed,
    )


def _seen_by(learner: Learner) -> str:
    if isinstance(innermost(learner.policy), FeaturePolicy):
        return "feature"
    return {(): PAPER, ("clues",): CLUES, ("clues", "labels"): LABEL}[as_policy(learner.policy).sees]


def check_enough(validation: Split, samples: int, batch: int) -> None:
    if len(validation) < 2 * SMALLEST:
        raise ValueError(
            f"the validation split has {len(validation)} images, too few to compare two halves of them; hold out at "
            f"least {2 * SMALLEST} (with --dataset folder, put them into its folder val)"
        )
    classes = int(validation.labels.max()) + 1
    if len(validation) < classes:
        raise ValueError(
            f"the validation split has {len(validation)} images for {classes} classes, so that some have none; hold "
            f"out at least {classes}"
        )
    if (half := len(halves(validation.labels.cpu(), 0)[0])) < SMALLEST:
        raise ValueError(
            f"the {len(validation)} validation images give two halves with the same classes of only {half} images "
            f"each, but {SMALLEST} are needed; hold out at least two of each class"
        )
    if samples < 5 * batch:
        raise ValueError(f"--samples is {samples}; for mini-batches of {batch} it must be at least {5 * batch}")


def beside_chance(learner: Learner, train: Batches, validation: Split) -> tuple[float, float]:
    """Accuracy on the validation images, and the highest that it may be by chance.

    The latter is the share of the largest class plus two standard errors."""
    score = evaluate(learner.network, once(validation, train.device, train.reader), learner.prepare)
    n = len(validation)
    share = int(torch.bincount(validation.labels.cpu()).max()) / n
    return score.top1, share + 2 * math.sqrt(share * (1 - share) / n)


def captured(samples: Samples, seed: int) -> Correlation | None:
    """Correlation of the policy's outputs with s by half of the validation images, on the samples that judge."""
    if samples.outputs is None:
        return None
    values = []
    for repeat, (_, other) in enumerate(samples.halves):
        judge = by_image(samples.place, torch.Generator().manual_seed(derived_seed(seed, JUDGES, repeat)))[2]
        values.append(correlation(samples.outputs[judge], other[judge]))
    return Correlation.of(values)
