"""Which values a recipe may have, and which of its fields have an effect."""

from dataclasses import fields
from typing import Literal, get_args, get_origin

from metaaugment.alignment import ROUTES
from metaaugment.lab.data import DATASETS
from metaaugment.lab.experiments.flags import flag, one_of, refuse
from metaaugment.lab.experiments.methods import LEARNING, METHODS
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.words import series
from metaaugment.networks import NETWORKS
from metaaugment.ops import MAX_MAGNITUDE, SPACES
from metaaugment.policy import KINDS, POLICIES

MOST_COPIES = 1024  # the paper has 4, and adversarial AutoAugment 8
# Bounds rates, as networks have single precision, which ends at 3e38, and counts, as JSON has integers of any size.
MAX_SETTING = 1e30


def check(recipe: Recipe) -> None:
    """Refuse values that no run can have, naming the flag."""
    for name, allowed in (
        ("dataset", DATASETS), ("network", NETWORKS), ("method", METHODS), ("route", ROUTES), ("space", SPACES),
        ("policy_network", POLICIES),
        *((field.name, get_args(field.type)) for field in fields(recipe) if get_origin(field.type) is Literal),
    ):  # fmt: skip
        one_of(getattr(recipe, name), allowed, flag(name))
    method = METHODS[recipe.method]
    _refuse(recipe, "split_seed", 0 <= recipe.split_seed < 2**32, f"0 to {2**32 - 1}")
    for name in ("epochs", "batch", "copies", "policy_batch", "window", "every"):
        good = 1 <= getattr(recipe, name) < MAX_SETTING
        _refuse(recipe, name, good, f"a whole number of at least 1, and below {MAX_SETTING:g}")
    _refuse(recipe, "copies", recipe.copies <= MOST_COPIES, f"at most {MOST_COPIES:,}")
    for name in ("warmup_epochs", "random_epochs", "frozen_epochs", "seed"):
        _refuse(recipe, name, 0 <= getattr(recipe, name) < MAX_SETTING, f"0 or more, and below {MAX_SETTING:g}")
    for name in ("crop", "baseline_crop", "cutout"):
        _refuse(recipe, name, 0 <= getattr(recipe, name) < 2**16, "0 or more, and less than 65,536")
    for name in ("lr", "warmup_lr", "weight_decay", "policy_lr", "policy_weight_decay", "alpha"):
        good = 0 <= getattr(recipe, name) < MAX_SETTING
        _refuse(recipe, name, good, f"a number of 0 or more, and below {MAX_SETTING:g}")
    for name in ("momentum", "policy_momentum", "label_smoothing"):
        _refuse(recipe, name, 0 <= getattr(recipe, name) < 1, "0 or more, and less than 1")
    for name in ("clip", "policy_clip", "size", "per_class"):
        good = getattr(recipe, name) is None or 0 < getattr(recipe, name) < MAX_SETTING
        _refuse(recipe, name, good, f"above 0, and below {MAX_SETTING:g}")
    _refuse(recipe, "sharpness", 0 < recipe.sharpness <= 5, "above 0, and at most 5")
    _, _, kind = POLICIES[recipe.policy_network]
    _refuse(recipe, "extractor", recipe.extractor == "shared" or not KINDS[kind].sees,
            f"shared, because {recipe.policy_network} uses the task network's own outputs")  # fmt: skip
    _refuse(recipe, "transformations", recipe.transformations == "pairs" or "transformations" in method.options,
            f"pairs for --method {recipe.method}, which draws its own")  # fmt: skip
    _refuse(recipe, "held_back", 0 <= recipe.held_back < 1, "a share of 0 or more, and less than 1")
    if recipe.held_back_from == "training" and not recipe.held_back:
        raise ValueError("--held-back-from is training, but --held-back is 0; give a share, such as --held-back 0.2")
    _refuse(recipe, "area_min", 0 < recipe.area_min <= 1, "a share above 0, and at most 1")
    _refuse(recipe, "white", 1 <= recipe.white < 2**16, f"1 to {2**16 - 1}")
    _refuse(recipe, "epsilon", 0 <= recipe.epsilon <= 1, "a share in [0, 1]")
    if recipe.nesterov and not recipe.momentum > 0:
        raise ValueError(f"--nesterov needs --momentum above 0, but it is {recipe.momentum:g}; change one of the two")
    _refuse(recipe, "warmup_epochs", recipe.warmup_epochs < recipe.epochs, f"less than --epochs, {recipe.epochs}")
    if recipe.policy is not None and not method.learns and not method.found:
        raise ValueError(
            f"--policy is {recipe.policy}, which --method {recipe.method} does not use; leave out one of the two"
        )
    _check_randaugment(recipe)
    if recipe.learns:
        both = f"{recipe.random_epochs} + {recipe.frozen_epochs}"
        _refuse(recipe, "epochs", recipe.joint_epochs > 0, f"larger than --random-epochs plus --frozen-epochs ({both})")
        if recipe.transfer:
            raise ValueError(
                f"{recipe.name} is trained under a policy that was learned before; name its file with --policy FILE, "
                "or choose another --method"
            )


def _check_randaugment(recipe: Recipe) -> None:
    if recipe.num_ops is None and recipe.magnitude is None:
        return
    for name in ("num_ops", "magnitude"):
        used = name in METHODS[recipe.method].options or getattr(recipe, name) is None
        users = series([other for other, method in METHODS.items() if name in method.options], "and")
        _refuse(recipe, name, used, f"left out for --method {recipe.method}; only {users} uses it")
    for name, other in (("num_ops", "magnitude"), ("magnitude", "num_ops")):
        if getattr(recipe, other) is None:
            raise ValueError(
                f"{flag(name)} is {getattr(recipe, name)}, but {flag(other)} is missing; give both, or neither"
            )
    _refuse(recipe, "num_ops", 1 <= (recipe.num_ops or 0) <= 16, "1 to 16")
    _refuse(
        recipe, "magnitude", 0 <= (recipe.magnitude or 0) <= MAX_MAGNITUDE, "0 to 10; divide by 3 if yours is out of 30"
    )


def _refuse(recipe: Recipe, name: str, good: bool, allowed: str) -> None:
    refuse(name, getattr(recipe, name), good, allowed)


def idle(recipe: Recipe) -> dict[str, str]:
    """Fields that have no effect in this recipe, each with the reason."""
    method, why = METHODS[recipe.method], {}
    if not recipe.learns:
        reason = "--policy names a learned policy" if method.learns else f"--method {recipe.method} learns no policy"
        why |= dict.fromkeys(LEARNING, reason)
    else:
        if recipe.policy_optimizer == "adam":
            why["policy_momentum"] = "--policy-optimizer is adam"
        if not recipe.policy_network.startswith("regressing-"):
            why["sharpness"] = f"--policy-network {recipe.policy_network} does not predict the alignment"
        if recipe.epsilon == 1:
            why["window"] = "--epsilon is 1"
        if recipe.real_alpha:
            why |= dict.fromkeys(("alpha", "learn_alpha"), "--real-alpha sets alpha to the learning rate")
    if not DATASETS[recipe.dataset].in_files:
        names = [name for name, entry in DATASETS.items() if entry.in_files]
        why |= dict.fromkeys(("area_min", "white"), f"only --dataset {' and '.join(names)} are read from image files")
    if not recipe.warmup_epochs:
        why["warmup_lr"] = "--warmup-epochs is 0"
    if recipe.copies == 1 and method.copies > 1:
        why["copies"] = f"--method {recipe.method} uses {method.copies} copies unless --copies is above 1"
    if method.plain:
        reason = f"--method {recipe.method} uses only --flip and {flag(method.crop)}"
        why |= dict.fromkeys(("space", "crop", "cutout"), reason)
    else:
        plain = [other for other, method in METHODS.items() if method.plain]
        why["baseline_crop"] = f"only --method {series(plain, 'and')} uses it"
    if method.space or method.found:
        why["space"] = f"--method {recipe.method} has a space of its own"
    elif recipe.policy is not None:
        why |= dict.fromkeys(("space", "transformations"), "--policy has its own")
    return why
