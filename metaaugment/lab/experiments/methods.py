"""The compared methods: each is a sampler and a policy, handed to the same learner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.adversarial import AdversarialSampler
from metaaugment.lab.baselines.found import FoundPolicy, Schedule, ScheduleSampler, SubPolicies, SubPolicySampler
from metaaugment.lab.baselines.rand_augment import RandAugmentSampler, TrivialAugmentSampler
from metaaugment.policy import UniformPolicy, build
from metaaugment.sampler import IdentitySampler, Sampler, SingleSampler, TransformationSampler, UniformSampler

if TYPE_CHECKING:
    from metaaugment.lab.experiments.recipe import Recipe

# Fields of a recipe that have no effect where no policy is learned.
LEARNING = frozenset(
    (
        "policy_network", "sharpness", "extractor", "learn_alpha", "real_alpha", "policy_batch", "policy_optimizer",
        "policy_lr", "policy_schedule", "policy_momentum", "policy_weight_decay", "policy_clip", "alpha", "epsilon",
        "window", "route", "lagged", "every", "random_epochs", "frozen_epochs",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """How to make a sampler, from a recipe and a found policy, and a policy, for a number of features and classes."""

    sampler: Callable[["Recipe", FoundPolicy | None], Sampler]
    policy: Callable[["Recipe", int, int], nn.Module] = lambda recipe, feature_dim, num_classes: UniformPolicy()
    space: str | None = None  # of its magnitudes, if it has one of its own
    found: bool = False  # whether it augments by a policy that was found beforehand
    copies: int = 1  # of each image, unless the recipe asks for more
    learns: bool = False  # whether it learns a policy, by the fields LEARNING, unless the recipe names a learned one
    plain: bool = False  # whether images are only flipped, and cropped by --baseline-crop instead of --crop
    options: tuple[str, ...] = ()  # further fields of a recipe, which other methods refuse

    @property
    def crop(self) -> str:
        """The field of a recipe that pads images for the random crop."""
        return "baseline_crop" if self.plain else "crop"


def randaugment(recipe: "Recipe", found: FoundPolicy | None) -> Sampler:
    if recipe.magnitude is None or recipe.num_ops is None:
        return UniformSampler()
    return RandAugmentSampler(recipe.magnitude, min(2, recipe.num_ops))


def advaa(recipe: "Recipe", found: FoundPolicy | None) -> Sampler:
    return AdversarialSampler(copies(recipe), recipe.seed)


def by_found_policy(recipe: "Recipe", found: FoundPolicy | None) -> Sampler:
    if isinstance(found, Schedule):
        return ScheduleSampler(found, recipe.epochs)
    assert isinstance(found, SubPolicies)
    return SubPolicySampler(found)


# Samplers of the learned distribution, by what they draw for each sample.
SAMPLERS = {"pairs": TransformationSampler, "singles": SingleSampler}

# In the order of the tables.
METHODS: dict[str, Method] = {
    "baseline": Method(lambda recipe, found: IdentitySampler(), plain=True),
    **{system: Method(by_found_policy, found=True) for system in published.SYSTEMS},
    "randaugment": Method(randaugment, options=("num_ops", "magnitude")),
    "trivialaugment": Method(lambda recipe, found: TrivialAugmentSampler(), space="trivialaugment-wide"),
    "advaa": Method(advaa, space="autoaugment", copies=8),  # one for each policy of an epoch
    "metaaugment": Method(
        lambda recipe, found: SAMPLERS[recipe.transformations](recipe.epsilon, recipe.window),
        lambda recipe, feature_dim, num_classes: build(
            recipe.policy_network, feature_dim, num_classes=num_classes, sharpness=recipe.sharpness
        ),
        learns=True,
        options=("transformations",),
    ),
}


def copies(recipe: "Recipe") -> int:
    """Copies of each image: as many as the recipe asks for, or else as its method needs."""
    return recipe.copies if recipe.copies > 1 else METHODS[recipe.method].copies
