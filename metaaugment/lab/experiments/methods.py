"""The compared methods: each is a sampler and a policy, handed to the same learner."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from metaaugment.lab.baselines.adversarial import AdversarialSampler
from metaaugment.lab.baselines.found import FoundPolicy
from metaaugment.lab.baselines.rand_augment import RandAugmentSampler
from metaaugment.lab.baselines.schedule import Schedule, ScheduleSampler
from metaaugment.lab.baselines.sub_policies import SubPolicies, SubPolicySampler
from metaaugment.lab.baselines.trivial_augment import TrivialAugmentSampler
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.policy import UniformPolicy, build
from metaaugment.sampler import IdentitySampler, Sampler, SingleSampler, TransformationSampler, UniformSampler


@dataclass(frozen=True)
class Method:
    """How to make a sampler, from a recipe and a found policy, and a policy, for a number of features and classes."""

    sampler: Callable[[Recipe, FoundPolicy | None], Sampler]
    policy: Callable[[Recipe, int, int], nn.Module] = lambda recipe, feature_dim, num_classes: UniformPolicy()
    space: str | None = None  # of its magnitudes, if it has one of its own
    found: bool = False  # whether it augments by a policy that was found beforehand
    copies: int = 1  # of each image, unless the recipe asks for more


def randaugment(recipe: Recipe, found: FoundPolicy | None) -> Sampler:
    if recipe.magnitude is None or recipe.num_ops is None:
        return UniformSampler()
    return RandAugmentSampler(recipe.magnitude, min(2, recipe.num_ops))


def advaa(recipe: Recipe, found: FoundPolicy | None) -> Sampler:
    return AdversarialSampler(copies(recipe), recipe.seed)


def by_found_policy(recipe: Recipe, found: FoundPolicy | None) -> Sampler:
    if isinstance(found, Schedule):
        return ScheduleSampler(found, recipe.epochs)
    assert isinstance(found, SubPolicies)
    return SubPolicySampler(found)


# Samplers of the learned distribution, by what they draw for each sample.
SAMPLERS = {"pairs": TransformationSampler, "singles": SingleSampler}

# In the order of the tables.
METHODS: dict[str, Method] = {
    "baseline": Method(lambda recipe, found: IdentitySampler()),
    "autoaugment": Method(by_found_policy, found=True),
    "faa": Method(by_found_policy, found=True),
    "pba": Method(by_found_policy, found=True),
    "dada": Method(by_found_policy, found=True),
    "randaugment": Method(randaugment),
    "trivialaugment": Method(lambda recipe, found: TrivialAugmentSampler(), space="trivialaugment-wide"),
    "advaa": Method(advaa, space="autoaugment", copies=8),  # one for each policy of an epoch
    "metaaugment": Method(
        lambda recipe, found: SAMPLERS[recipe.transformations](recipe.epsilon, recipe.window),
        lambda recipe, feature_dim, num_classes: build(
            recipe.policy_network, feature_dim, num_classes=num_classes, sharpness=recipe.sharpness
        ),
    ),
}


def copies(recipe: Recipe) -> int:
    """Copies of each image: as many as the recipe asks for, or else as its method needs."""
    return recipe.copies if recipe.copies > 1 else METHODS[recipe.method].copies
