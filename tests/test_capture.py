"""A captured step is the eager step: same numbers from the same draws."""

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import metaaugment as ma
from metaaugment.capture import WARM_UP, CapturedStep, step_of
from metaaugment.policy import POLICIES, build
from metaaugment.sampler import SingleSampler

PREDICTING = "regressing-exponential-clue-policy"


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        images = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8, generator=generator)
        yield images.cuda(), torch.randint(0, 10, (32,), generator=generator).cuda()


def fused_sgd(parameters: object, rate: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, rate, momentum=0.9, fused=True)  # type: ignore[arg-type]


class Joint:
    """A learner with its optimizers and generator."""

    def __init__(self, network: nn.Module, policy: nn.Module, singles: bool = False, **settings: object) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        sampler = SingleSampler() if singles else ma.TransformationSampler()
        self.learner = ma.Learner(network, sampler, policy, generator=generator, **settings)  # type: ignore[arg-type]
        self.task = fused_sgd(network.parameters(), 0.05)
        self.policy: torch.optim.Optimizer = fused_sgd(self.learner.policy_parameters(), 0.01)


def assert_captured_equals_eager(eager: Joint, graph: Joint, steps: int) -> None:
    captured = CapturedStep(graph.learner, graph.task, graph.policy)
    train, validation = batches(1), batches(2)
    train_again, validation_again = batches(1), batches(2)
    for step in range(steps):
        for joint in (eager, graph):
            joint.task.param_groups[0]["lr"] = 0.05 / (1 + step)
            joint.policy.param_groups[0]["lr"] = 0.01 / (1 + step)
        one = eager.learner.step(*next(train), eager.task, eager.policy, validation)
        other = captured(*next(train_again), validation_again)
        assert torch.equal(one.images, other.images)
        torch.testing.assert_close(other.losses, one.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-4, atol=1e-6)
        if step % 2:
            eager.learner.sampler.update()
            graph.learner.sampler.update()
    assert eager.learner.steps == graph.learner.steps == steps
    torch.testing.assert_close(graph.learner.alpha, eager.learner.alpha, rtol=1e-4, atol=1e-6)
    for one, other in zip(eager.learner.w.values(), graph.learner.w.values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("lagged", [True, False])
@pytest.mark.parametrize("every", [1, 2])
def test_captured_equals_eager(every: int, lagged: bool) -> None:
    """In float64, where rounding differs too little to be seen."""
    network, policy = ma.network("small-cnn", 10).cuda().double(), ma.PolicyNetwork(128).cuda().double()
    eager = Joint(copy.deepcopy(network), copy.deepcopy(policy), every=every, lagged=lagged)
    graph = Joint(network, policy, every=every, lagged=lagged)
    assert_captured_equals_eager(eager, graph, every * (WARM_UP + 3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "adam"), [(name, False) for name in POLICIES] + [("policy-network", True), (PREDICTING, True)]
)
def test_so_it_is_for_every_policy(name: str, adam: bool) -> None:
    """Each with single functions, in the wide space, and with validation images in parts of unequal size."""
    network, policy = ma.network("small-cnn", 10).cuda().double(), build(name, 128, num_classes=10).cuda().double()
    settings = {"singles": True, "space": "trivialaugment-wide", "lagged": True, "part": 12}
    eager, graph = Joint(copy.deepcopy(network), copy.deepcopy(policy), **settings), Joint(network, policy, **settings)
    if adam:
        for joint in (eager, graph):
            joint.policy = torch.optim.Adam(joint.learner.policy_parameters(), 0.01, fused=True, capturable=True)
    assert_captured_equals_eager(eager, graph, WARM_UP + 3)


@pytest.mark.gpu
def test_dropout_is_replayed_inside_a_graph() -> None:
    """With other draws the two passes of the difference would be far apart, and their difference divided by h."""
    network = nn.Sequential(ma.network("small-cnn", 64), nn.Dropout(0.5), nn.Linear(64, 10)).cuda()
    joint = Joint(network, ma.PolicyNetwork(64).cuda())
    captured = CapturedStep(joint.learner, joint.task, joint.policy)
    train, validation = batches(1), batches(2)
    sizes, losses = [], []
    for _ in range(WARM_UP + 6):
        seen = captured(*next(train), validation)
        assert seen.alignment is not None
        sizes.append(seen.alignment.abs().mean().item())
        losses.append(seen.losses.clone())
    assert max(sizes[WARM_UP:]) < 5 * max(sizes[:WARM_UP])
    assert not torch.equal(losses[-1], losses[-2])


@pytest.mark.gpu
def test_dropout_of_the_policy_is_replayed_inside_a_graph() -> None:
    """A policy that does not move gives Eq. 4 the weights first seen: the step's gradient is theirs."""

    class Dropping(ma.PolicyNetwork):
        def forward(self, features: torch.Tensor, embedding: torch.Tensor, *evidence: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.dropout(features), embedding)

    class Noting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            gradient = torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]])
            noted.copy_(gradient)

    network, policy = ma.network("small-cnn", 10).cuda().double(), Dropping(128).cuda().double()
    joint = Joint(network, policy)
    noted = torch.zeros(sum(p.numel() for p in network.parameters()), device="cuda", dtype=torch.double)
    task = Noting(network.parameters(), 0.0, fused=True)
    captured = CapturedStep(joint.learner, task, torch.optim.SGD(joint.learner.policy_parameters(), 0.0, fused=True))
    train, validation, outputs = batches(1), batches(2), []
    for _ in range(WARM_UP + 4):
        seen = captured(*next(train), validation)
        w = {name: p.detach().requires_grad_() for name, p in network.named_parameters()}  # free of the graph's stream
        logits = torch.func.functional_call(network, w, (seen.inputs,))
        losses = nn.functional.cross_entropy(logits, seen.labels, reduction="none")
        gradient = torch.autograd.grad((seen.weights.detach() * losses).sum(), list(w.values()))
        torch.testing.assert_close(noted, torch.cat([g.flatten() for g in gradient]), rtol=1e-6, atol=1e-9)
        outputs.append(seen.outputs.detach().clone())
    assert not torch.equal(outputs[-1], outputs[-2])


@pytest.mark.gpu
def test_a_batch_of_another_kind_is_refused() -> None:
    """Copied into the graph's own batch, images in [0, 1] would become black ones."""
    joint = Joint(ma.network("small-cnn", 10).cuda(), ma.PolicyNetwork(128).cuda())
    captured = CapturedStep(joint.learner, joint.task, joint.policy)
    train, validation = batches(1), batches(2)
    for _ in range(WARM_UP + 1):
        captured(*next(train), validation)
    images, labels = next(train)
    for others, sentence in ((images / 255, "float32"), (images[:8], r"uint8 \[8, 3, 32, 32\]")):
        with pytest.raises(ValueError, match=f"a batch is {sentence}.*was made for uint8"):
            captured(others, labels[: len(others)], validation)


@pytest.mark.gpu
def test_another_thread_may_pin_memory_meanwhile() -> None:
    """As a DataLoader's does; none is given back, so that the allocator has to ask the device each time."""
    joint = Joint(ma.network("wrn-40-2", 10).cuda(), ma.PolicyNetwork(128).cuda())
    captured = CapturedStep(joint.learner, joint.task, joint.policy)
    train, validation = batches(1), batches(2)
    over, pinned = threading.Event(), []

    def pin() -> None:
        while not over.wait(0.001):
            pinned.append(torch.empty(2**16, dtype=torch.uint8, pin_memory=True))

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(WARM_UP + 2):
            captured(*next(train), validation)
    finally:
        over.set()
        thread.join()
    assert pinned
    assert joint.learner.steps == WARM_UP + 2


@pytest.mark.gpu
def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    network = ma.network("small-cnn", 10).cuda()
    scale = torch.ones((), device="cuda")

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none") * scale

    joint = Joint(network, ma.PolicyNetwork(128).cuda(), loss=loss)
    captured = CapturedStep(joint.learner, joint.task, joint.policy)
    train, validation = batches(1), batches(2)
    for _ in range(WARM_UP + 2):
        captured(*next(train), validation)
    with torch.no_grad():
        joint.learner.alpha.fill_(0.1)  # above 0, where the next step leaves it as it is
    before = [p.detach().clone() for p in (*network.parameters(), *joint.learner.policy_parameters())]
    scale.fill_(float("inf"))
    captured(*next(train), validation)
    after = [p.detach().clone() for p in (*network.parameters(), *joint.learner.policy_parameters())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert joint.learner.skipped == 2
    scale.fill_(1.0)
    captured(*next(train), validation)
    assert not torch.equal(before[0], next(network.parameters()))
    assert all(p.isfinite().all() for p in network.parameters())


@pytest.mark.gpu
def test_what_cannot_be_captured_is_named() -> None:
    network, policy = ma.network("small-cnn", 10).cuda(), ma.PolicyNetwork(128).cuda()
    learner = ma.Learner(network, ma.TransformationSampler(), policy)
    with pytest.raises(ValueError, match="fused=True"):
        CapturedStep(learner, torch.optim.SGD(network.parameters(), 0.1))
    on_cpu = ma.Learner(network, ma.TransformationSampler(), policy, generator=torch.Generator())
    with pytest.raises(ValueError, match="draws on the CPU"):
        CapturedStep(on_cpu, fused_sgd(network.parameters(), 0.1))


def test_a_step_that_is_not_captured_is_the_learners_own() -> None:
    """With both optimizers: the same numbers from the same draws, on any device."""
    generator, networks = torch.Generator().manual_seed(0), []
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=generator)
    batch = images, torch.randint(0, 10, (8,), generator=generator)
    for by_hand in (True, False):
        torch.manual_seed(0)
        network, policy = ma.network("small-cnn", 10), ma.PolicyNetwork(128)
        draws = torch.Generator().manual_seed(3)
        learner = ma.Learner(network, ma.TransformationSampler(), policy, generator=draws)
        task = torch.optim.SGD(network.parameters(), 0.1)
        optimizer = torch.optim.SGD(learner.policy_parameters(), 0.1)
        if by_hand:
            learner.step(*batch, task, optimizer, iter([batch]))
        else:
            step_of(learner, task, optimizer, captured=False)(*batch, iter([batch]))
        networks.append([*network.parameters(), *policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*networks, strict=True))
    with pytest.raises(ValueError, match="the network is on cpu"):
        step_of(learner, task, captured=True)
