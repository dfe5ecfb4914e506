"""The policy network and how its outputs become weights."""

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import metaaugment as ma
from metaaugment import (
    CluePolicy,
    FeaturePolicy,
    LabelPolicy,
    PolicyNetwork,
    RegressingPolicy,
    RejectingPolicy,
    UniformPolicy,
)
from metaaugment.policy import POLICIES, build, clues, exponential, name_of, normalize


def test_the_papers_network_by_hand() -> None:
    policy = PolicyNetwork(6).double()
    features, embedding = torch.randn(5, 6).double(), torch.randn(5, 28).double()
    left = torch.relu(embedding @ policy.embedding.weight.T + policy.embedding.bias)
    right = torch.relu(features @ policy.feature.weight.T + policy.feature.bias)
    expected = torch.sigmoid(torch.cat([left, right], 1) @ policy.output.weight[0] + policy.output.bias)
    torch.testing.assert_close(policy(features, embedding), expected)
    assert sum(p.numel() for p in policy.parameters()) == 28 * 100 + 100 + 6 * 100 + 100 + 200 + 1


def test_without_the_embedding_it_has_no_say() -> None:
    policy = FeaturePolicy(6)
    features = torch.randn(5, 6)
    assert torch.equal(policy(features, torch.zeros(5, 28)), policy(features, torch.randn(5, 28)))
    outputs = UniformPolicy()(features, torch.randn(5, 28))
    assert normalize(outputs).tolist() == [pytest.approx(0.2)] * 5


def test_rejection_below_the_mean() -> None:
    policy = RejectingPolicy(PolicyNetwork(6))
    weights = policy.normalize(torch.tensor([0.2, 0.4, 0.6, 0.8]))
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.0, 0.6 / 1.4, 0.8 / 1.4]))
    for value in (0.1, 0.3, 0.7):  # the mean of equal numbers may be rounded above them
        torch.testing.assert_close(policy.normalize(torch.full((7,), value)), torch.full((7,), 1 / 7))
    features, embedding = torch.randn(5, 6), torch.randn(5, 28)
    assert torch.equal(policy(features, embedding), policy.policy(features, embedding))


@pytest.mark.parametrize("policy", [PolicyNetwork(6), FeaturePolicy(6)], ids=["with", "without"])
def test_features_of_another_size_are_named(policy: PolicyNetwork) -> None:
    with pytest.raises(
        ValueError, match=r"features have 9 numbers, but the policy takes 6; build it with feature_dim=9"
    ):
        policy(torch.randn(2, 9), torch.randn(2, 28))


# -- ours, not the paper's ---------------------------------------------------------------------------------------------


def test_clues_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    found = clues(logits, torch.tensor([1, 0, 2]))
    expected = [[math.log(1 + math.log(4)), 0.25, 1.0], [0.0, 1.0, 0.0], [math.log(101), 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_more_branches_by_hand() -> None:
    policy = LabelPolicy(6, hidden=5, head=exponential, num_classes=3).double()
    features, embedding, more = torch.randn(4, 6).double(), torch.randn(4, 28).double(), torch.rand(4, 3).double()
    labels = torch.tensor([0, 2, 1, 2])
    parts = [
        embedding @ policy.embedding.weight.T + policy.embedding.bias,
        features @ policy.feature.weight.T + policy.feature.bias,
        more @ policy.clues.weight.T + policy.clues.bias,
        policy.label.weight[labels],
    ]
    expected = (torch.cat(parts, 1).clamp(min=0) @ policy.output.weight[0] + policy.output.bias).exp()
    torch.testing.assert_close(policy(features, embedding, more, labels), expected)
    with pytest.raises(ValueError, match="a label is 3, but the policy knows 3 classes"):
        policy(features, embedding, more, labels + 1)


def test_many_classes_cost_nothing_but_their_embedding() -> None:
    few, many = (sum(p.numel() for p in LabelPolicy(8, num_classes=c).parameters()) for c in (10, 1623))
    assert many - few == 1613 * 100


def test_regression_predicts_deviations_from_the_mean() -> None:
    """Its objective is zero where the logarithm of the other policy's output is the standardised alignment."""
    policy = RegressingPolicy(PolicyNetwork(6, head=exponential), sharpness=0.5)
    s = torch.tensor([3.0, -1.0, 2.0, 0.0])
    z = (s - s.mean()) / s.std(correction=0)
    assert policy.objective((0.5 * z).exp(), s).item() == pytest.approx(0, abs=1e-12)
    assert policy.objective((0.5 * z + 0.5).exp(), s).item() == pytest.approx(1)
    assert policy.objective(torch.ones(4), s).item() == pytest.approx(1)
    assert policy.objective(torch.ones(4), torch.zeros(4)).item() == 0  # nothing to predict, and no division by it
    features, embedding = torch.randn(4, 6), torch.randn(4, 28)
    torch.testing.assert_close(policy(features, embedding), policy.policy(features, embedding).sqrt())


@pytest.mark.parametrize("sharpness", [0.0, -1.0, 5.1, math.nan, math.inf])
def test_an_impossible_sharpness(sharpness: float) -> None:
    with pytest.raises(ValueError, match=f"sharpness is {sharpness:g}; it must be above 0"):
        RegressingPolicy(PolicyNetwork(6), sharpness)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_built_by_its_name(name: str) -> None:
    assert name_of(build(name, 6, 5, num_classes=4)) == name


def test_names_that_are_none() -> None:
    with pytest.raises(ValueError, match="label-policy looks at labels; say with num_classes="):
        build("label-policy", 8)
    with pytest.raises(ValueError, match="unknown policy 'nope'; choose one of policy-network, feature-policy"):
        build("nope", 6)
    assert name_of(UniformPolicy()) is None
    assert name_of(PolicyNetwork(6, head=torch.relu)) is None
    assert name_of(RegressingPolicy(CluePolicy(6))) is None  # a sigmoid bounds what it could predict


def test_around_a_policy_all_but_one_thing_stays() -> None:
    regressing, rejecting = RegressingPolicy(CluePolicy(4, head=exponential)), RejectingPolicy(PolicyNetwork(4))
    both = RejectingPolicy(regressing)
    outputs, alignment = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([1.0, -1.0, 0.5])
    assert torch.equal(both.objective(outputs, alignment), regressing.objective(outputs, alignment))
    assert both.sees == ("clues",)
    assert rejecting.sees == ()
    assert RejectingPolicy(LabelPolicy(4, num_classes=3)).sees == ("clues", "labels")
    assert both.normalize(outputs).tolist() == [0, 0, 1]
    assert RegressingPolicy(rejecting).normalize(outputs).tolist() == [0, 0, 1]
    assert not rejecting.has_own("objective")
    assert RejectingPolicy(UniformPolicy()).blind
    assert not both.blind
    assert deepcopy(both).normalize(outputs).tolist() == [0, 0, 1]
    assert not hasattr(both, "nothing")


def test_an_exponential_does_not_overflow() -> None:
    inner = PolicyNetwork(6, head=exponential)
    policy = RegressingPolicy(inner, sharpness=5)
    with torch.no_grad():
        inner.output.weight *= 1e6
    outputs = policy(torch.randn(8, 6), torch.randn(8, 28))
    assert outputs.isfinite().all()
    assert (outputs > 0).all()
    assert normalize(outputs).sum().item() == pytest.approx(1)


def test_labels_that_no_clue_can_be_found_for() -> None:
    with pytest.raises(ValueError, match="a label is 4, but the network that the policy sees through knows 3 classes"):
        clues(torch.randn(2, 3), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="a label is -100, but a policy that looks at labels takes class numbers of 0"):
        clues(torch.randn(2, 3), torch.tensor([0, -100]))
    with pytest.raises(ValueError, match=r"the labels are torch.float32 of shape \(2, 3\)"):
        clues(torch.randn(2, 3), torch.rand(2, 3))
    ruled_out = torch.tensor([[0.0, 0.0, -math.inf]])
    assert clues(ruled_out, torch.tensor([0]))[0, 2].item() == pytest.approx(math.log(2) / math.log(3))


@pytest.mark.parametrize("kind", [PolicyNetwork, FeaturePolicy])
def test_outputs_that_underflow_give_equal_weights(kind: type) -> None:
    """A policy that is driven far down: all sigmoids are zero in float32, and the weights were 0 / 0."""
    policy = kind(8)
    torch.nn.init.constant_(policy.output.bias, -200.0)
    outputs = policy(torch.randn(5, 8), torch.randn(5, 28))
    assert (outputs > 0).all()
    torch.testing.assert_close(policy.normalize(outputs), torch.full((5,), 0.2))


# -- modules of other classes ------------------------------------------------------------------------------------------


class Duck(nn.Module):
    """As policies were written before there was a class for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        return self.layer(features).squeeze(1).exp()


class OwnWay(Duck):
    objective = None

    def normalize(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(0)


def gradient_of(policy: nn.Module) -> float:
    torch.manual_seed(1)
    images, labels = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8), torch.randint(0, 3, (12,))
    network = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
    learner = ma.Learner(network, ma.UniformSampler(), policy, generator=torch.Generator().manual_seed(2))
    learner.policy_backward(learner.observe(images, labels), images, labels)
    return sum(p.grad.abs().sum().item() for p in policy.parameters() if p.grad is not None)


@pytest.mark.parametrize("make", [Duck, OwnWay, lambda: PolicyNetwork(4), lambda: RejectingPolicy(Duck())])
def test_a_wrapped_policy_learns_what_the_bare_one_does(make: Callable[[], nn.Module]) -> None:
    """A compiled one learned nothing, without a word: its wrapper seemed to have an objective of its own."""
    torch.manual_seed(0)
    policy = make()
    bare = gradient_of(deepcopy(policy))
    assert bare > 0
    assert gradient_of(torch.compile(deepcopy(policy), backend="eager")) == bare  # type: ignore[arg-type]
    assert gradient_of(RejectingPolicy(deepcopy(policy))) > 0


def test_what_an_instance_or_a_subclass_says_of_itself_counts() -> None:
    policy = PolicyNetwork(4)
    assert not policy.has_own("objective")
    policy.objective = lambda outputs, alignment: outputs.sum()  # type: ignore[method-assign]
    assert policy.has_own("objective")
    assert RejectingPolicy(policy).has_own("objective")
    assert not RejectingPolicy(Duck()).inner.has_own("normalize")
    assert RejectingPolicy(OwnWay()).has_own("normalize")
    assert type("Blind", (RejectingPolicy,), {"blind": True})(PolicyNetwork(4)).blind
    with pytest.raises(ValueError, match="a layer cannot be called 'normalize'"):
        policy.normalize = nn.Softmax(0)  # type: ignore[assignment]
