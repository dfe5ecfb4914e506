"""Warnings about a run: one function per criterion, with the reason for its threshold.

The figures behind the reasons are the effective shares of a mini-batch in runs on the digits: 0.84 to 0.98 at the end
under a learned policy, as low as 0.63 on the way under one that learned 17 times as fast, and always 0.98 under one
frozen at its initialization.
"""

import math
from collections.abc import Callable

import numpy as np

from metaaugment.lab.report.runs import Run, is_count
from metaaugment.lab.training.json_file import is_number

LATE = 0.25  # share of the epochs so far that shows the present state, without the noise of single epochs
COLLAPSED = 0.25
UNIFORM = 0.999
SPREAD, EQUAL = 0.9, 0.99
CHANGE = 1.25
ALPHA_LEFT, STAYS, EARLY = 0.05, 0.75, 2 / 3
RISE, LEAST_RISE = 1.25, 0.05
GAP, ERRORS = 0.02, 3


def weights_collapsed(run: Run) -> str | None:
    """Fewer than a quarter of a mini-batch effectively train the network.

    Gradients are then as noisy as those of mini-batches a quarter the size, and three of four images are computed for
    little. Rejecting all samples below the mean, one of the paper's ablations, leaves about half.
    """
    share = _late(run.values("effective_samples")[_learning(run)])
    if not share < COLLAPSED:
        return None
    way = "A lower policy learning rate, or a larger batch," if run.learns else "Its p alone (export --sampler-only)"
    return (
        f"Weights collapsed: {share:.0%} of a mini-batch effectively train the network, the other samples have next to "
        f"no weight. {way} may help."
    )


def policy_idle(run: Run) -> str | None:
    """The policy learns nothing, or nothing that matters.

    At an effective share of 0.999 of a mini-batch, weights deviate from their mean by 3 % (1 / (1 + 0.03²)): training
    cannot tell this from equal weights. Unequal weights alone do not show that a policy learns, because those of a
    newly initialized network differ by more; so there must also have been updates, each of which moves α.
    """
    if run.learns and _never_updated(run):
        zero = run.recipe.get("policy_lr") == 0
        why = "--policy-lr is 0" if zero else "check whether --every is larger than the number of steps"
        return f"Policy idle: it was never updated, so its weights are those it began with; {why}."
    share = _late(run.values("effective_samples")[_learning(run)])
    if not run.learns or not share > UNIFORM or policy_saturated(run):
        return None
    if run.count("batch") == run.count("copies") == 1:
        return "Policy idle: a mini-batch is one sample, whose weight is always 1; choose a larger --batch."
    return (
        f"Policy idle: weights are uniform (the effective share of a mini-batch is {share:.4f}), as if there were no "
        "policy. A higher policy learning rate, or more validation images, may help."
    )


def policy_saturated(run: Run) -> str | None:
    """Weights that had spread are equal now: all outputs of the policy are at one end, where it hardly learns.

    It happened on Omniglot with four copies (docs/decisions.md), and on the digits with a policy that learned 17 times
    as fast as it should: the effective share fell to 0.63 and ended at 0.98.
    """
    learning = _learning(run)
    share, epochs = _smooth(run.values("effective_samples")[learning], run.epochs[learning])
    if not run.learns or not len(share):
        return None
    lowest = int(share.argmin())
    if share[lowest] > SPREAD or share[-1] < EQUAL:
        return None
    return (
        f"Policy saturated: {share[lowest]:.0%} of a mini-batch effectively trained the network around epoch "
        f"{epochs[lowest]}, and all weights are equal now; a policy that gives every sample the same weight hardly "
        "learns any more. A lower policy learning rate, or --policy-schedule cosine, may help."
    )


def _never_updated(run: Run) -> bool:
    """Whether α never moved; where α is not learned, only a policy learning rate of 0 tells."""
    if run.recipe.get("policy_lr") == 0:
        return bool(run.rows)
    alpha, start = run.values("alpha")[_learning(run)], run.recipe.get("alpha")
    alpha = alpha[np.isfinite(alpha)]
    if run.recipe.get("learn_alpha") is False or not len(alpha) or not is_number(start):
        return False
    return bool((np.abs(alpha - start) <= 1e-6 * start).all())


def alpha_at_zero(run: Run) -> str | None:
    """α fell to next to nothing long before the end: the policy learns in proportion to it.

    That is, to a twentieth of where it began, before the last third of the epochs in which the policy learns, and in no
    more than a quarter of the epochs since was it above that. Late in a training it falls by itself, as there is less
    and less to learn: in 9 of 14 runs on CIFAR, after 0.84 of the epochs at the earliest. On the digits it stays
    between half and twice its first value. With ResNet-50 on few traffic signs it was 0 in epochs 3, 5 and 6 of 6, and
    0.004 in epoch 4. An α set to the learning rate falls to 0 on purpose.
    """
    told = _learning(run) & np.isfinite(run.values("alpha"))
    alpha, epochs, start = run.values("alpha")[told], run.epochs[told], run.recipe.get("alpha")
    least = max(ALPHA_LEFT * start, 1e-4) if is_number(start) else 1e-4
    low = alpha <= least
    from_here_on = low[::-1].cumsum()[::-1] / np.arange(len(low), 0, -1)  # the share of epochs with a low α
    stays = epochs[low & (from_here_on >= STAYS)]
    before, last = _learns_between(run)
    if not run.learns or run.recipe.get("real_alpha") is True or not len(stays) or not _late(alpha) <= least:
        return None
    if stays[0] - before > EARLY * (last - before):
        return None
    step = "" if (steps := _steps(run)) is None else f" (step {stays[0] * steps:,})"
    clip = run.recipe.get("policy_clip")
    way = "--policy-clip" if clip is None else "A lower --policy-clip"
    return (
        f"α near zero: since epoch {stays[0]} of {last}{step} it has been below {least:.2g}, and the policy, which "
        "learns in proportion to it, has hardly learned. A few updates with large gradients are enough for that. "
        f"{way}, or a lower --policy-lr, limits them; else look at the learning rate and at the validation images."
    )


def policy_hardly_learned(run: Run) -> str | None:
    """At the end, weights are spread as in the first epoch, and never were otherwise: the policy has hardly learned.

    Weights of an untrained policy differ, too, by what its initialization makes of its inputs: effective shares of 0.96
    to 0.99. So their deviation, √(1 / share - 1), is compared with that in the first epoch in which the policy learns.
    Its running median moves by a quarter in each of 60 runs that learned: it reaches 1.31 times at least on CIFAR, 1.41
    on Omniglot and 1.38 on digits, or falls to 0.56 where the policy learns to predict. It does not in 14 of 15 runs on
    digits, CIFAR and traffic signs in which the policy learned at a tenth of the usual rate or less, or was updated no
    more than 130 times; in the other one it fell to 0.77. A share below 0.9 is no untrained policy's.
    """
    learning = _learning(run)
    shares = run.values("effective_samples")[learning]
    smooth, _ = _smooth(shares, run.epochs[learning])
    if not run.learns or run.result is None or not len(smooth) or not np.isfinite(shares[0]):
        return None
    if min(shares[0], smooth.min()) <= SPREAD or policy_idle(run) or alpha_at_zero(run):
        return None
    first, *later = np.sqrt(1 / np.minimum([shares[0], *smooth], UNIFORM) - 1)
    if max(later) >= CHANGE * first or min(later) <= first / CHANGE:
        return None
    return (
        "Policy hardly learned: its weights are spread as in its first epoch (the effective share of a mini-batch is "
        f"{smooth[-1]:.3f}, and was {shares[0]:.3f}), and never were otherwise. A higher --policy-lr, a lower --every, "
        "or more epochs may help; metaaugment diagnose says whether there is something to learn."
    )


def validation_overfitted(run: Run) -> str | None:
    """The policy fits the validation images, which it learns from, instead of what they stand for.

    Either the test accuracy, if there is one, is below the validation accuracy by 3 standard errors of the two samples,
    which chance exceeds once in 700 runs, and by 2 points, so that it matters. Or the validation loss has risen from
    its lowest point by a quarter, and by 0.05 because losses near 0 double by chance, both as medians of 5 epochs.
    """
    if not run.learns:
        return None
    if (gap := _gap(run)) is not None:
        return (
            f"Validation overfitted: the test accuracy is {gap:.1%} below that on the validation images, which the "
            "policy learns from. More validation images, or a lower policy learning rate, may help."
        )
    loss, epochs = _smooth(run.values("val_loss"), run.epochs)
    if not len(loss):
        return None
    lowest = int(loss.argmin())
    if loss[-1] < RISE * loss[lowest] or loss[-1] < loss[lowest] + LEAST_RISE:
        return None
    return (
        f"Validation overfitted: the validation loss was {loss[lowest]:.3g} around epoch {epochs[lowest]}, and is "
        f"{loss[-1]:.3g} now. Fewer epochs, or more validation images, may help."
    )


def steps_skipped(run: Run) -> str | None:
    """Any at all: a gradient that is not finite has a cause that is worth finding, and its step had no effect."""
    skipped = run.values("skipped")
    skipped = skipped[np.isfinite(skipped)]
    if not len(skipped) or skipped.max() == 0:
        return None
    first = run.epochs[np.isfinite(run.values("skipped"))][int((skipped > 0).argmax())]
    return (
        f"Non-finite steps skipped: {skipped.max():.0f} so far, the first in epoch {first}. A gradient that is not "
        "finite has no effect. A lower learning rate may help, or --precision float32 where it was bf16."
    )


CONCERNS: tuple[Callable[[Run], str | None], ...] = (
    weights_collapsed, policy_idle, policy_saturated, alpha_at_zero, policy_hardly_learned, validation_overfitted,
    steps_skipped,
)  # fmt: skip


def concerns(run: Run) -> list[str]:
    """All warnings about a run; of a run without a policy, those that do not need one."""
    wanted = CONCERNS if run.has_policy else (steps_skipped,)
    return [sentence for concern in wanted if (sentence := concern(run)) is not None]


def _learning(run: Run) -> np.ndarray:
    """The epochs in which the policy learns: before them weights are equal on purpose, after them it is frozen.

    Under a policy file there are no such phases, and all epochs count.
    """
    if not run.learns:
        return np.ones(len(run.epochs), dtype=bool)
    before, last = _learns_between(run)
    return (run.epochs > before) & (run.epochs <= last)


def _learns_between(run: Run) -> tuple[int, int]:
    """The epochs after which the policy begins to learn, and after which it is frozen."""
    before, behind = (run.count(key) or 0 for key in ("random_epochs", "frozen_epochs"))
    return before, (run.planned or run.done) - behind


def _steps(run: Run) -> int | None:
    """Steps per epoch; only a finished run says how many images it trained on."""
    images, batch = run.told("data").get("train"), run.count("batch")
    return images // batch if is_count(images) and batch else None


def _late(values: np.ndarray) -> float:
    """The median of the finite values in the last quarter; NaN if there are none."""
    values = values[-max(1, round(LATE * len(values))) :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def _smooth(values: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Running medians of 5 epochs, and the middle epoch of each; empty if there are fewer than 10 values."""
    values, epochs = values[np.isfinite(values)], epochs[np.isfinite(values)]
    if len(values) < 10:
        return values[:0], epochs[:0]
    return np.median(np.lib.stride_tricks.sliding_window_view(values, 5), axis=1), epochs[2:-2]


def _gap(run: Run) -> float | None:
    """How far the test accuracy is below the validation accuracy; None if it may be by chance."""
    sizes, val, test = run.told("data"), (run.result or {}).get("val_accuracy"), run.accuracy("test")
    n_val, n_test = sizes.get("val"), sizes.get("test")
    if not (is_number(val) and test is not None and is_number(n_val) and is_number(n_test) and min(n_val, n_test) > 0):
        return None
    error = math.sqrt(max(test * (1 - test), 1e-4) * (1 / n_val + 1 / n_test))
    return val - test if val - test > max(GAP, ERRORS * error) else None
