"""Algorithm 1 in anyone's loop: what a step does, what it leaves alone, and what it says when something is wrong."""

import copy
import itertools
import math
import random
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import metaaugment as ma
from metaaugment.features import Features
from metaaugment.guard import finite
from metaaugment.guard.replay import no_draws
from metaaugment.policy import build, clues, normalize

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
CLASSES = 5
Batch = tuple[Tensor, Tensor]


def small() -> nn.Module:
    return ma.network("small-cnn", CLASSES)


def quick() -> nn.Module:
    """For loops of many steps."""
    return nn.Sequential(nn.Flatten(), nn.Linear(768, CLASSES))


def data(n: int = 16) -> Batch:
    return torch.randint(0, 256, (n, 3, 16, 16), dtype=torch.uint8), torch.randint(0, CLASSES, (n,))


def learner(network: nn.Module | None = None, **settings: object) -> ma.Learner:
    settings = {"sampler": ma.TransformationSampler(), "policy": ma.PolicyNetwork(128), **settings}
    return ma.Learner(network or small(), **settings)  # type: ignore[arg-type]


def optimizers(joint: ma.Learner) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    task = torch.optim.SGD(joint.network.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    return task, torch.optim.SGD(joint.policy_parameters(), 0.01, momentum=0.9, weight_decay=1e-3)


def updated(joint: ma.Learner, batch: Batch | None = None, validation: Batch | None = None) -> ma.Observation:
    """What the learner has observed, behind the gradient of the policy."""
    seen = joint.observe(*(batch or data()))
    joint.policy_backward(seen, *(validation or data()))
    return seen


def aligned(joint: ma.Learner, batch: Batch | None = None, validation: Batch | None = None) -> Tensor:
    alignment = updated(joint, batch, validation).alignment
    assert alignment is not None
    return alignment


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# -- a step ----------------------------------------------------------------------------------------------------------


def test_what_an_observation_holds() -> None:
    joint = learner()
    images, labels = data()
    seen = joint.observe(images, labels)
    assert seen.images.dtype == torch.uint8
    assert torch.equal(seen.images, ma.apply(images, seen.transformation))
    logits = copy.deepcopy(joint.network)(seen.images / 255)
    torch.testing.assert_close(seen.losses, nn.functional.cross_entropy(logits, labels, reduction="none"))
    torch.testing.assert_close(seen.outputs, joint.policy(seen.features, ma.embed(seen.transformation)))
    torch.testing.assert_close(seen.weights, seen.outputs / seen.outputs.sum())
    assert not seen.features.requires_grad
    assert isinstance(joint.sampler, ma.TransformationSampler)
    sums, counts = joint.sampler.present
    assert counts.sum() == 16
    assert sums.sum().item() == pytest.approx(seen.outputs.sum().item(), rel=1e-6)


def test_eq_4_takes_the_weights_of_the_updated_policy() -> None:
    joint = learner()
    _, outer = optimizers(joint)
    seen = updated(joint)
    outer.step()
    with torch.no_grad():
        outputs = joint.policy(seen.features, ma.embed(seen.transformation))
    new = outputs / outputs.sum()
    assert not torch.allclose(new, seen.weights)
    expected = torch.autograd.grad((new * seen.losses).sum(), list(joint.w.values()), retain_graph=True)
    loss = joint.weighted_loss(seen)
    torch.testing.assert_close(loss, (new * seen.losses).sum())
    loss.backward()
    for w, gradient in zip(joint.w.values(), expected, strict=True):
        torch.testing.assert_close(w.grad, gradient)


def test_lagged_takes_the_gradient_at_hand() -> None:
    joint = learner(lagged=True)
    _, outer = optimizers(joint)
    seen = joint.observe(*data())
    expected = torch.autograd.grad(
        (seen.weights.detach() * seen.losses).sum(), list(joint.w.values()), retain_graph=True
    )
    joint.policy_backward(seen, *data())
    outer.step()
    (3 * joint.weighted_loss(seen)).backward()
    for w, gradient in zip(joint.w.values(), expected, strict=True):
        torch.testing.assert_close(w.grad, 3 * gradient)


def test_a_user_loop_is_step() -> None:
    """The contract's ten lines and `step` give the same numbers."""
    one = learner(every=2, generator=torch.Generator().manual_seed(1))
    other = learner(copy.deepcopy(one.network), policy=copy.deepcopy(one.policy), every=2,
                    generator=torch.Generator().manual_seed(1))  # fmt: skip
    task, outer = optimizers(one)
    other_task, other_outer = optimizers(other)
    batches, validation = [data() for _ in range(6)], [data() for _ in range(3)]
    drawn, drawn_again = iter(validation), iter(validation)
    for images, labels in batches:
        seen = one.observe(images, labels)
        if one.due:
            one.policy_backward(seen, *next(drawn))
            outer.step()
            outer.zero_grad()
        one.weighted_loss(seen).backward()
        task.step()
        task.zero_grad()
        other.step(images, labels, other_task, other_outer, drawn_again)
    assert same(one.network.state_dict(), other.network.state_dict())
    assert same(one.policy.state_dict(), other.policy.state_dict())
    assert torch.equal(one.alpha, other.alpha)
    assert next(drawn, None) is next(drawn_again, None) is None


def test_on_other_steps_the_policy_stands_still() -> None:
    """No validation batch is drawn, and neither momentum nor weight decay moves θ or α."""
    joint = learner(every=3)
    task, outer = optimizers(joint)
    validation = iter([data()])
    due = []
    for _ in range(5):
        before = state(joint.policy), joint.alpha.detach().clamp(min=0)
        joint.step(*data(), task, outer, validation)
        due.append(joint.due)
        moved = not same(before[0], joint.policy.state_dict())
        assert moved == joint.due
        assert torch.equal(before[1], joint.alpha) != joint.due
    assert due == [False, False, True, False, False]


def test_copies_of_each_image() -> None:
    joint = learner(copies=3)
    images, labels = data(4)
    seen = joint.observe(images, labels)
    assert len(seen.losses) == len(seen.transformation) == 12
    assert seen.labels.tolist() == [label for label in labels.tolist() for _ in range(3)]
    assert seen.weights.sum().item() == pytest.approx(1)
    assert torch.equal(seen.images, ma.apply(images.repeat_interleave(3, 0), seen.transformation))


def test_before_transformation_after_prepare_in_order() -> None:
    order = []

    def noted(name: str, result: object = None) -> object:
        return lambda images: order.append((name, images.dtype)) or (images if result is None else images.float())

    joint = learner(before=noted("before"), after=noted("after"), prepare=noted("prepare", "float"))
    updated(joint)
    assert [name for name, _ in order] == ["before", "after", "prepare", "prepare"]  # validation is prepared only
    assert all(dtype == torch.uint8 for _, dtype in order)


def test_alpha_is_not_below_zero_in_a_step_or_between_steps() -> None:
    """An optimizer took it there, and whoever logged it read a step size below zero."""
    updated(joint := learner(alpha=0.0))
    assert joint.alpha.grad is not None
    assert joint.alpha.grad.abs() > 0  # so that it can leave 0
    joint = learner(alpha=0.2)
    assert joint.alpha.item() == pytest.approx(0.2)
    assert any(p is joint.alpha for p in joint.policy_parameters())
    joint.alpha.data.fill_(-0.3)
    joint.look(*data(), seed=1)
    assert joint.alpha.item() == pytest.approx(-0.3)  # looking changes nothing
    seen = joint.observe(*data())
    assert joint.alpha.item() == 0
    joint.alpha.data.fill_(-0.3)
    joint.weighted_loss(seen)
    assert joint.alpha.item() == 0


def test_a_step_that_is_refused_leaves_no_trace() -> None:
    joint = learner()
    before = state(joint.network)
    with pytest.raises(ValueError, match="this step updates the policy"):
        joint.step(*data(), torch.optim.SGD(joint.network.parameters(), 0.1))
    assert joint.steps == 0
    assert joint.sampler.present.sum() == 0
    assert same(before, joint.network.state_dict())


def test_state_goes_on_where_it_was() -> None:
    one = learner(every=2)
    task, outer = optimizers(one)
    validation = iter([data() for _ in range(9)])
    for _ in range(3):
        one.step(*data(), task, outer, validation)
    other = learner(every=2)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.steps == 3
    assert torch.equal(other.alpha, one.alpha)
    assert same(one.policy.state_dict(), other.policy.state_dict())
    still = ma.Learner(small(), ma.UniformSampler(), ma.PolicyNetwork(8))
    with pytest.raises(ValueError, match="the saved state has a stateful sampler, but the learner has none"):
        still.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="the learner has a stateful sampler, but the saved state has none"):
        other.load_state_dict(still.state_dict())
    assert other.steps == 3


# -- any network -----------------------------------------------------------------------------------------------------


class Reversed(nn.Module):
    """The layer that is defined last is not the one that is called last."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.enter = nn.Linear(8, CLASSES), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.enter(x[:, 0, 0, :4]))


@pytest.mark.parametrize("make", [small, Reversed])
def test_features_are_what_enters_the_last_linear_layer(make: Callable[[], nn.Module]) -> None:
    network, images = make(), torch.rand(3, 3, 16, 16)
    features = Features(network)
    with features.watched():
        logits = network(images)
    torch.testing.assert_close(network.output(features.take()), logits)


def test_a_named_layer_and_maps_or_tokens() -> None:
    features = Features(network := small(), "body.4")
    with features.watched():
        network(torch.rand(3, 3, 16, 16))
    assert features.take().shape == (3, 32)  # the mean over positions of what enters the second convolution
    assert not any(module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("name", [None, "4"])
@pytest.mark.parametrize("passes", [0, 1])
def test_a_head_may_be_replaced(passes: int, name: str | None) -> None:
    """All layers have one width, so that no policy could tell their inputs apart."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    joint = learner(network, policy=ma.PolicyNetwork(8), features=name)
    for _ in range(passes):
        joint.observe(*data())
    network[4] = nn.Linear(8, CLASSES)
    seen = joint.observe(*data())
    torch.testing.assert_close(seen.features, network[:4](seen.inputs))


def test_gradients_accumulate_as_in_any_loop() -> None:
    joint = learner()
    parts = [joint.observe(*data(8)) for _ in range(2)]
    expected = torch.autograd.grad(
        sum((seen.weights.detach() * seen.losses).sum() for seen in parts),
        joint.network.output.weight,
        retain_graph=True,
    )[0]
    for seen in parts:
        joint.weighted_loss(seen).backward()
    torch.testing.assert_close(joint.network.output.weight.grad, expected)


Hook = Callable[[Tensor], Tensor | None]


def halve_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


HOOKS: dict[str, Hook] = {
    "doubles": lambda g: 2 * g,
    "clips": lambda g: g.clamp(-100, 100),
    "halves in place": halve_in_place,
}


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_on_a_parameter_sees_the_gradient_that_trains_it(hook: Hook, lagged: bool) -> None:
    """Once, and at its own scale: one that clips at a bound that no gradient reaches changes nothing."""
    network, (images, labels), validation = small(), data(), data()
    found, other = [], copy.deepcopy(network)
    for parameter in other.parameters():
        parameter.register_hook(hook)
    for one in (network, other):
        torch.manual_seed(0)
        joint = learner(one, lagged=lagged)
        seen = joint.observe(images, labels)
        joint.policy_backward(seen, *validation)
        joint.weighted_loss(seen).backward()
        found.append((seen.alignment, one.output.weight.grad))
    (alignment, gradient), (under_hook, hooked) = found
    assert torch.equal(hooked, gradient if (changed := hook(gradient)) is None else changed)
    if hook is HOOKS["clips"]:
        assert torch.equal(under_hook, alignment)


def test_the_policys_gradient_is_clipped_once() -> None:
    """Autograd has one tensor for the gradients of two parameters that are added to each other."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.change = nn.Parameter(torch.randn(1, 128)), nn.Parameter(torch.zeros(1, 128))

        def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
            return nn.functional.linear(features, self.weight + self.change).sigmoid().squeeze(1)

    joint = learner(policy=Added())
    updated(joint)
    found = [p.grad for p in joint.policy_parameters() if p.grad is not None]
    expected = [gradient / nn.utils.get_total_norm(found) for gradient in found]
    nn.utils.clip_grad_norm_(joint.policy_parameters(), 1.0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# -- extra passes disturb nothing --------------------------------------------------------------------------------------


class GhostBatchNorm(nn.BatchNorm2d):
    """Statistics of each half of a mini-batch, by a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        halves = input.chunk(2) if self.training else [input]
        return torch.cat([
            nn.functional.batch_norm(half, self.running_mean, self.running_var, self.weight, self.bias, self.training)
            for half in halves
        ])  # fmt: skip


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(small(), nn.Dropout(0.4)),
    "ghost": lambda: nn.Sequential(nn.Conv2d(3, 5, 3), GhostBatchNorm(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("route", ["difference", "forward", "unrolled"])
def test_the_network_is_bit_for_bit_as_before(route: str, lagged: bool, kind: str) -> None:
    network = nn.Sequential(LEFT_ALONE[kind](), nn.Linear(CLASSES, CLASSES))
    joint = learner(network, policy=ma.PolicyNetwork(CLASSES), route=route, lagged=lagged)
    seen = joint.observe(*data())
    before, validation = state(network), data()
    joint.policy_backward(seen, *validation)
    assert same(before, network.state_dict())
    joint.weighted_loss(seen).backward()
    assert all(p.grad is not None for p in network.parameters())


def test_batch_statistics_move_once_an_iteration() -> None:
    joint = learner()
    plain = copy.deepcopy(joint.network)
    seen = joint.observe(*data())
    plain(seen.inputs)
    joint.policy_backward(seen, *data())
    joint.weighted_loss(seen).backward()
    assert same(plain.state_dict(), joint.network.state_dict())
    assert joint.network.body[1].num_batches_tracked == 1


def test_statistics_of_the_policy_move_once_an_iteration() -> None:
    """Eq. 4 asks it again, after its update."""

    class Normalized(ma.PolicyNetwork):
        def __init__(self) -> None:
            super().__init__(128)
            self.norm = nn.BatchNorm1d(128)

        def forward(self, features: Tensor, embedding: Tensor, *evidence: Tensor) -> Tensor:
            return super().forward(self.norm(features), embedding)

    joint = learner(policy=Normalized())
    joint.step(*data(), *optimizers(joint), iter([data()]))
    assert joint.policy.norm.num_batches_tracked == 1


def test_dropout_is_replayed_and_the_generator_goes_on() -> None:
    """The alignment's pass draws what the training pass drew; what is drawn afterwards does not depend on it."""
    drawn: list[Tensor] = []

    class Noted(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            drawn.append((out == 0).clone())
            return out

    network = nn.Sequential(small(), Noted(0.5), nn.Linear(CLASSES, CLASSES))
    joint = learner(network, policy=ma.PolicyNetwork(CLASSES))
    seen = joint.observe(*data())
    validation = data()
    training_mask = drawn[0]
    torch.manual_seed(7)
    joint.policy_backward(seen, *validation)
    after = torch.rand(3)
    assert torch.equal(drawn[2], training_mask)  # 0: training, 1: validation, 2: alignment
    torch.manual_seed(7)
    network(seen.inputs)  # the validation pass draws as many numbers
    assert torch.equal(torch.rand(3), after)


class Balancing(nn.Module):
    """Keeps a loss of its own on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.output = nn.Linear(768, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1)).tanh()
        self.balance = x.square().mean()
        return self.output(x)


def test_a_loss_that_the_network_keeps_on_itself_has_its_gradient() -> None:
    network = Balancing()
    joint = learner(network, policy=ma.PolicyNetwork(16))
    seen = joint.observe(*data())
    expected = torch.autograd.grad(network.balance, network.enter.weight, retain_graph=True)[0]
    joint.policy_backward(seen, *data())
    (found,) = torch.autograd.grad(network.balance, network.enter.weight)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("own", [False, True])
def test_dropout_of_the_policy_is_replayed_too(own: bool) -> None:
    """As long as θ has not moved, Eq. 4 has the weights first seen."""

    class Dropping(ma.PolicyNetwork):
        def forward(self, features: Tensor, embedding: Tensor, *evidence: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(features), embedding)

    joint = learner(policy=Dropping(128), extractor=nn.Sequential(nn.Dropout(0.2), small()) if own else None)
    seen = updated(joint)
    before = torch.get_rng_state()
    torch.testing.assert_close(joint.weighted_loss(seen), (seen.weights * seen.losses).sum())
    assert torch.equal(torch.get_rng_state(), before)


class Renormalized(nn.Module):
    """Centers its input by a running mean that includes it, as batch renormalisation does in training."""

    def __init__(self, inner: nn.Module, dim: int) -> None:
        super().__init__()
        self.inner = inner
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().transpose(0, 1).flatten(1).mean(1), 0.1)
        return self.inner(x - self.mean.view(-1, *[1] * (x.ndim - 2)), *more)


@pytest.mark.parametrize("own", [False, True])
def test_buffers_that_a_policy_reads_and_writes_are_as_they_were_when_it_judges_again(own: bool) -> None:
    """As long as θ has not moved, Eq. 4 has the weights first seen; and the buffers move once an iteration."""
    policy = ma.PolicyNetwork(128)
    extractor = Renormalized(small(), 3) if own else None
    joint = learner(policy=policy if own else Renormalized(policy, 128), extractor=extractor)
    seen = joint.observe(*data())
    (moved,) = (state(module)["mean"] for module in (joint.policy, extractor) if isinstance(module, Renormalized))
    joint.policy_backward(seen, *data())
    torch.testing.assert_close(joint.weighted_loss(seen), (seen.weights * seen.losses).sum(), rtol=1e-7, atol=0)
    assert moved.any()
    assert torch.equal((extractor or joint.policy).mean, moved)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("failing", [1, 2])
def test_an_exception_in_a_pass_leaves_w_restored(failing: int, error: type[BaseException]) -> None:
    network = small()
    joint = learner(network)
    seen = joint.observe(*data())
    before, calls = state(network), []

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == failing:
            raise error

    hook = network.output.register_forward_hook(fail)
    with pytest.raises(error):
        joint.policy_backward(seen, *data())
    hook.remove()
    assert same(before, network.state_dict())
    assert all(module.track_running_stats for module in network.modules() if isinstance(module, nn.BatchNorm2d))
    joint.policy_backward(seen, *data())
    joint.weighted_loss(seen).backward()


def test_autocast_does_not_hand_out_casts_from_before_the_move() -> None:
    """Inside one autocast context torch caches the cast parameters; the alignment must see the moved ones."""
    joint = learner()
    images, labels = data()
    with torch.autocast("cpu", torch.bfloat16):
        seen = updated(joint, (images, labels))
    assert seen.alignment is not None
    assert seen.alignment.abs().max() > 1e-4
    assert joint.network.output.weight.dtype == torch.float32
    joint.weighted_loss(seen).backward()


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_the_policys_gradient_does_not_depend_on_whether_autocast_is_still_on(own: bool) -> None:
    """Autocast also rounds the products of a backward pass; the policy learns in its own precision."""
    network, extractor, policy = small(), small(), ma.PolicyNetwork(128)
    (images, labels), validation, found = data(), data(), []
    for still_on in (False, True):
        torch.manual_seed(0)
        parts = copy.deepcopy((network, policy, extractor))
        joint = learner(parts[0], policy=parts[1], extractor=parts[2] if own else None)
        with torch.autocast("cpu", torch.bfloat16):
            seen = joint.observe(images, labels)
        with torch.autocast("cpu", torch.bfloat16, enabled=still_on):
            joint.policy_backward(seen, *validation)
        found.append([p.grad for p in joint.policy_parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class AutocastInside(nn.Module):
    """Uses a coarse precision where nobody sees it from outside, as what HF Accelerate prepares does."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network(images)
        return logits.float()


class CoarseHead(nn.Module):
    """Parameters of two precisions, the finer one first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 128, 3, stride=2), nn.Linear(128, CLASSES).bfloat16()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stem(images).relu().mean((2, 3)).bfloat16()).float()


@pytest.mark.parametrize("make", [lambda: AutocastInside(small()), CoarseHead], ids=["autocast", "parameters"])
def test_the_difference_stands_out_of_the_rounding_inside_the_network(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    network, images, validation = make(), data(64), data(64)
    found = []
    for route in ("difference", "forward"):
        torch.manual_seed(1)
        joint = learner(copy.deepcopy(network), route=route)
        found.append(aligned(joint, images, validation))
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.95


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["python", "numpy"])
def test_layers_that_decide_by_other_generators_decide_alike_again(draw: Callable[[], float]) -> None:
    """Stochastic depth: a pass through other layers would be far off, and its difference is divided by h."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Conv2d(3, 128, 3, stride=2), nn.Linear(128, 128), nn.Linear(128, 5)

        def forward(self, images: Tensor) -> Tensor:
            features = self.stem(images).mean((2, 3))
            return self.head(features + torch.tanh(self.block(features)) if draw() > 0.5 else features)

    joint, sizes = learner(Sometimes()), []
    for seed in range(8):
        random.seed(seed)
        np.random.seed(seed)
        seen = joint.observe(*data())
        with no_draws(torch.device("cpu")):
            expected = [draw() for _ in range(3)][1:]  # behind the validation pass, which draws a number of its own
        joint.policy_backward(seen, *data())
        joint.look(*data(), seed)
        assert [draw(), draw()] == expected
        assert seen.alignment is not None
        sizes.append(seen.alignment.abs().max())
    assert max(sizes) < 100


def test_layers_may_be_frozen_and_weights_replaced_meanwhile() -> None:
    network = small()
    body = next(network.children())
    body.requires_grad_(False)
    joint = learner(network, lagged=True)
    first = next(body.parameters())
    for trained in (False, True):
        body.requires_grad_(trained)
        seen = updated(joint)
        joint.weighted_loss(seen).backward()
        assert (first.grad is not None) == trained
    network.load_state_dict(state(network), assign=True)
    assert aligned(joint).abs().max() > 0


def test_features_of_a_linear_layer_are_its_last_dimension() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 128, 3, stride=2), nn.Linear(128, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.stem(images).permute(0, 2, 3, 1)).mean((1, 2))

    network = Positions()
    seen = learner(network).observe(*data())
    torch.testing.assert_close(seen.features, network.stem(seen.inputs).mean((2, 3)))


def test_a_loss_of_ones_own_may_ignore_labels_or_take_others() -> None:
    images, labels = data()
    labels[3] = -100
    ignoring = nn.CrossEntropyLoss(reduction="none", ignore_index=-100)
    assert learner(loss=ignoring).observe(images, labels).losses[3] == 0
    binary = ma.network("small-cnn", 2)
    binary.output = nn.Linear(128, 1)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels.float(), reduction="none")

    assert learner(binary, loss=loss).observe(images, labels.clamp(0, 1)).losses.isfinite().all()


# -- what may go wrong -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_a_loss_that_is_not_finite_reaches_nothing(precision: torch.dtype, value: float) -> None:
    """Nor under float16, where `step` has no GradScaler that would leave the step out."""
    poison = [value]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="none") * (poison[0] if poison else 1.0)

    def step() -> None:
        with torch.autocast("cpu", torch.float16, enabled=precision == torch.float16):
            joint.step(*data(), task, outer, iter([data()]))

    joint = learner(loss=loss)
    task, outer = optimizers(joint)
    poison.clear()
    step()  # momentum, which would go on moving w
    poison.append(value)
    before = state(joint.policy), joint.alpha.detach().clone(), [w.detach().clone() for w in joint.w.values()]
    step()
    assert joint.skipped == 2
    assert same(before[0], joint.policy.state_dict())
    assert torch.equal(before[1], joint.alpha)
    assert all(torch.equal(kept, w) for kept, w in zip(before[2], joint.w.values(), strict=True))
    poison.clear()
    step()
    assert joint.skipped == 2
    assert not torch.equal(before[2][0], next(iter(joint.w.values())))
    joint.sampler.update()
    assert isinstance(joint.sampler, ma.TransformationSampler)
    everything = [*joint.network.parameters(), *joint.policy_parameters(), joint.sampler.probabilities]
    assert all(tensor.isfinite().all() for tensor in everything)


def test_a_captured_step_leaves_a_gradient_that_is_not_finite_to_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose fused optimizers read the same tensor: the host never looks at the gradients."""
    scale = torch.ones(())

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="none") * scale

    joint = learner(loss=loss)
    task = torch.optim.SGD(joint.network.parameters(), 0.1, momentum=0.9, fused=True)
    outer = torch.optim.SGD(joint.policy_parameters(), 0.1, momentum=0.9, fused=True)
    joint.step(*data(), task, outer, iter([data()]))  # the warm-up, in which optimizers make their state
    before = [p.detach().clone() for p in (*joint.network.parameters(), *joint.policy_parameters())]
    monkeypatch.setattr(finite, "capturing", lambda device: True)
    scale.fill_(math.inf)
    joint.step(*data(), task, outer, iter([data()]))
    after = [*joint.network.parameters(), *joint.policy_parameters()]
    assert joint.skipped == 2
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    scale.fill_(1.0)
    joint.step(*data(), task, outer, iter([data()]))
    assert joint.skipped == 2
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True) if one.ndim > 1)
    assert all(p.isfinite().all() for p in after)


def test_a_head_of_zeros_hides_a_pass_that_cannot_be_repeated_only_once() -> None:
    head = nn.Linear(CLASSES, CLASSES)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    joint = learner(nn.Sequential(OwnDraws(), head), policy=ma.PolicyNetwork(CLASSES))
    both = optimizers(joint)
    joint.step(*data(), *both, iter([data()]))
    with pytest.raises(ValueError, match="repeating the training pass gives different logits"):
        joint.step(*data(), *both, iter([data()]))


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = small()
        self.mean = nn.Parameter(torch.zeros(CLASSES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.network(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * logits.mean(0))
        return logits


class TokensFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.output = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.patches(x).flatten(2).permute(2, 0, 1)).mean(0)


def test_a_cached_weight_is_refused() -> None:
    """It would stay as it was when its parameters move."""
    network = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(768, 16)), nn.Linear(16, CLASSES))
    joint = learner(network, policy=ma.PolicyNetwork(16))
    joint.observe(*data())
    with parametrize.cached(), pytest.raises(ValueError, match=r"cached\(\) .* leave it out around"):
        joint.observe(*data())


def test_a_lagged_gradient_is_not_that_of_other_parameters() -> None:
    joint = learner(lagged=True)
    task, _ = optimizers(joint)
    seen = updated(joint)
    joint.weighted_loss(seen).backward()
    joint.weighted_loss(seen)  # w has not moved
    task.step()
    with pytest.raises(ValueError, match=r"parameters have changed since observe\(\)"):
        joint.weighted_loss(seen)


class LearnedTemperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits * self.temperature, labels, reduction="none")


class InPlace(nn.Module):
    """Normalises the images that it is given where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images.sub_(0.5).div_(0.25))


class OwnDraws(nn.Module):
    """Noise from a generator that nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images + 0.1 * torch.randn(images.shape, generator=self.generator))


def under(hook: Hook) -> nn.Module:
    network = small()
    network.output.weight.register_hook(hook)
    return network


def stepped(*validation: object, images: Tensor | None = None, **settings: object) -> None:
    """A step of a learner that is built anew, with these validation batches."""
    joint, (usual, labels) = learner(**settings), data()
    joint.step(usual if images is None else images, labels, *optimizers(joint), iter(validation))  # type: ignore[arg-type]


def backward_behind(change: Callable[[ma.Learner, ma.Observation], object]) -> None:
    """The gradient of the policy, behind something that the loop does to the learner."""
    joint = learner()
    seen = joint.observe(*data())
    change(joint, seen)
    joint.policy_backward(seen, *data())


MISTAKES = {
    "no linear layer": (lambda: learner(nn.Conv2d(3, 5, 1)), r"no linear layer .* with features="),
    "no such layer": (lambda: learner(features="body.99"), r"features='body.99' is not a layer .* \['output'\]"),
    "unknown space": (lambda: learner(space="flat"), r"unknown space 'flat'; choose one of metaaugment"),
    "unknown route": (lambda: learner(route="magic"), r"unknown route 'magic'; choose one of difference, forward"),
    "every": (lambda: learner(every=0), r"every is 0; it must be a whole number of at least 1"),
    "copies": (lambda: learner(copies=0), r"copies is 0; it must be a whole number of at least 1"),
    "part": (lambda: learner(part=0), r"part is 0; it must be a whole number of at least 1"),
    "alpha": (lambda: learner(alpha=-1.0), r"alpha is -1; it must be finite, and 0 or above"),
    "alpha that is no number": (lambda: learner(alpha=math.nan), r"alpha is nan"),
    "every that is no number": (lambda: learner(every=2.5), r"every is 2.5"),
    "policy of another shape": (
        lambda: learner(policy=nn.Bilinear(128, 28, 1)).observe(*data()),
        r"the policy gives \(16, 1\) for 16 samples; it must give one number each",
    ),
    "arrays": (lambda: learner().observe(data()[0].numpy(), data()[1]), r"training images are a ndarray; give a torch"),
    "frozen": (lambda: learner(small().requires_grad_(False)), r"nothing to train"),
    "feature size": (lambda: learner(policy=ma.PolicyNetwork(7)).observe(*data()), r"have 128 numbers.* takes 7"),
    "empty": (lambda: learner().observe(*data(0)), r"the training batch is empty"),
    "label": (lambda: learner().observe(data(4)[0], torch.tensor([0, 1, 2, 5])), r"a training label is 5.* 5 classes"),
    "negative": (lambda: learner().observe(data(2)[0], torch.tensor([0, -1])), r"a training label is -1"),
    "number": (lambda: learner().observe(data(4)[0], torch.tensor([0])), r"4 training images but 1 labels"),
    "device": (
        lambda: learner().observe(data(4)[0].to("meta"), data(4)[1]),
        r"training images are on meta, but the network is on cpu; move them there with .to\('cpu'\)",
    ),
    "loss": (
        lambda: learner(loss=nn.functional.cross_entropy).observe(*data()),
        r"the loss has shape \(\) for 16 training samples; it must give one number per sample",
    ),
    "a loss of each class": (
        lambda: learner(loss=lambda z, y: (z - y[:, None]).square()).observe(*data()),
        r"the loss has shape \(16, 5\) for 16 training samples; it must give one number per sample \(take its .mean\(1",
    ),
    "masks": (
        lambda: learner(loss=lambda z, y: z.mean(1) * y.double().mean((1, 2))).observe(data()[0], data()[0][:, 0]),
        r"the training labels have shape \[16, 16, 16\], as masks have; transformations move images, but no masks",
    ),
    "an optimizer that computes losses itself": (
        lambda: (joint := learner()).step(*data(), torch.optim.LBFGS(joint.network.parameters())),
        r"the task optimizer is LBFGS, whose step computes losses itself; use one that follows the gradient",
    ),
    "an optimizer that computes losses itself, under a schedule": (
        lambda: (
            [(joint := learner(), task := torch.optim.LBFGS(joint.network.parameters()))]
            and [torch.optim.lr_scheduler.StepLR(task, 1), joint.step(*data(), task, None)]
        ),
        r"the task optimizer is LBFGS, whose step computes losses itself",
    ),
    "labels of 32 bits": (
        lambda: learner().observe(data()[0], data()[1].int()),
        r"training labels are int32 \[16\]; they must be class numbers, int64 \[16\], or .* point \[16, 5\]",
    ),
    "one label": (
        lambda: learner().observe(data()[0], torch.tensor(1)),
        r"training labels are one number; give a mini",
    ),
    "label of an own loss": (
        lambda: learner(loss=nn.CrossEntropyLoss(reduction="none")).observe(data(2)[0], torch.tensor([0, 5])),
        r"a training label is 5, but the network has 5 classes, 0 to 4; labels that are not class numbers must have",
    ),
    "logits": (
        lambda: learner(nn.Sequential(small(), nn.Flatten(0))).observe(*data()),
        r"the network returns \[80\]; it",
    ),
    "images in [0, 1]": (
        lambda: learner().observe(data()[0] / 255, data()[1]),
        r"the images are float32, but without prepare= they are divided by 255; give uint8 images",
    ),
    "a policy of another precision": (
        lambda: learner(small().double()),
        r"parameters are torch.float32; for a network of torch.float64 they must be torch.float64: .* with .to",
    ),
    "a policy that would round its steps away": (
        lambda: learner(small().bfloat16(), policy=ma.PolicyNetwork(128).bfloat16()),
        r"are torch.bfloat16; for a network of torch.bfloat16 they must be torch.float32: .* \.to\(torch.float32",
    ),
    "no module": (
        lambda: learner(lambda images: images),  # type: ignore[arg-type]
        r"the network is a function; it must be a torch.nn.Module",
    ),
    "policy and sampler in the wrong order": (
        lambda: ma.Learner(small(), ma.PolicyNetwork(8), ma.TransformationSampler()),  # type: ignore[arg-type]
        r"the policy is a TransformationSampler; it must be a torch.nn.Module",
    ),
    "the class of a sampler": (
        lambda: ma.Learner(small(), ma.TransformationSampler, ma.PolicyNetwork(8)),  # type: ignore[arg-type]
        r"the sampler is the class TransformationSampler; give an object that draws, such as Tr",
    ),
    "a sampler that only draws": (
        lambda: ma.Learner(small(), type("Draws", (), {"sample": ma.UniformSampler.sample})(), ma.PolicyNetwork(8)),
        r"the sampler, a Draws, has no record\(\); a sampler has sample\(\), record\(\) and update\(\), of which the",
    ),
    "the task network as an extractor of its own": (
        lambda: ma.Learner(net := small(), ma.TransformationSampler(), ma.PolicyNetwork(8), extractor=net),
        r"extractor shares \d+ parameters with the task network, which would be learned twice; leave out extractor=",
    ),
    "a hook that cuts its result off": (
        lambda: updated(learner(under(lambda g: g.detach() / 2))),
        r"a hook on a parameter of shape \[.*\] cuts its result off from the gradient .*; leave out no_grad\(\), det",
    ),
    "an input changed in place": (
        lambda: learner(InPlace()).observe(*data()),
        r"the network changes its input in place; let it work on a copy",
    ),
    **{
        f"draws of its own, {route}": (
            lambda route=route: stepped(data(), network=OwnDraws(), route=route),
            rf"repeating the training pass gives different logits, so route='{route}' cannot work; keep the network in",
        )
        for route in ("difference", "forward", "unrolled")
    },
    "validation images of another kind": (
        lambda: stepped((data()[0] / 255, data()[1]), prepare=lambda x: x / 255),
        r"the validation images are float32, but the training images uint8; give both the same dtype",
    ),
    "validation images that are normalised already": (
        lambda: stepped((data()[0] / 127.5 - 1, data()[1]), images=data()[0] / 255, prepare=lambda x: (x - 0.5) / 0.25),
        r"the validation images hold -\S+; they must lie in \[0, 1\], as prepare= gets them: leave normalization to it",
    ),
    "validation images that only before= would bring into range": (
        lambda: learner(before=lambda x: (x + 1) / 2, prepare=lambda x: x).validation_gradient(
            data()[0] / 127.5 - 1, data()[1]
        ),
        r"the validation images hold -\S+; they must lie in \[0, 1\], as prepare= gets them",
    ),
    "a validation batch of three": (
        lambda: stepped((*data(), 0)),
        r"a validation batch is a tuple of 3; it must be \(images, labels\)",
    ),
    "a loss that learns": (
        lambda: learner(loss=LearnedTemperature(), lagged=True),
        r"the loss has parameters of its own, .*; use lagged=False",
    ),
    "a list of validation batches": (
        lambda: (joint := learner()).step(*data(), *optimizers(joint), [data()]),  # type: ignore[arg-type]
        r"validation_batches is a list; give one iterator that starts over",
    ),
    "no more validation batches": (
        lambda: stepped(),
        r"the validation batches have run out; give one iterator that starts over",
    ),
    "no validation": (
        lambda: (joint := learner()).step(*data(), torch.optim.SGD(joint.network.parameters(), 0.1)),
        r"this step updates the policy; it needs the policy's optimizer and validation batches",
    ),
    "two gradients of one observation": (
        lambda: backward_behind(lambda joint, seen: joint.policy_backward(seen, *data())),
        r"the policy has had its gradient from this observation; observe again, or give policy_backward\(\) all",
    ),
    "an update of the policy behind that of the network": (
        lambda: backward_behind(lambda joint, seen: joint.weighted_loss(seen).backward()),
        r"used up the graph of this observation; call policy_backward\(\) before",
    ),
    "evaluation mode behind the training pass": (
        lambda: backward_behind(lambda joint, seen: joint.network.eval()),
        r"keep the network in the mode that it had in observe\(\)",
    ),
    "a pass that changes a parameter": (
        lambda: learner(Prototypes()).observe(*data()),
        r"the network's pass changes parameter 'mean', .* make it a buffer",
    ),
    "features of another order": (
        lambda: learner(TokensFirst(), policy=ma.PolicyNetwork(16)).observe(*data(5)),
        r"features of 5 images have shape .* name a layer with features=",
    ),
}


@pytest.mark.gpu
def test_images_out_of_range_are_refused_on_a_gpu_too() -> None:
    """At the first step, and at the first update of the policy; there, `apply` clamps them."""
    images, labels = (value.cuda() for value in data())
    joint = learner(small().cuda(), policy=ma.PolicyNetwork(128).cuda(), prepare=lambda x: (x - 0.5) / 0.25)
    with pytest.raises(ValueError, match=r"the training images hold -\S+; they must lie in \[0, 1\]: bring them there"):
        joint.observe(images / 127.5 - 1, labels)
    seen = joint.observe(images / 255, labels)
    with pytest.raises(ValueError, match=r"the validation images hold -\S+; they must lie in \[0, 1\], as prep"):
        joint.policy_backward(seen, images / 127.5 - 1, labels)


@pytest.mark.parametrize(
    ("dead", "told"),
    [
        ((8, 240), [108]),  # a hundred steps later, and once
        ((110, 240), [210]),  # not before: until then, it may be the last third of the training
        ((170, 240), []),  # in the last third α falls by itself
        ((8, 90), []),  # it has come back
    ],
)
def test_an_alpha_that_has_died_is_told_once(dead: tuple[int, int], told: list[int]) -> None:
    joint, batch, found = learner(quick(), policy=ma.FeaturePolicy(768)), data(2), []
    for step in range(240):
        joint.alpha.data.fill_(1e-9 if dead[0] <= step < dead[1] else 0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            joint.observe(*batch)
        found += [(step, str(warning.message)) for warning in caught]
    assert [step for step, _ in found] == told
    for _, message in found:
        assert f"near 0 since step {dead[0]} (now 1e-09)" in message
        assert "clip_grad_norm_(learner.policy_parameters()" in message


@pytest.mark.parametrize(
    "policy",
    [ma.UniformPolicy(), ma.PolicyNetwork(768).requires_grad_(False), build("regressing-exponential-clue-policy", 768)],
)
def test_an_alpha_that_nothing_learns_by_may_be_zero(policy: nn.Module) -> None:
    """Warnings are errors here."""
    joint, batch = learner(quick(), policy=policy, alpha=0.0), data(2)
    for _ in range(120):
        joint.observe(*batch)


def test_a_state_that_is_refused_changes_nothing() -> None:
    """Not the policy either, which is loaded before the sampler refuses."""
    one, other = learner(), learner()
    before = copy.deepcopy(one.state_dict())
    foreign = copy.deepcopy(other.state_dict()) | {"alpha": torch.tensor(7.0)}
    foreign["sampler"]["probabilities"] = torch.full((16, 16), 1 / 256)
    assert not same(before["policy"], foreign["policy"])
    with pytest.raises(ValueError, match="this sampler has"):
        one.load_state_dict(foreign)
    assert same(before["policy"], one.policy.state_dict())
    assert torch.equal(before["alpha"], one.alpha)
    malformed = copy.deepcopy(other.state_dict()) | {"alpha": torch.zeros(3)}  # which comes last
    with pytest.raises(RuntimeError, match="shape"):
        one.load_state_dict(malformed)
    assert same(before["policy"], one.policy.state_dict())
    assert one.steps == before["steps"]
    with pytest.raises(
        KeyError, match=r"not the state of a learner \(found: network, learner\); give what its state_dict"
    ):
        one.load_state_dict({"network": {}, "learner": {}})


def test_a_compiled_pass_that_cannot_be_repeated_is_told_how_it_could_be() -> None:
    """Known by the name that torch.compile's wrapper has for what it wraps."""
    wrapper = nn.Sequential(OrderedDict(_orig_mod=OwnDraws()))
    joint = learner(nn.Sequential(wrapper))
    with pytest.raises(ValueError, match=r"gives different logits.* set torch\._inductor\.config\.fallback_random"):
        joint.step(*data(), *optimizers(joint), iter([data()]))


@pytest.mark.parametrize("route", ["difference", "forward", "unrolled"])
def test_a_compiled_part_of_the_network_has_its_share_of_the_alignment(route: str) -> None:
    """Compiled code knows neither tangents nor second derivatives, and drops them without a word."""
    torch.manual_seed(0)
    trunk, head = nn.Sequential(nn.Conv2d(3, 8, 16), nn.Tanh(), nn.Flatten()), nn.Linear(8, CLASSES)
    head.requires_grad_(False)
    compiled = nn.Sequential(torch.compile(trunk, backend="aot_eager"), head)
    found = []
    for network, by in ((nn.Sequential(trunk, head), "unrolled"), (compiled, route)):
        torch.manual_seed(1)
        joint = learner(network, policy=ma.PolicyNetwork(8), route=by)
        found.append(aligned(joint))
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2 * float(found[0].abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alpha_and_the_policy_learn_in_float32_beside_a_half_network(dtype: torch.dtype) -> None:
    """Small steps would be rounded away: the neighbours of 0.1 are 5e-4 from it in bfloat16, and 6e-5 in float16."""
    torch.manual_seed(0)
    joint = learner(small().to(dtype), prepare=lambda images: images.to(dtype) / 255)
    assert joint.alpha.dtype == torch.float32
    task, policy = torch.optim.SGD(joint.network.parameters(), 0.01), torch.optim.SGD(joint.policy_parameters(), 1e-6)
    before = joint.alpha.detach().clone(), state(joint.policy)
    joint.step(*data(), task, policy, iter([data()]))
    assert 0 < abs(joint.alpha - before[0]) < 3e-5
    assert any(not torch.equal(value, before[1][name]) for name, value in joint.policy.state_dict().items())


@pytest.mark.slow
def test_gradients_do_not_vanish_under_float16() -> None:
    """Each of many samples has a small part of a small loss: against the same in float32."""
    torch.manual_seed(0)
    joint, batch = learner(loss=lambda logits, labels: 1e-3 * ma.learner.cross_entropy(logits, labels)), data(512)
    exact = joint.validation_gradient(*batch)
    with torch.autocast("cpu", torch.float16):
        half = joint.validation_gradient(*batch)
    for one, other in zip(half, exact, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_the_way_out(mistake: str) -> None:
    act, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence):
        act()


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [(data(0), "the validation batch is empty"), ((data(2)[0], torch.tensor([0, 9])), "a validation label is 9")],
)
def test_a_wrong_validation_batch_is_named_and_changes_nothing(batch: tuple[Tensor, Tensor], sentence: str) -> None:
    joint = learner()
    seen = joint.observe(*data())
    before = state(joint.network)
    with pytest.raises(ValueError, match=sentence):
        joint.policy_backward(seen, *batch)
    assert same(before, joint.network.state_dict())
    assert all(p.grad is None for p in joint.policy_parameters())


@pytest.mark.parametrize("lagged", [False, True])
def test_reentrant_checkpoints_are_refused(lagged: bool) -> None:
    """Their layers had no part in Eq. 2, and with lagged=True were never trained, without a word."""

    class Saving(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = small(), reentrant

        def forward(self, images: Tensor) -> Tensor:
            features = checkpoint(self.inner.body, images.requires_grad_(), use_reentrant=self.reentrant)
            return self.inner.output(features.mean((2, 3)) if features.ndim == 4 else features)

    joint = learner(Saving(True), lagged=lagged)
    for _ in range(2):  # not only once
        with pytest.raises(ValueError, match=r"use_reentrant=True, so Eq\. 2 would miss"):
            updated(joint)
    later = learner(Saving(False), lagged=lagged, every=1)
    later.step(*data(), *optimizers(later), itertools.repeat(data()))
    later.network.reentrant = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="use_reentrant=True"):
        updated(later)
    eyes = learner(extractor=Saving(True), lagged=lagged)
    with pytest.raises(ValueError, match="use_reentrant=True"):
        updated(eyes)
    joint = learner(Saving(False), lagged=lagged)
    before = state(joint.network)
    joint.step(*data(), *optimizers(joint), itertools.repeat(data()))
    assert not any(torch.equal(before[name], value) for name, value in joint.network.named_parameters())


def test_outputs_below_zero_are_refused() -> None:
    """Weights of both signs brought the network to chance, and p below zero."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feature = nn.Linear(128, 1)

        def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
            return self.feature(features).squeeze(1) - 5

    with pytest.raises(ValueError, match=r"the policy gives -\S+ for a sample; outputs must be positive"):
        learner(policy=Linear()).observe(*data())

    class Softmax(Linear):
        def normalize(self, outputs: Tensor) -> Tensor:
            return outputs.softmax(0)

    assert (learner(policy=Softmax()).observe(*data()).weights > 0).all()


def test_optimizers_in_the_wrong_order_are_refused() -> None:
    joint = learner()
    task, policy = optimizers(joint)
    batches = itertools.repeat(data())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the task optimizer has the other one's parameters; give .* first"):
            joint.step(*data(), policy, task, batches)
    joint.every = 2
    joint.step(*data(), task)  # its policy comes later
    with pytest.raises(ValueError, match=r"the policy optimizer has the other one's parameters"):
        joint.step(*data(), task, task, batches)
    joint.step(*data(), task, policy, batches)


def test_optimizers_of_other_kinds_are_none_of_our_business() -> None:
    """Of weights that were replaced or frozen since, of master copies, and what only knows how to step."""
    joint = learner()
    network, batches = joint.network, itertools.repeat(data())
    network.load_state_dict({name: value.clone() for name, value in network.state_dict().items()}, assign=True)
    task, policy = optimizers(joint)
    joint.step(*data(), task, policy, batches)

    class Chained:
        def step(self) -> None:
            task.step()

        def zero_grad(self) -> None:
            task.zero_grad()

    copies = torch.optim.SGD([parameter.detach().clone() for parameter in network.parameters()], 0.1)
    for one in (Chained(), copies):
        joint = learner(network)
        joint.step(*data(), one, optimizers(joint)[1], batches)  # type: ignore[arg-type]
    joint = learner()
    task, policy = optimizers(joint)
    joint.policy.requires_grad_(False)
    joint.step(*data(), task, policy, batches)


# -- what the policy sees, and how it learns ---------------------------------------------------------------------------


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("name", ["clue-policy", "exponential-label-policy", "rejecting-clue-policy"])
def test_a_policy_that_sees_more_learns_by_the_same_equation(name: str, lagged: bool) -> None:
    """The gradient of the outer loss, by hand from what the observation holds."""
    joint = learner(policy=build(name, 128, num_classes=CLASSES), lagged=lagged, route="forward")
    seen = updated(joint)
    assert seen.alignment is not None
    torch.testing.assert_close(seen.evidence[0], clues(seen.logits, seen.labels))
    outputs = joint.policy(seen.features, ma.embed(seen.transformation), *seen.evidence)
    weights = getattr(joint.policy, "normalize", normalize)(outputs)
    by_hand = torch.autograd.grad(-joint.alpha * (weights * seen.alignment).sum(), joint.policy_parameters())
    for parameter, gradient in zip(joint.policy_parameters(), by_hand, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_regression_learns_the_alignment_and_alpha_by_eq_3() -> None:
    joint = learner(policy=build("regressing-exponential-policy-network", 128), route="forward")
    seen = updated(joint)
    s = seen.alignment
    assert s is not None
    assert joint.alpha.grad is not None
    torch.testing.assert_close(joint.alpha.grad, -(seen.weights.detach() * s).sum())
    z = joint.policy.policy(seen.features, ma.embed(seen.transformation)).log()
    error = (z - (s - s.mean()) / s.std(correction=0)).square().mean()
    by_hand = torch.autograd.grad(error, list(joint.policy.parameters()))
    for parameter, gradient in zip(joint.policy.parameters(), by_hand, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_validation_batch_in_parts_is_the_whole_one() -> None:
    """Exactly so in a network without batch statistics; each part has its own where there are some."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES)
    )
    gradients = []
    for part in (None, 3, 16, 100):
        torch.manual_seed(0)
        joint = learner(
            copy.deepcopy(network).double(), policy=ma.PolicyNetwork(128).double(), part=part, route="forward"
        )
        updated(joint)
        gradients.append([p.grad for p in joint.policy_parameters()])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


# -- what it is for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_learned_weights_are_sample_aware(seed: int) -> None:
    """Among moved samples alone they tell a destroyed label from an intact one, which no policy of the data set can."""
    import sample_aware

    found = sample_aware.learn(seed)
    assert found.sample_aware >= 0.9
    assert found.per_transformation < 0.6


def test_it_imports_with_the_core_packages_only() -> None:
    """As on a machine that has torch, numpy, Pillow and safetensors and little else."""
    script = """
import sys
from collections import OrderedDict
from collections.abc import Callable
for name in ("tyro", "rich", "sklearn", "matplotlib", "scipy"):
    sys.modules[name] = None
import metaaugment
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
