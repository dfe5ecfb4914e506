"""The compared methods: each is a sampler and a policy, handed to the same learner."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from metaaugment.baselines.trivial_augment import TrivialAugmentSampler
from metaaugment.learner import Sampler
from metaaugment.policy import PolicyNetwork, UniformPolicy
from metaaugment.sampler import IdentitySampler, TransformationSampler, UniformSampler


@dataclass(frozen=True)
class Method:
    """How a sampler is made from the recipe's ε and window, and a policy from the number of features."""

    sampler: Callable[[float, int], Sampler]
    policy: Callable[[int], nn.Module] = lambda feature_dim: UniformPolicy()
    space: str | None = None  # of its magnitudes, where it has one of its own


METHODS: dict[str, Method] = {
    "baseline": Method(lambda epsilon, window: IdentitySampler()),
    "randaugment": Method(lambda epsilon, window: UniformSampler()),
    "trivialaugment": Method(lambda epsilon, window: TrivialAugmentSampler(), space="trivialaugment-wide"),
    "metaaugment": Method(TransformationSampler, PolicyNetwork),
}
