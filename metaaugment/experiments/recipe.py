"""A recipe: every number that decides the outcome of a run, as one flat value."""

import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from metaaugment.data import DATASETS
from metaaugment.experiments.flags import flag, one_of, refuse
from metaaugment.experiments.methods import METHODS
from metaaugment.hypergradient import ROUTES
from metaaugment.networks import NETWORKS
from metaaugment.ops import MAX_MAGNITUDE, SPACES
from metaaugment.policy import KINDS, POLICIES, seen_by

MOST_COPIES = 1024  # the paper has 4, and adversarial AutoAugment 8
# Bounds rates, as networks have single precision, which ends at 3e38, and counts, as JSON has integers of any size.
MAX_SETTING = 1e30
# Fields of earlier versions, with the values that had no effect: runs recorded with these can be continued.
RETIRED = {"power": 1.0, "magnitude_bins": 1}
FILES = ("policy", "pretrained")  # fields that name a file
# Fields that have no effect where no policy is learned.
LEARNING = frozenset(
    (
        "policy_network", "sharpness", "extractor", "learn_alpha", "real_alpha", "policy_batch", "policy_optimizer",
        "policy_lr", "policy_schedule", "policy_momentum", "policy_weight_decay", "policy_clip", "alpha", "epsilon",
        "window", "route", "lagged", "every", "random_epochs", "frozen_epochs",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    name: Annotated[str, tyro.conf.Suppress]
    """Name of the run."""
    dataset: str
    """digits, cifar10, cifar100, omniglot, imagenet or folder."""
    network: str
    """Name of the task network."""
    method: str = "metaaugment"
    """Augmentation: baseline, autoaugment, faa, pba, dada, randaugment, trivialaugment, advaa or metaaugment."""
    seed: int = 0
    """Seed of everything random in training."""
    policy: Path | None = None
    """Policy to train under: a file or, for autoaugment, faa, pba and dada, also the name of a published policy."""
    pretrained: Path | None = None
    """Initial weights of the task network, a safetensors file."""

    # The task network
    epochs: int = 200
    """Passes over the training images."""
    batch: int = 128
    """Images in a mini-batch."""
    lr: float = 0.1
    """Learning rate at the start, or after the warm-up; it falls to 0 along a cosine."""
    warmup_epochs: int = 0
    """Epochs at the start in which the learning rate rises linearly."""
    warmup_lr: float = 0.0
    """Learning rate at the start of the warm-up."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 5e-4
    """Weight decay, on all parameters."""
    clip: float | None = None
    """Clip the gradient to this norm."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes."""
    copies: int = 1
    """Transformations drawn per image of a mini-batch; the paper's MT has 4."""
    local_statistics: bool = False
    """Compute batch statistics on each process's part of a mini-batch instead of the whole."""

    num_ops: int | None = None
    """Functions per image, for the published RandAugment; if not given, the MetaAugment paper's variant is used."""
    magnitude: float | None = None
    """Magnitude of these functions, 0 to 10; needs --num-ops."""

    # The policy
    policy_network: str = "policy-network"
    """The policy that weights samples. policy-network is the paper's; feature-policy does not see the transformation.
    clue-policy also sees loss, probability and entropy; label-policy sees the label as well.
    Prefixes: exponential- (the output does not saturate), rejecting- (leaves out samples below the mean),
    regressing-exponential- (learns to predict the alignment)."""
    sharpness: float = 1.0
    """For regressing- policies: how much the log of a weight grows per standard deviation of predicted alignment."""
    extractor: Literal["shared", "own"] = "shared"
    """Where the policy gets its features. shared: the task network; own: a separate one, learned with the policy."""
    learn_alpha: bool = True
    """Learn alpha, the inner step size."""
    real_alpha: bool = False
    """Set alpha to the task network's learning rate at each step instead of learning it."""
    policy_batch: int = 128
    """Validation images per policy update; large batches are processed in chunks of at least 256 images."""
    policy_optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of the policy network and alpha; adam does not use --policy-momentum."""
    policy_lr: float = 1e-3
    """Learning rate of the policy network and alpha."""
    policy_schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of --policy-lr: constant, or a cosine that falls to 0 together with the task network's learning rate."""
    policy_momentum: float = 0.9
    """Momentum of the policy's SGD."""
    policy_weight_decay: float = 5e-4
    """Weight decay on the policy network and alpha."""
    policy_clip: float | None = None
    """Clip the gradient of the policy network and alpha to this norm."""
    alpha: float = 0.1
    """Initial inner step size."""
    transformations: Literal["pairs", "singles"] = "pairs"
    """What is drawn per sample: pairs of functions, as in the paper, or single ones."""
    epsilon: float = 0.1
    """Share of uniform sampling in the distribution over transformations."""
    window: int = 50
    """Epochs of policy outputs that the distribution is estimated from."""
    route: str = "difference"
    """How the alignment is computed: difference, forward or unrolled."""
    lagged: bool = False
    """Update the task network with weights that are one policy step old, which is cheaper."""
    every: int = 1
    """Update the policy on every N-th step."""
    random_epochs: int = 0
    """Epochs at the start with uniform transformations and equal weights."""
    frozen_epochs: int = 0
    """Epochs at the end under the frozen policy."""
    transfer: bool = False
    """The paper trains this row by transfer: --method metaaugment then requires --policy FILE."""

    # The data
    size: int | None = None
    """Side of an image in pixels; by default the data set's own."""
    per_class: int | None = None
    """Train on only this many images per class."""
    split_seed: int = 0
    """Seed of the splits, shared by all methods and seeds."""
    held_back: float = 0.0
    """Share of images to hold back and use in place of the test images, which are then not looked at."""
    held_back_from: Literal["validation", "training"] = "validation"
    """Which images --held-back takes its share from."""
    flip: bool = False
    """Flip left and right with probability 1/2."""
    crop: int = 0
    """Pixels of padding for a random crop before the transformation."""
    baseline_crop: int = 0
    """Pixels of padding for the random crop of --method baseline."""
    cutout: int = 0
    """Side in pixels of the square that Cutout fills after the transformation; not used by --method baseline."""
    space: str = "metaaugment"
    """Space that defines what a magnitude means; `metaaugment ops --space NAME` prints one."""

    @property
    def learns(self) -> bool:
        """Whether a policy is learned, rather than given or not used."""
        return self.method == "metaaugment" and self.policy is None

    @property
    def joint_epochs(self) -> int:
        """Epochs in which a policy is learned, between the random and the frozen ones."""
        return self.epochs - self.random_epochs - self.frozen_epochs

    def idle(self) -> dict[str, str]:
        """Fields that have no effect in this recipe, each with the reason."""
        method, why = METHODS[self.method], {}
        if not self.learns:
            learned = self.method == "metaaugment"
            reason = "--policy names a learned policy" if learned else f"--method {self.method} learns no policy"
            why |= dict.fromkeys(LEARNING, reason)
        else:
            if self.policy_optimizer == "adam":
                why["policy_momentum"] = "--policy-optimizer is adam"
            if not self.policy_network.startswith("regressing-"):
                why["sharpness"] = f"--policy-network {self.policy_network} does not predict the alignment"
            if self.epsilon == 1:
                why["window"] = "--epsilon is 1"
            if self.real_alpha:
                why |= dict.fromkeys(("alpha", "learn_alpha"), "--real-alpha sets alpha to the learning rate")
        if not self.warmup_epochs:
            why["warmup_lr"] = "--warmup-epochs is 0"
        if self.copies == 1 and method.copies > 1:
            why["copies"] = f"--method {self.method} uses {method.copies} copies unless --copies is above 1"
        if self.method == "baseline":
            why |= dict.fromkeys(("space", "crop", "cutout"), "--method baseline uses only --flip and --baseline-crop")
        else:
            why["baseline_crop"] = "only --method baseline uses it"
        if method.space or method.found:
            why["space"] = f"--method {self.method} has a space of its own"
        elif self.policy is not None:
            why |= dict.fromkeys(("space", "transformations"), "--policy has its own")
        return why

    def check(self) -> None:
        """Refuse values that no run can have, naming the flag."""
        for name, allowed in (
            ("dataset", DATASETS), ("network", NETWORKS), ("method", METHODS), ("route", ROUTES), ("space", SPACES),
            ("policy_network", POLICIES),
            *((field.name, get_args(field.type)) for field in fields(self) if get_origin(field.type) is Literal),
        ):  # fmt: skip
            one_of(getattr(self, name), allowed, flag(name))
        self._refuse("split_seed", 0 <= self.split_seed < 2**32, f"0 to {2**32 - 1}")
        for name in ("epochs", "batch", "copies", "policy_batch", "window", "every"):
            good = 1 <= getattr(self, name) < MAX_SETTING
            self._refuse(name, good, f"a whole number of at least 1, and below {MAX_SETTING:g}")
        self._refuse("copies", self.copies <= MOST_COPIES, f"at most {MOST_COPIES:,}")
        for name in ("warmup_epochs", "random_epochs", "frozen_epochs", "seed"):
            self._refuse(name, 0 <= getattr(self, name) < MAX_SETTING, f"0 or more, and below {MAX_SETTING:g}")
        for name in ("crop", "baseline_crop", "cutout"):
            self._refuse(name, 0 <= getattr(self, name) < 2**16, "0 or more, and less than 65,536")
        for name in ("lr", "warmup_lr", "weight_decay", "policy_lr", "policy_weight_decay", "alpha"):
            good = 0 <= getattr(self, name) < MAX_SETTING
            self._refuse(name, good, f"a number of 0 or more, and below {MAX_SETTING:g}")
        for name in ("momentum", "policy_momentum", "label_smoothing"):
            self._refuse(name, 0 <= getattr(self, name) < 1, "0 or more, and less than 1")
        for name in ("clip", "policy_clip", "size", "per_class"):
            good = getattr(self, name) is None or 0 < getattr(self, name) < MAX_SETTING
            self._refuse(name, good, f"above 0, and below {MAX_SETTING:g}")
        self._refuse("sharpness", 0 < self.sharpness <= 5, "above 0, and at most 5")
        _, _, kind = POLICIES[self.policy_network]
        self._refuse("extractor", self.extractor == "shared" or not seen_by(KINDS[kind]),
                     f"shared, because {self.policy_network} uses the task network's own outputs")  # fmt: skip
        self._refuse("transformations", self.transformations == "pairs" or self.method == "metaaugment",
                     f"pairs for --method {self.method}, which draws its own")  # fmt: skip
        self._refuse("held_back", 0 <= self.held_back < 1, "a share of 0 or more, and less than 1")
        if self.held_back_from == "training" and not self.held_back:
            raise ValueError(
                "--held-back-from is training, but --held-back is 0; give a share, such as --held-back 0.2"
            )
        self._refuse("epsilon", 0 <= self.epsilon <= 1, "a share in [0, 1]")
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"--nesterov needs --momentum above 0, but it is {self.momentum:g}; change one of the two")
        self._refuse("warmup_epochs", self.warmup_epochs < self.epochs, f"less than --epochs, {self.epochs}")
        if self.policy is not None and self.method != "metaaugment" and not METHODS[self.method].found:
            raise ValueError(
                f"--policy is {self.policy}, which --method {self.method} does not use; leave out one of the two"
            )
        self._check_randaugment()
        if self.learns:
            both = f"{self.random_epochs} + {self.frozen_epochs}"
            self._refuse("epochs", self.joint_epochs > 0, f"larger than --random-epochs plus --frozen-epochs ({both})")
            if self.transfer:
                raise ValueError(
                    f"{self.name} is trained under a policy that was learned before; name its file with --policy FILE, "
                    "or choose another --method"
                )

    def _check_randaugment(self) -> None:
        if self.num_ops is None and self.magnitude is None:
            return
        for name in ("num_ops", "magnitude"):
            used = self.method == "randaugment" or getattr(self, name) is None
            self._refuse(name, used, f"left out for --method {self.method}; only randaugment uses it")
        for name, other in (("num_ops", "magnitude"), ("magnitude", "num_ops")):
            if getattr(self, other) is None:
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)}, but {flag(other)} is missing; give both, or neither"
                )
        self._refuse("num_ops", 1 <= (self.num_ops or 0) <= 16, "1 to 16")
        self._refuse(
            "magnitude", 0 <= (self.magnitude or 0) <= MAX_MAGNITUDE, "0 to 10; divide by 3 if yours is out of 30"
        )

    def _refuse(self, name: str, good: bool, allowed: str) -> None:
        refuse(name, getattr(self, name), good, allowed)

    def anchored(self) -> "Recipe":
        """The recipe with absolute paths, so that what is begun with it can be continued from any folder."""
        named = {name: file for name in FILES if (file := getattr(self, name)) and file.is_file()}
        return replace(self, **{name: Path(os.path.abspath(file)) for name, file in named.items()})

    def to_json(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Recipe":
        if not isinstance(values, Mapping):
            raise ValueError(f"the recipe is a {type(values).__name__}, not an object of fields and values")
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in values.items() if key not in RETIRED or value != RETIRED[key]}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"unknown recipe field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]:
            raise ValueError(f"the recipe field {missing[0]!r} is missing")
        check_kinds("recipe", cls, values)
        paths = {key: Path(values[key]) for key in FILES if values.get(key) is not None}
        # JSON may have an integer where the field is a float, and torch takes only integers of 64 bits.
        real = [field.name for field in fields(cls) if field.type in (float, float | None)]
        floats = {name: float(values[name]) for name in real if isinstance(values.get(name), int)}
        return cls(**{**values, **paths, **floats})


def check_kinds(what: str, cls: type, values: Mapping[str, Any]) -> None:
    """Refuse JSON values that the fields of a dataclass cannot have."""
    for field in fields(cls):
        if field.name in values and not fits(values[field.name], field.type):
            raise ValueError(f"the {what} field {field.name!r} is {values[field.name]!r}, which is not a valid value")


def fits(value: object, kind: Any) -> bool:
    """Whether a JSON value can be a field of this type."""
    if get_origin(kind) is Annotated:
        return fits(value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_args(kind):
        return any(fits(value, one) for one in get_args(kind))
    if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        return False  # JSON has such numbers, but they do not fit into a float
    json = {Path: str, float: (int, float)}.get(kind, kind)
    return isinstance(value, json) and (kind is bool or not isinstance(value, bool))
