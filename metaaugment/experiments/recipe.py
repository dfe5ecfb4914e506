"""A recipe: every number that decides the outcome of a run, as one flat value."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from metaaugment.data import DATASETS
from metaaugment.experiments.flags import flag, one_of, refuse
from metaaugment.experiments.methods import METHODS, SAMPLERS
from metaaugment.hypergradient import ROUTES
from metaaugment.networks import NETWORKS
from metaaugment.ops import MAX_MAGNITUDE, SPACES
from metaaugment.policy import POLICIES

MOST_COPIES = 1024  # the paper has 4, and adversarial AutoAugment 8
# Of rates, as networks have single precision, which ends at 3e38; and of counts, as JSON has whole numbers of any size.
LARGEST = 1e30


@dataclass(frozen=True)
class Recipe:
    name: Annotated[str, tyro.conf.Suppress]
    """What the run is called."""
    dataset: str
    """digits, cifar10, cifar100, omniglot, imagenet or folder."""
    network: str
    """Name of the task network."""
    method: str = "metaaugment"
    """Which augmentation: baseline, randaugment, trivialaugment, autoaugment, faa, pba, dada, advaa or metaaugment."""
    seed: int = 0
    """Of everything random in training."""
    policy: Path | None = None
    """What to train under: a learned policy, or for autoaugment, faa, pba and dada one of theirs, a file or a name."""
    pretrained: Path | None = None
    """Weights that the task network starts from, as a safetensors file."""

    # The task network
    epochs: int = 200
    """How often the training images are gone through."""
    batch: int = 128
    """Images in a mini-batch."""
    lr: float = 0.1
    """Learning rate at the start, falling to 0 along a cosine."""
    warmup_epochs: int = 0
    """Epochs in which the learning rate first rises, on a straight line."""
    warmup_lr: float = 0.0
    """Where that line starts."""
    momentum: float = 0.9
    """Of SGD."""
    nesterov: bool = False
    """Whether it is Nesterov's."""
    weight_decay: float = 5e-4
    """Of all parameters."""
    clip: float | None = None
    """Largest norm of the gradient; a longer one is shortened to it."""
    label_smoothing: float = 0.0
    """Share of a label spread over all classes."""
    copies: int = 1
    """Transformations drawn for each image of a mini-batch; the paper's MT has 4."""
    local_statistics: bool = False
    """Whether batch statistics are those of each process's part of a mini-batch, not of the whole."""

    num_ops: int | None = None
    """Functions an image gets, of randaugment as it was published; the paper's own form if not given."""
    magnitude: float | None = None
    """Their common magnitude, 0 to 10."""

    # The policy
    policy_network: str = "policy-network"
    """What weights samples. policy-network is the paper's; feature-policy does not see the transformation; clue-policy
    also sees loss, probability and entropy, label-policy the label as well. In front of these: exponential- does not
    saturate; rejecting- leaves out samples below the mean; regressing-exponential- predicts the alignment."""
    sharpness: float = 1.0
    """By how much the logarithm of a weight grows with each deviation of the alignment that regressing- predicts."""
    extractor: Literal["shared", "own"] = "shared"
    """Through what the policy sees: the task network, or a network of its own, learned with it."""
    learn_alpha: bool = True
    """Whether the inner step size is learned."""
    policy_batch: int = 128
    """Validation images of a policy update; more than 256, or a mini-batch, are gone through in parts."""
    policy_optimizer: Literal["sgd", "adam"] = "sgd"
    """What learns the policy network and alpha; adam does without the momentum."""
    policy_lr: float = 1e-3
    """Learning rate of the policy network and of alpha, fixed."""
    policy_momentum: float = 0.9
    """Of their SGD."""
    policy_weight_decay: float = 5e-4
    """Of both."""
    policy_clip: float | None = None
    """Largest norm of their gradient."""
    alpha: float = 0.1
    """Where the inner step size starts."""
    transformations: Literal["pairs", "singles"] = "pairs"
    """What is drawn for a sample: pairs of functions as in the paper, or single ones."""
    epsilon: float = 0.1
    """Share of uniform sampling in the distribution over transformations."""
    window: int = 50
    """Epochs whose outputs of the policy network make this distribution."""
    route: str = "difference"
    """How the alignment is computed: difference, forward or unrolled."""
    lagged: bool = False
    """Whether the task network is updated one policy step behind, which is cheaper."""
    every: int = 1
    """Steps from one policy update to the next."""
    random_epochs: int = 0
    """Epochs at the start with random transformations and equal weights."""
    frozen_epochs: int = 0
    """Epochs at the end under the policy learned so far, frozen."""
    transfer: bool = False
    """Whether the paper trains this row by transfer, so that metaaugment needs --policy FILE."""

    # The data
    size: int | None = None
    """Side of an image in pixels; the data set's own if not given."""
    per_class: int | None = None
    """Train on this many images of each class only."""
    split_seed: int = 0
    """Of the splits, which all methods and seeds share."""
    held_back: float = 0.0
    """Share of the validation images that stand in for the test images, which are then not looked at."""
    flip: bool = False
    """Whether a fair coin exchanges left and right."""
    crop: int = 0
    """Pixels of padding around a random crop ahead of the transformation."""
    baseline_crop: int = 0
    """The same for the baseline, which has no transformation."""
    cutout: int = 0
    """Side of the square that Cutout fills behind the transformation; the baseline has none."""
    space: str = "metaaugment"
    """What a magnitude means: a name that `metaaugment ops --space` knows."""

    @property
    def learns(self) -> bool:
        """Whether a policy is learned, and not trained under, or done without."""
        return self.method == "metaaugment" and self.policy is None

    def check(self) -> None:
        """Refuse what no run can have, naming the flag."""
        for name, allowed in (
            ("dataset", DATASETS), ("network", NETWORKS), ("method", METHODS), ("route", ROUTES), ("space", SPACES),
            ("policy_optimizer", ("sgd", "adam")), ("policy_network", POLICIES), ("extractor", ("shared", "own")),
            ("transformations", SAMPLERS),
        ):  # fmt: skip
            one_of(getattr(self, name), allowed, flag(name))
        self._refuse("split_seed", 0 <= self.split_seed < 2**32, f"0 to {2**32 - 1}")
        for name in ("epochs", "batch", "copies", "policy_batch", "window", "every"):
            good = 1 <= getattr(self, name) < LARGEST
            self._refuse(name, good, f"a whole number of at least 1, and below {LARGEST:g}")
        self._refuse("copies", self.copies <= MOST_COPIES, f"at most {MOST_COPIES:,}")
        for name in ("warmup_epochs", "random_epochs", "frozen_epochs", "seed"):
            self._refuse(name, 0 <= getattr(self, name) < LARGEST, f"0 or more, and below {LARGEST:g}")
        for name in ("crop", "baseline_crop", "cutout"):
            self._refuse(name, 0 <= getattr(self, name) < 2**16, "0 or more, and less than 65,536")
        for name in ("lr", "warmup_lr", "weight_decay", "policy_lr", "policy_weight_decay", "alpha"):
            self._refuse(name, 0 <= getattr(self, name) < LARGEST, f"a number of 0 or more, and below {LARGEST:g}")
        for name in ("momentum", "policy_momentum", "label_smoothing"):
            self._refuse(name, 0 <= getattr(self, name) < 1, "0 or more, and less than 1")
        for name in ("clip", "policy_clip", "size", "per_class"):
            good = getattr(self, name) is None or 0 < getattr(self, name) < LARGEST
            self._refuse(name, good, f"above 0, and below {LARGEST:g}")
        self._refuse("sharpness", 0 < self.sharpness <= 5, "above 0, and at most 5")
        sees_more = self.policy_network.endswith(("clue-policy", "label-policy"))
        self._refuse("extractor", self.extractor == "shared" or not sees_more,
                     f"shared for {self.policy_network}, which sees how sure the task network is")  # fmt: skip
        self._refuse("transformations", self.transformations == "pairs" or self.method == "metaaugment",
                     f"pairs for --method {self.method}, which draws its own")  # fmt: skip
        self._refuse("held_back", 0 <= self.held_back < 1, "a share of 0 or more, and less than 1")
        self._refuse("epsilon", 0 <= self.epsilon <= 1, "a share in [0, 1]")
        self._refuse("nesterov", not self.nesterov or self.momentum > 0, "with --momentum above 0 only")
        self._refuse("warmup_epochs", self.warmup_epochs < self.epochs, f"less than the {self.epochs} epochs")
        if self.policy is not None and self.method != "metaaugment" and not METHODS[self.method].found:
            raise ValueError(f"--policy is {self.policy}, which --method {self.method} does not use; leave one away")
        self._check_randaugment()
        if self.method == "metaaugment":
            learning = self.epochs - self.random_epochs - self.frozen_epochs
            enough = learning > 0 or not (self.random_epochs or self.frozen_epochs)
            self._refuse("epochs", enough, f"above {self.random_epochs} random and {self.frozen_epochs} frozen ones")
            if self.transfer and self.policy is None:
                raise ValueError(
                    f"{self.name} is trained under a policy that was learned before; name its file with --policy FILE, "
                    "or choose another --method"
                )

    def _check_randaugment(self) -> None:
        if self.num_ops is None and self.magnitude is None:
            return
        for name in ("num_ops", "magnitude"):
            used = self.method == "randaugment" or getattr(self, name) is None
            self._refuse(name, used, f"left away for --method {self.method}; it is randaugment's")
        for name, other in (("num_ops", "magnitude"), ("magnitude", "num_ops")):
            if getattr(self, other) is None:
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)}, but {flag(other)} is missing; give both, or neither"
                )
        self._refuse("num_ops", 1 <= (self.num_ops or 0) <= 16, "1 to 16")
        self._refuse(
            "magnitude", 0 <= (self.magnitude or 0) <= MAX_MAGNITUDE, "0 to 10; a third of it where 30 is most"
        )

    def _refuse(self, name: str, good: bool, allowed: str) -> None:
        refuse(name, getattr(self, name), good, allowed)

    def to_json(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Recipe":
        if not isinstance(values, Mapping):
            raise ValueError(f"the recipe is a {type(values).__name__}, not an object of fields and values")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"unknown recipe field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]:
            raise ValueError(f"the recipe field {missing[0]!r} is missing")
        check_kinds("recipe", cls, values)
        paths = {key: Path(values[key]) for key in ("policy", "pretrained") if values.get(key) is not None}
        # Whole numbers are so in JSON where they are floats here, and torch takes those of 64 bits only.
        real = [field.name for field in fields(cls) if field.type in (float, float | None)]
        floats = {name: float(values[name]) for name in real if isinstance(values.get(name), int)}
        return cls(**{**values, **paths, **floats})


def check_kinds(what: str, cls: type, values: Mapping[str, Any]) -> None:
    """Refuse JSON values that the fields of a dataclass cannot have."""
    for field in fields(cls):
        if field.name in values and not _fits(values[field.name], field.type):
            raise ValueError(f"the {what} field {field.name!r} is {values[field.name]!r}, which it cannot be")


def _fits(value: object, kind: Any) -> bool:
    """Whether a JSON value can be a field of this type."""
    if get_origin(kind) is Annotated:
        return _fits(value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_args(kind):
        return any(_fits(value, one) for one in get_args(kind))
    if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        return False  # JSON has such numbers, but no float is one
    json = {Path: str, float: (int, float)}.get(kind, kind)
    return isinstance(value, json) and (kind is bool or not isinstance(value, bool))
