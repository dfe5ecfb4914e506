"""Three routes to one quantity, held against each other and against finite differences of the validation loss."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metaaugment as ma
from metaaugment.alignment import ROUTES, Pass, step_length
from metaaugment.networks.shake import ShakeShake

CLASSES = 5


class Convolutional(nn.Module):
    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), norm, nn.Dropout(dropout)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.drop(self.norm(self.conv(x)).tanh().mean((2, 3))))


class Shaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.shake, self.norm, self.output = ShakeShake(), nn.BatchNorm2d(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(self.shake(self.first(x), self.second(x))).tanh().mean((2, 3)))


class Transformer(nn.Module):
    """A small vision transformer: patches, one layer, the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        return self.output(self.layer(tokens)[:, 0])


class Tied(nn.Module):
    """One matrix used twice, a frozen layer, and a parameter that has no part in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.frozen, self.output = nn.Linear(48, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.again = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.twice.weight = self.again.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.enter(x[:, :, ::2, ::2].flatten(1))).tanh()
        return self.output(self.twice(self.again(x).tanh()).tanh())


class Recurrent(nn.Module):
    """One layer at two places, as when a network shares its blocks."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(8, 8)
        self.enter, self.blocks, self.output = nn.Linear(192, 8), nn.ModuleList([block, block]), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = block(x.tanh())
        return self.output(x)


class Spectral(nn.Module):
    """Its first parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 8, 5, dtype=torch.complex128))
        self.enter, self.output = nn.Linear(192, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.irfft2(torch.fft.rfft2(x) * self.filter, s=x.shape[-2:])
        return self.output(self.enter(filtered.flatten(1)).tanh())


def under(hook: Callable[[Tensor], Tensor | None], network: nn.Module | None = None) -> nn.Module:
    """With a hook on each parameter, which decides what the inner update makes of the gradient."""
    network = network or Convolutional(nn.GroupNorm(2, 8))
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_hook(hook)
    return network


def clip_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-0.01, 0.01)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "masked": lambda: under(lambda g: g * (torch.arange(g.numel()).view_as(g) % 2)),
    "clipped": lambda: under(lambda g: g.clamp(-0.01, 0.01)),
    "clipped in place": lambda: under(clip_in_place),
    "unused under a hook": lambda: under(lambda g: g / g.norm(), Tied()),
    "clipped by norm": lambda: under(lambda g: g * (0.01 / g.norm()).clamp(max=1)),
    "batch norm": lambda: Convolutional(nn.BatchNorm2d(8)),
    "group norm": lambda: Convolutional(nn.GroupNorm(2, 8)),
    "dropout": lambda: Convolutional(nn.BatchNorm2d(8), 0.3),
    "transformer": Transformer,
    "tied, frozen, unused": Tied,
    "shared": Recurrent,
    "complex": Spectral,
    "complex under a hook": lambda: under(lambda g: g.conj(), Spectral()),
    "shake": Shaking,
}


def data(n: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8), torch.randint(0, CLASSES, (n,))


def gradients(network: nn.Module, policy: nn.Module, route: str, **settings: int) -> tuple[ma.Learner, ma.Observation]:
    """One policy_backward with draws that are the same each time."""
    torch.manual_seed(5)
    images, labels = data()
    validation = data(12)
    learner = ma.Learner(network, ma.TransformationSampler(), policy, route=route, **settings)  # type: ignore[arg-type]
    seen = learner.observe(images, labels)
    learner.policy_backward(seen, *validation)
    return learner, seen


def flat(learner: ma.Learner) -> Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy_parameters() if p.grad is not None])


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


ROUTED = [(name, "forward", copies, 1e-12) for name in NETWORKS for copies in (1, 3)]
ROUTED += [(name, "difference", 1, 1e-6) for name in NETWORKS if name != "shake"]


@pytest.mark.parametrize(("name", "route", "copies", "tolerance"), ROUTED)
def test_routes_equal_the_unrolled_one(name: str, route: str, copies: int, tolerance: float) -> None:
    """And keep the network's very parameters, which its optimizer moves."""
    network, policy = NETWORKS[name]().double(), ma.PolicyNetwork(8).double()
    found = []
    for by in ("unrolled", route):
        one = copy.deepcopy(network)
        before = list(one.parameters())
        found.append(flat(gradients(one, copy.deepcopy(policy), by, copies=copies)[0]))
        assert all(kept is other for kept, other in zip(before, one.parameters(), strict=True))
    assert relative(found[1], found[0]) < tolerance


@pytest.mark.parametrize(("copies", "lagged"), [(1, False), (2, True)])
@pytest.mark.parametrize("route", ["forward", "unrolled"])
@pytest.mark.parametrize(
    "name",
    [
        "batch norm", "group norm", "tied, frozen, unused", "masked", "clipped", "clipped in place", "clipped by norm",
        "unused under a hook",
    ],
)  # fmt: skip
def test_equals_central_differences_of_the_validation_loss(name: str, route: str, copies: int, lagged: bool) -> None:
    """L_val(w − α Σ V_i(θ) ∇L_i(w)) by hand, moved in some entries of θ and in α."""
    network, policy = NETWORKS[name]().double(), ma.PolicyNetwork(8, hidden=4).double()
    learner, seen = gradients(network, policy, route, copies=copies, lagged=lagged)
    torch.manual_seed(5)
    data()
    val_images, val_labels = data(12)

    def validation_loss() -> float:
        with torch.no_grad():
            outputs = policy(seen.features, ma.embed(seen.transformation).double())
            weights = outputs / outputs.sum()
        losses = nn.functional.cross_entropy(network(seen.inputs), seen.labels, reduction="none")
        w = learner.w
        g = torch.autograd.grad((weights * losses).sum(), list(w.values()), allow_unused=True)
        moved = {n: p if d is None else p - learner.alpha.detach() * d for (n, p), d in zip(w.items(), g, strict=True)}
        logits = functional_call(network, moved, (val_images.double() / 255,))
        return nn.functional.cross_entropy(logits, val_labels).item()

    step = 1e-5
    for parameter in learner.policy_parameters():
        assert parameter.grad is not None
        entries = parameter.data.view(-1)
        for index in {0, len(entries) // 2, len(entries) - 1}:
            kept = entries[index].item()
            sides = []
            for move in (step, -step):
                entries[index] = kept + move
                sides.append(validation_loss())
            entries[index] = kept
            expected = (sides[0] - sides[1]) / (2 * step)
            assert parameter.grad.view(-1)[index].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_an_extractor_of_the_policys_own_gets_the_gradient_too() -> None:
    network, eyes = Convolutional(nn.BatchNorm2d(8)).double(), Convolutional(nn.GroupNorm(2, 8)).double()
    policy = ma.PolicyNetwork(8).double()
    images, labels = data()
    learner = ma.Learner(network, ma.UniformSampler(), policy, extractor=eyes, route="forward")
    seen = learner.observe(images, labels)
    learner.policy_backward(seen, *data(12))
    assert any(p is eyes.conv.weight for p in learner.policy_parameters())
    assert eyes.conv.weight.grad is not None
    assert seen.alignment is not None
    # By hand: d/d(eyes) of −α Σ V s, with the features computed anew.
    features = (eyes.norm(eyes.conv(seen.inputs)).tanh()).mean((2, 3))
    outputs = policy(features, ma.embed(seen.transformation).double())
    loss = -learner.alpha.detach() * (outputs / outputs.sum() * seen.alignment).sum()
    (expected,) = torch.autograd.grad(loss, eyes.conv.weight)
    torch.testing.assert_close(eyes.conv.weight.grad, expected, rtol=1e-9, atol=1e-15)


def trained(network: nn.Module, policy: nn.Module, steps: int = 60) -> None:
    learner = ma.Learner(network, ma.TransformationSampler(), policy, lagged=True, every=4)
    task = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    outer = torch.optim.SGD(learner.policy_parameters(), 0.01, momentum=0.9)
    images, labels = striped(512)
    for step in range(steps):
        part = slice(32 * (step % 16), 32 * (step % 16 + 1))
        learner.step(images[part], labels[part], task, outer, iter([striped(32)]))


def striped(n: int) -> tuple[Tensor, Tensor]:
    """Something that can be learned: as many bright rows as the label says, under noise."""
    labels = torch.randint(0, CLASSES, (n,))
    rows = torch.arange(16)[None, :] < 3 * labels[:, None] + 1
    images = 60 + 80 * rows[:, None, :, None] + 30 * torch.randn(n, 3, 16, 16)
    return images.clamp(0, 255).to(torch.uint8), labels


@pytest.mark.parametrize("after_training", [False, True])
@pytest.mark.parametrize(("half", "least"), [(False, 0.999), (True, 0.99)], ids=["float32", "bf16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_difference_points_where_forward_mode_in_float64_does(
    seed: int, half: bool, least: float, after_training: bool
) -> None:
    """The rule of the step length, at initialization and after training."""
    torch.manual_seed(seed)
    network, policy = ma.network("small-cnn", CLASSES), ma.PolicyNetwork(128)
    if after_training:
        trained(network, policy)
    kept: list[tuple[Pass, Sequence[Tensor]]] = []

    def passes(network: nn.Module, policy: nn.Module, half: bool) -> tuple[Pass, Sequence[Tensor]]:
        learner = ma.Learner(network, ma.UniformSampler(), policy, generator=torch.Generator().manual_seed(1))
        learner.route = lambda training, v: kept.append((training, v)) or training.logits.sum(1)
        torch.manual_seed(seed + 10)
        images, labels = striped(64)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            seen = learner.observe(images, labels)
        learner.policy_backward(seen, *striped(64))
        return kept.pop()

    training, v = passes(network, policy, half)
    exact, _ = passes(copy.deepcopy(network).double(), copy.deepcopy(policy).double(), False)
    expected = ROUTES["forward"](exact, [value.double() for value in v])
    ours = ROUTES["difference"](training, v)
    assert torch.corrcoef(torch.stack([ours.double(), expected]))[0, 1] >= least


def test_step_length_follows_precision_and_not_the_scale_of_v() -> None:
    network = Convolutional(nn.BatchNorm2d(8))
    parameters = list(network.parameters())
    v = [torch.randn_like(p) for p in parameters]

    def move(scale: float, precision: float) -> float:
        training = Pass(network, parameters, torch.zeros(1, 1), Tensor, lambda z: z, precision)
        return scale * step_length(training, [scale * value for value in v]).item()

    assert move(1.0, 2**-7) == pytest.approx(move(1000.0, 2**-7), rel=1e-5)
    assert move(1.0, 2**-7) / move(1.0, 2**-10) == pytest.approx(4)


def test_a_validation_gradient_of_zero_gives_alignments_of_zero() -> None:
    network = Convolutional(nn.BatchNorm2d(8))
    parameters, logits = list(network.parameters()), torch.randn(4, CLASSES)
    training = Pass(network, parameters, logits, lambda: torch.randn(4, CLASSES), lambda z: z.logsumexp(1), 1e-7)
    zero = [torch.zeros_like(p) for p in network.parameters()]
    assert ROUTES["difference"](training, zero).abs().max() < 1e-20


def test_validation_takes_shake_layers_at_their_expectation() -> None:
    network = Shaking().double()
    seen_flags = []
    network.shake.register_forward_pre_hook(lambda module, _: seen_flags.append(module.at_expectation))
    gradients(network, ma.PolicyNetwork(8).double(), "forward")
    # Training, validation, a look at whether the training pass can be repeated (the first time only), alignment.
    assert seen_flags == [False, True, False, False]
    assert network.shake.at_expectation is False


def test_a_sample_aligned_with_validation_gains_weight_and_one_against_it_loses() -> None:
    """The paper's reading of Eq. 3: two samples alike but for their labels, one of which validation shares."""
    image = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    network, policy = Tied(), ma.PolicyNetwork(8)
    learner = ma.Learner(network, ma.IdentitySampler(), policy, route="forward")
    seen = learner.observe(image.expand(2, -1, -1, -1), torch.tensor([1, 3]))
    learner.policy_backward(seen, image, torch.tensor([1]))
    assert seen.alignment is not None
    assert seen.alignment[0] > 0 > seen.alignment[1]
    # dL_val / dP_i, through V = P / ΣP: descending it raises the first output and lowers the second.
    outputs = seen.outputs.detach().clone().requires_grad_()
    loss = -learner.alpha.detach() * (outputs / outputs.sum() * seen.alignment).sum()
    (slope,) = torch.autograd.grad(loss, outputs)
    assert slope[0] < 0 < slope[1]


def flat_alignment(network: nn.Module, route: str) -> Tensor:
    alignment = gradients(network, ma.PolicyNetwork(8), route)[1].alignment
    assert alignment is not None
    return alignment


@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_a_tensor_that_is_zero_or_tiny_does_not_shorten_the_move(size: float) -> None:
    """A fresh head, a class token, a layer scale."""
    network = Convolutional(nn.LayerNorm([8, 8, 8]))
    with torch.no_grad():
        network.output.weight.fill_(size)
    ours, exact = (flat_alignment(copy.deepcopy(network), route) for route in ("difference", "unrolled"))
    assert relative(ours, exact) < 0.01


def test_a_buffer_that_a_pass_reads_and_writes_is_as_it_was_when_the_pass_is_repeated() -> None:
    """Spectral normalisation goes one power iteration further with each pass."""
    network = Tied()
    network.enter = nn.utils.parametrizations.spectral_norm(network.enter)
    before = {name: value.clone() for name, value in network.named_buffers()}
    ours, exact = (flat_alignment(copy.deepcopy(network), route) for route in ("difference", "unrolled"))
    assert relative(ours, exact) < 0.02
    assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())


def test_instance_norm_keeps_its_statistics() -> None:
    network = Convolutional(nn.InstanceNorm2d(8, track_running_stats=True))
    joint = ma.Learner(network, ma.IdentitySampler(), ma.PolicyNetwork(8))
    seen = joint.observe(*data())
    before = {name: value.clone() for name, value in network.named_buffers()}
    joint.policy_backward(seen, *data(12))
    assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())


class Hard(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return self.output(nn.functional.hardsigmoid(self.enter(x[:, :, ::2, ::2].flatten(1))))


class Attention(Tied):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.enter(x[:, :, ::2, ::2].flatten(1)).view(-1, 1, 1, 8)
        return self.output(nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1))


@pytest.mark.parametrize(
    ("kind", "route", "sentence"),
    [
        (Hard, "unrolled", r"no second derivative, .*; use route='difference'"),
        (Attention, "forward", "use route='difference'"),
        (Shaking, "difference", r"layer 'shake' \(ShakeShake\) .* use route='forward'"),
    ],
)
def test_a_layer_that_a_route_does_not_support_is_named_with_the_way_out(
    kind: type[nn.Module], route: str, sentence: str
) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=sentence):
        flat_alignment(kind(), route)
    other = "forward" if route == "difference" else "difference"
    assert flat_alignment(kind(), other).isfinite().all()
