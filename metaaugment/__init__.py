"""Learn, while an image classifier trains, which data augmentation helps which sample."""

from metaaugment.waiting import WAITING  # noqa: F401 - before anything imports torch  # isort: skip
from metaaugment.data import dataset
from metaaugment.embedding import embed
from metaaugment.learner import Learner
from metaaugment.networks import network
from metaaugment.observation import Observation
from metaaugment.ops import OPS, PAPER_OPS
from metaaugment.policy import (
    CluePolicy,
    FeaturePolicy,
    LabelPolicy,
    PolicyNetwork,
    RegressingPolicy,
    RejectingPolicy,
    UniformPolicy,
)
from metaaugment.sampler import IdentitySampler, TransformationSampler, UniformSampler
from metaaugment.transfer import LearnedPolicy
from metaaugment.transformation import Transformation, apply
from metaaugment.version import __version__ as __version__

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
    "PolicyNetwork",
    "RegressingPolicy",
    "RejectingPolicy",
    "Transformation",
    "TransformationSampler",
    "UniformPolicy",
    "UniformSampler",
    "apply",
    "dataset",
    "embed",
    "network",
]
