"""A recipe: every number that decides the outcome of a run, as one flat value."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from metaaugment.lab.data import DATASETS
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.training.json_file import typed
from metaaugment.lab.words import series

# Fields of earlier versions, with the values that had no effect: runs recorded with these can be continued.
RETIRED = {"power": 1.0, "magnitude_bins": 1}
FILES = ("policy", "pretrained")  # fields that name a file
FINDING = [name for name, method in METHODS.items() if method.found]


@dataclass(frozen=True)
class Recipe:
    name: Annotated[str, tyro.conf.Suppress]
    """Name of the run."""
    dataset: Annotated[str, tyro.conf.arg(help=f"{series(DATASETS, 'or')}.")]
    network: str
    """Name of the task network."""
    method: Annotated[str, tyro.conf.arg(help=f"Augmentation: {series(METHODS, 'or')}.")] = "metaaugment"
    seed: int = 0
    """Seed of everything random in training."""
    policy: Annotated[
        Path | None,
        tyro.conf.arg(
            help=f"Policy to train under: a file or, for {series(FINDING, 'and')}, also the name of a published policy."
        ),
    ] = None
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
    area_min: float = 0.08
    """Of image files: least share of an image's area in the random part that training sees. With 1, training and
    evaluation see the whole image."""
    white: int = 65535
    """Of image files: the value that counts as white in grey images of more than 8 bits; 4095 for 12 bits."""
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
        return self.method in METHODS and METHODS[self.method].learns and self.policy is None

    @property
    def joint_epochs(self) -> int:
        """Epochs in which a policy is learned, between the random and the frozen ones."""
        return self.epochs - self.random_epochs - self.frozen_epochs

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
        try:
            return typed(cls, values)
        except ValueError as error:
            raise ValueError(f"the recipe {error}") from None
