"""Learn, while an image classifier trains, which data augmentation helps which sample."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metaaugment.waiting import WAITING  # noqa: F401 - before anything imports torch  # isort: skip
from metaaugment._deprecated import MOVED
from metaaugment.embedding import embed
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learner import Learner
from metaaugment.networks import network
from metaaugment.observation import Observation
from metaaugment.ops import OPS, PAPER_OPS
from metaaugment.policy import (
    CluePolicy,
    FeaturePolicy,
    LabelPolicy,
    Policy,
    PolicyNetwork,
    RegressingPolicy,
    RejectingPolicy,
    UniformPolicy,
)
from metaaugment.sampler import IdentitySampler, Sampler, TransformationSampler, UniformSampler
from metaaugment.transformation import Transformation, apply
from metaaugment.version import __version__ as __version__

if TYPE_CHECKING:
    from metaaugment.lab.data import dataset

__all__ = [
    "OPS",
    "PAPER_OPS",
    "CluePolicy",
    "FeaturePolicy",
    "IdentitySampler",
    "LabelPolicy",
    "LearnedPolicy",
    "Learner",
    "Observation",
    "Policy",
    "PolicyNetwork",
    "RegressingPolicy",
    "RejectingPolicy",
    "Sampler",
    "Transformation",
    "TransformationSampler",
    "UniformPolicy",
    "UniformSampler",
    "apply",
    "dataset",
    "embed",
    "network",
]


def __getattr__(name: str) -> Any:
    """`dataset` belongs to the laboratory: without it, nothing of that is imported. Old names of modules warn."""
    if name in MOVED:
        return import_module(f"{__name__}.{name}")
    if name != "dataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from metaaugment.lab.data import dataset

    globals()[name] = dataset
    return dataset
