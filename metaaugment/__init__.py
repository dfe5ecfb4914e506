"""Learn, while an image classifier trains, which data augmentation helps which sample."""

import os

# Threads that wait for each other sleep; OpenMP reads this when torch is imported. By default they spin: on two busy
# cores two threads trained 3 to 17 times slower than one, and 1.1 to 2.5 times faster if they slept (small-cnn and
# WRN-40-2). As its numbers do not depend on it, it need not be a flag.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
