"""The policy network and how its outputs become weights."""

import pytest
import torch

from metaaugment import FeaturePolicy, PolicyNetwork, RejectingPolicy, UniformPolicy
from metaaugment.policy import normalize


def test_the_papers_network_by_hand() -> None:
    policy = PolicyNetwork(6).double()
    features, embedding = torch.randn(5, 6).double(), torch.randn(5, 28).double()
    left = torch.relu(embedding @ policy.embedding.weight.T + policy.embedding.bias)
    right = torch.relu(features @ policy.feature.weight.T + policy.feature.bias)
    expected = torch.sigmoid(torch.cat([left, right], 1) @ policy.output.weight[0] + policy.output.bias)
    torch.testing.assert_close(policy(features, embedding), expected)
    assert sum(p.numel() for p in policy.parameters()) == 28 * 100 + 100 + 6 * 100 + 100 + 200 + 1


def test_weights_sum_to_one() -> None:
    outputs = torch.rand(10)
    assert normalize(outputs).sum().item() == pytest.approx(1)
    assert torch.equal(normalize(outputs).argsort(), outputs.argsort())


def test_without_the_embedding_it_has_no_say() -> None:
    policy = FeaturePolicy(6)
    features = torch.randn(5, 6)
    assert torch.equal(policy(features, torch.zeros(5, 28)), policy(features, torch.randn(5, 28)))


def test_rejection_below_the_mean() -> None:
    policy = RejectingPolicy(PolicyNetwork(6))
    weights = policy.normalize(torch.tensor([0.2, 0.4, 0.6, 0.8]))
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.0, 0.6 / 1.4, 0.8 / 1.4]))
    features, embedding = torch.randn(5, 6), torch.randn(5, 28)
    assert torch.equal(policy(features, embedding), policy.policy(features, embedding))


def test_rejection_of_equal_outputs_rejects_nothing() -> None:
    """The mean of equal numbers may be rounded above them."""
    for value in (0.1, 0.3, 0.7):
        weights = RejectingPolicy(PolicyNetwork(6)).normalize(torch.full((7,), value))
        torch.testing.assert_close(weights, torch.full((7,), 1 / 7))


def test_uniform() -> None:
    outputs = UniformPolicy()(torch.randn(4, 3), torch.randn(4, 28))
    assert normalize(outputs).tolist() == [0.25] * 4


@pytest.mark.parametrize("policy", [PolicyNetwork(6), FeaturePolicy(6)], ids=["with", "without"])
def test_features_of_another_size_are_named(policy: PolicyNetwork) -> None:
    with pytest.raises(
        ValueError, match=r"features have 9 numbers, but the policy takes 6; build it with feature_dim=9"
    ):
        policy(torch.randn(2, 9), torch.randn(2, 28))
