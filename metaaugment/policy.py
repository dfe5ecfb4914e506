"""The augmentation policy network P(f(T(x)), e(T); θ), and how its outputs become the weights of a mini-batch.

A policy is any module from features [n, d] and embeddings [n, 28] to positive outputs [n]. One that turns them into
weights in its own way has a method `normalize`; one that does not look at transformations says `blind = True`, and
functions that have no embedding may then be drawn.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from metaaugment.distributed import total
from metaaugment.embedding import K


def normalize(outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """V = P / ΣP, over the global mini-batch."""
    return outputs / total(outputs.sum())


class PolicyNetwork(nn.Module):
    """Embedding and feature each through a layer of 100 and ReLU, then together to one sigmoid output (Sec. 4)."""

    def __init__(self, feature_dim: int, hidden: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Linear(2 * K, hidden)
        self.feature = nn.Linear(feature_dim, hidden)
        self.output = nn.Linear(2 * hidden, 1)

    def forward(self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"]) -> Float[Tensor, " n"]:
        check_features(features, self.feature)
        both = torch.cat([self.embedding(embedding).relu(), self.feature(features).relu()], dim=1)
        return self.output(both).sigmoid().squeeze(1)


class FeaturePolicy(nn.Module):
    """The policy network without the embedding's branch: the paper's ablation "o.TE"."""

    def __init__(self, feature_dim: int, hidden: int = 100) -> None:
        super().__init__()
        self.feature = nn.Linear(feature_dim, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"]) -> Float[Tensor, " n"]:
        check_features(features, self.feature)
        return self.output(self.feature(features).relu()).sigmoid().squeeze(1)


class RejectingPolicy(nn.Module):
    """Another policy, whose samples below the mean of the mini-batch get no weight: an ablation of the paper's.

    What the sampler sees are the other policy's outputs, unchanged.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"]) -> Float[Tensor, " n"]:
        return self.policy(features, embedding)

    def normalize(self, outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        count = total(torch.full_like(outputs[0], len(outputs)))
        mean = total(outputs.detach().sum()) / count
        # The mean of equal numbers may be rounded to above them.
        return normalize(outputs * (outputs >= mean * (1 - 8 * torch.finfo(mean.dtype).eps)))


class UniformPolicy(nn.Module):
    """Every sample counts the same; nothing is learned."""

    blind = True

    def forward(self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"]) -> Float[Tensor, " n"]:
        return embedding.new_ones(len(embedding))


# Policies by their names, in recipes and in policy files: each for so many features and hidden units.
POLICIES: dict[str, Callable[..., nn.Module]] = {
    "policy-network": PolicyNetwork,
    "feature-policy": FeaturePolicy,
    "rejecting-policy-network": lambda feature_dim, hidden=100: RejectingPolicy(PolicyNetwork(feature_dim, hidden)),
    "rejecting-feature-policy": lambda feature_dim, hidden=100: RejectingPolicy(FeaturePolicy(feature_dim, hidden)),
}


def check_features(features: Tensor, layer: nn.Linear) -> None:
    if features.shape[1] != layer.in_features:
        raise ValueError(
            f"the network's features have {features.shape[1]} numbers, but the policy takes {layer.in_features}; "
            f"build it with feature_dim={features.shape[1]}, or name another layer with features="
        )
