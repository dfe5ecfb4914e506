"""Task networks against their publications."""

import copy
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.capture import WARM_UP, CapturedStep
from metaaugment.networks import NETWORKS, PyramidNet, ResNet, ShakeShakeNet, WideResNet
from metaaugment.networks.pyramidnet import shortcut
from metaaugment.networks.resnet import PreActivation
from metaaugment.networks.shake import ShakeDrop, ShakeShake, shaken
from metaaugment.networks.shake_shake import Block, Skip

CLASSES = 5
# Each architecture at the size of a test, and the route to the alignment that it allows.
REDUCED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wide": (lambda: WideResNet(10, 1, CLASSES), "difference"),
    "shake-shake": (lambda: ShakeShakeNet(8, 8, CLASSES), "forward"),
    "pyramid": (lambda: PyramidNet(11, 12, CLASSES), "forward"),
    "residual": (lambda: ResNet((2, 1, 1, 1), CLASSES, width=8), "difference"),
    "pre-activation": (lambda: ResNet((2, 1, 1, 1), CLASSES, width=8, pre_activation=True), "difference"),
}
SHAKING = [name for name, (_, route) in REDUCED.items() if route == "forward"]


@cache
def outline(name: str) -> nn.Module:
    """A network without numbers, which takes no time to make."""
    with torch.device("meta"):
        return ma.network(name, 1000 if name.startswith("resnet") else 10)


def size(network: nn.Module, normalization: bool = True) -> int:
    skipped = () if normalization else nn.BatchNorm2d
    return sum(p.numel() for m in network.modules() if not isinstance(m, skipped) for p in m.parameters(recurse=False))


def width(network: nn.Module) -> int:
    """Of the features: what enters the last layer."""
    return [m for m in network.modules() if isinstance(m, nn.Linear)][-1].in_features


def data(n: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), torch.randint(0, CLASSES, (n,))


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("wrn-40-2", 2.2),  # Zagoruyko and Komodakis, Tables 4 and 5
        ("wrn-28-10", 36.5),
        ("shake-shake-26-2x96d", 26.2),  # Gastaldi
        ("resnet-50", 25.6),  # torchvision's documentation, 25557032
        ("resnet-200", 64.7),  # as commonly given; a publication that leaves normalisation out is held against below
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, millions: float) -> None:
    assert round(size(outline(name)) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("depth", "alpha", "millions", "features"),
    [(164, 270, 27.0, 1144), (200, 240, 26.6, 1024), (236, 220, 26.8, 944), (272, 200, 26.0, 864)],
)
def test_pyramidal_networks_have_the_published_sizes(depth: int, alpha: int, millions: float, features: int) -> None:
    """Han et al., the large networks of the bottleneck architecture.

    Their counts leave batch normalisation out, 0.2 million; one is cut off rather than rounded (27.050).
    """
    with torch.device("meta"):
        network = PyramidNet(depth, alpha, 10)
    assert size(network, normalization=False) / 1e6 == pytest.approx(millions, abs=0.051)
    assert width(network) == features
    assert round(size(outline("resnet-200"), normalization=False) / 1e6, 1) == 64.5  # as they count it, too


@pytest.mark.parametrize("k", [96, 112])
def test_shake_shake_parameters_by_hand(k: int) -> None:
    """No publication was found that gives 2x112d a count: 35640442, by the sum that gives 2x96d its 26.2 million."""
    branches = 2 * 9 * sum(inputs * w + 7 * w * w for inputs, w in ((16, k), (k, 2 * k), (2 * k, 4 * k)))
    skips = 16 * k + k * 2 * k + 2 * k * 4 * k
    normalization = 2 * (16 + (1 + 2 + 4) * k * (4 * 2 * 2 + 1))  # blocks × branches × convolutions, and a skip
    stem_and_output = 3 * 9 * 16 + 4 * k * 10 + 10
    assert size(outline(f"shake-shake-26-2x{k}d")) == branches + skips + normalization + stem_and_output


@pytest.mark.parametrize(
    ("name", "not_counted", "depth"),
    [
        ("wrn-40-2", "output", 40),  # "the total number of convolutional layers", those of shortcuts included
        ("wrn-28-10", "output", 28),
        ("shake-shake-26-2x96d", "second|skip", 26),
        ("shake-shake-26-2x112d", "second|skip", 26),
        ("pyramidnet-272-a200", "nothing", 272),
        ("resnet-50", "downsample", 50),
        ("resnet-200", "downsample", 200),
    ],
)
def test_depth_counts_layers(name: str, not_counted: str, depth: int) -> None:
    """Convolutions and the output layer along one path, but for wide residual networks."""
    layers = [n for n, m in outline(name).named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([layer for layer in layers if not re.search(not_counted, layer)]) == depth


@pytest.mark.parametrize("name", NETWORKS)
def test_from_images_to_logits(name: str) -> None:
    pixels, classes = (224, 1000) if name.startswith("resnet") else (32, 10)
    assert outline(name)(torch.rand(2, 3, pixels, pixels, device="meta")).shape == (2, classes)
    with torch.device("meta"):
        grey = ma.network(name, 7, channels=1)
    assert grey(torch.rand(2, 1, pixels, pixels, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("pixels", [28, 30, 33])
@pytest.mark.parametrize("name", REDUCED)
def test_images_of_other_sizes(name: str, pixels: int) -> None:
    assert REDUCED[name][0]().eval()(torch.rand(2, 3, pixels, pixels)).shape == (2, CLASSES)


# -- all architectures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCED)
def test_a_joint_step_moves_every_parameter(name: str) -> None:
    make, route = REDUCED[name]
    network = make()
    learner = ma.Learner(network, ma.TransformationSampler(), ma.PolicyNetwork(width(network)), route=route)
    task = torch.optim.SGD(network.parameters(), 0.1)
    policy = torch.optim.SGD(learner.policy_parameters(), 0.1)
    before = [p.detach().clone() for p in (*network.parameters(), *learner.policy_parameters())]
    seen = learner.step(*data(), task, policy, iter([data()]))
    after = [*network.parameters(), *learner.policy_parameters()]
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, old in zip(after, before, strict=True))
    assert seen.alignment is not None
    assert seen.alignment.isfinite().all()
    assert learner.skipped == 0


@pytest.mark.parametrize("name", SHAKING)
def test_shaken_passes_are_made_again_exactly(name: str) -> None:
    """Two routes, each with a pass of its own, agree only if that pass draws what the training pass drew."""
    network = REDUCED[name][0]().double()
    policy = ma.PolicyNetwork(width(network)).double()
    images, labels = data()
    alignments = []
    for route in ("forward", "unrolled"):
        torch.manual_seed(1)
        learner = ma.Learner(copy.deepcopy(network), ma.UniformSampler(), policy, route=route)
        seen = learner.observe(images, labels)
        learner.policy_backward(seen, images, labels)
        alignments.append(seen.alignment)
    torch.testing.assert_close(*alignments, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", REDUCED)
def test_channels_last_is_kept_and_changes_nothing(name: str) -> None:
    network = REDUCED[name][0]().eval()
    images = torch.rand(2, 3, 32, 32)
    expected = network(images)
    network = network.to(memory_format=torch.channels_last)
    kept = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda _, inputs: kept.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
            )
    torch.testing.assert_close(network(images.contiguous(memory_format=torch.channels_last)), expected)
    assert all(kept)


@pytest.mark.parametrize("name", REDUCED)
def test_initialization(name: str) -> None:
    network = REDUCED[name][0]()
    for module in network.modules():
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all()
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 1000:
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


# -- shaking ---------------------------------------------------------------------------------------------------------


def test_shaken_has_one_coefficient_forward_and_another_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    out = shaken(x, torch.tensor(0.3), torch.tensor(0.9))
    torch.testing.assert_close(out, 0.3 * x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 0.9))


def coefficients(layer: nn.Module, *shape: int) -> tuple[Tensor, Tensor]:
    """What a layer multiplies by, forward and backward."""
    x = torch.ones(shape, requires_grad=True)
    out = layer(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    return out.detach(), gradient


def test_shake_shake_in_training_and_at_its_expectation() -> None:
    layer = ShakeShake()
    first, second = torch.zeros(1000, 1, 1, 1), torch.ones(1000, 1, 1, 1)
    mixed = layer(first, second)
    assert mixed.min() < 0.05
    assert mixed.max() > 0.95
    assert (ShakeShake().eval()(first, second) == 0.5).all()
    layer.at_expectation = True
    assert (layer(first, second) == 0.5).all()


def test_shake_drop_that_never_keeps_shakes_each_sample() -> None:
    """One that always keeps is the identity."""
    assert all((coefficient == 1).all() for coefficient in coefficients(ShakeDrop(1.0), 4, 2, 3, 3))
    forward, backward = coefficients(ShakeDrop(0.0), 2000, 2, 3, 3)
    for coefficient, low, high in ((forward, -1, 1), (backward, 0, 1)):
        assert (coefficient == coefficient[:, :1, :1, :1]).all()
        assert low <= coefficient.min() < low + 0.01
        assert high - 0.01 < coefficient.max() <= high
        assert coefficient.mean().item() == pytest.approx((low + high) / 2, abs=0.05)
    pairs = torch.stack((forward[:, 0, 0, 0], backward[:, 0, 0, 0]))
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.1


def test_shake_drop_keeps_whole_mini_batches_forward_and_backward() -> None:
    layer, kept = ShakeDrop(0.7), []
    for _ in range(500):
        forward, backward = coefficients(layer, 3, 1, 1, 1)
        kept.append(bool((forward == 1).all()))
        assert ((forward == 1) == kept[-1]).all()
        assert ((backward == 1) == kept[-1]).all()
    assert sum(kept) / 500 == pytest.approx(0.7, abs=0.06)


def test_shake_drop_at_its_expectation() -> None:
    """As in evaluation; the coefficient is also the derivative, unlike the expectation of β."""
    layer = ShakeDrop(0.75)
    layer.at_expectation = True
    for still in (layer, ShakeDrop(0.75).eval()):
        for coefficient in coefficients(still, 4, 2, 3, 3):
            assert (coefficient == 0.75).all()
    layer.at_expectation = False
    mean = torch.stack([coefficients(layer, 4, 1, 1, 1)[0].mean() for _ in range(2000)]).mean()
    assert mean.item() == pytest.approx(0.75, abs=0.03)


def test_shake_drop_keeps_less_with_depth() -> None:
    """The linear decay rule, p_l = 1 − l / (2 L)."""
    layers = [m.p for m in outline("pyramidnet-272-a200").modules() if isinstance(m, ShakeDrop)]
    assert layers == pytest.approx([1 - place / 180 for place in range(1, 91)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAKING)
def test_in_a_captured_step_replays_draw_anew_and_passes_draw_alike(name: str) -> None:
    """The same images and parameters each time (α is 0, so ŵ is w): only draws can differ, and validation has none."""
    network = REDUCED[name][0]().cuda().double()
    passes: list[Tensor] = []  # training, validation, alignment
    network.register_forward_hook(lambda module, inputs, logits: passes.append(logits.detach()))
    policy = ma.PolicyNetwork(width(network)).cuda().double()
    learner = ma.Learner(network, ma.IdentitySampler(), policy, route="forward", alpha=0.0)
    task = torch.optim.SGD(network.parameters(), 0.0, fused=True)
    step = CapturedStep(learner, task, torch.optim.SGD(learner.policy_parameters(), 0.0, fused=True))
    batch = tuple(part.cuda() for part in data())
    step(*batch, iter([batch]))
    passes.clear()  # the first step also checks that a pass can be repeated
    logits: list[list[Tensor]] = []
    for _ in range(WARM_UP + 5):
        step(*batch, iter([batch]))
        logits.append([values.clone() for values in passes[-3:]])
    assert len(passes) == 3 * WARM_UP
    for training, validation, alignment in logits:
        torch.testing.assert_close(alignment, training)
        torch.testing.assert_close(validation, logits[0][1])
    replays = [training for training, _, _ in logits[WARM_UP - 1 :]]
    assert not all(torch.allclose(training, replays[0]) for training in replays)


# -- Shake-Shake -----------------------------------------------------------------------------------------------------


def test_shake_shake_skip_path_by_hand() -> None:
    """The second half sees the pixels up and to the left of those that the first sees, and zeros beyond the edge."""
    skip = Skip(1, 2, stride=2)
    skip.norm = nn.Identity()
    nn.init.ones_(skip.conv1.weight)
    nn.init.ones_(skip.conv2.weight)
    image = torch.arange(1.0, 17.0).view(1, 1, 4, 4)
    expected = torch.tensor([[[1, 3], [9, 11]], [[0, 0], [0, 6]]])
    assert torch.equal(skip(image)[0], expected.float())


def test_shake_shake_block_by_hand() -> None:
    """Two branches of their own, half and half in evaluation, beside a skip that goes past the activation."""
    block = Block(4, 4, 1).eval()
    x = torch.randn(2, 4, 6, 6)
    active = x.clamp(min=0)
    torch.testing.assert_close(block(x), x + (block.first(active) + block.second(active)) / 2)
    assert not torch.equal(block.first[0].weight, block.second[0].weight)


# -- PyramidNet ------------------------------------------------------------------------------------------------------


def test_pyramidal_widths_by_hand() -> None:
    """16 + 200 l / 90, rounded, times four: 18.2, 20.4, 22.7, …, 213.8, 216."""
    blocks = list(outline("pyramidnet-272-a200").blocks)
    widths = [block.outputs for block in blocks]
    assert widths[:3] == [72, 80, 92]
    assert widths[-2:] == [856, 864]
    assert {after - before for before, after in pairwise(widths)} == {8, 12}
    assert [place for place, block in enumerate(blocks) if block.stride == 2] == [30, 60]


def test_pyramidal_shortcut_by_hand() -> None:
    image = torch.arange(1.0, 17.0).view(1, 1, 4, 4)
    pooled = torch.tensor([[3.5, 5.5], [11.5, 13.5]])
    assert torch.equal(shortcut(image, 3, stride=2)[0], torch.stack((pooled, *torch.zeros(2, 2, 2))))
    assert torch.equal(shortcut(image, 2, stride=1)[0], torch.cat((image[0], torch.zeros(1, 4, 4))))
    odd = torch.tensor([[3.0, 4.5], [7.5, 9.0]])
    assert torch.equal(shortcut(torch.arange(1.0, 10.0).view(1, 1, 3, 3), 1, stride=2)[0, 0], odd)


# -- ResNet ----------------------------------------------------------------------------------------------------------

# A sample of what torchvision.models.resnet50().state_dict() holds, 320 tensors in all.
TORCHVISION = {
    "conv1.weight": (64, 3, 7, 7), "bn1.running_mean": (64,), "layer1.0.conv1.weight": (64, 64, 1, 1),
    "layer1.0.conv2.weight": (64, 64, 3, 3), "layer1.0.conv3.weight": (256, 64, 1, 1),
    "layer1.0.downsample.0.weight": (256, 64, 1, 1), "layer1.0.downsample.1.weight": (256,),
    "layer1.2.bn3.bias": (256,), "layer2.0.conv1.weight": (128, 256, 1, 1),
    "layer2.0.downsample.0.weight": (512, 256, 1, 1), "layer3.5.conv3.weight": (1024, 256, 1, 1),
    "layer4.0.downsample.1.running_var": (2048,), "layer4.2.bn2.num_batches_tracked": (), "fc.weight": (1000, 2048),
    "fc.bias": (1000,),
}  # fmt: skip


def test_resnet_50_takes_torchvisions_weights() -> None:
    state = outline("resnet-50").state_dict()
    assert len(state) == 320
    assert {name: tuple(state[name].shape) for name in TORCHVISION} == TORCHVISION
    assert size(outline("resnet-50")) == 25557032


@pytest.mark.parametrize("name", ["resnet-50", "resnet-200"])
def test_resnets_have_their_stride_in_the_3x3_convolution(name: str) -> None:
    strided = [n for n, m in outline(name).named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    stages = [f"layer{stage}.0.{layer}" for stage in (2, 3, 4) for layer in ("conv2", "downsample")]
    assert [n.removesuffix(".0") for n in strided] == ["conv1", *stages]


def test_pre_activation_leaves_the_shortcut_alone() -> None:
    """It is the input itself, or a convolution of the activated input; the first block has its input activated."""
    same, first, strided = PreActivation(16, 4, 1), PreActivation(4, 4, 1), PreActivation(16, 8, 2)
    for block in (same, first, strided):
        nn.init.zeros_(block.conv3.weight)
        block.eval()
    x = torch.randn(2, 16, 6, 6)
    assert torch.equal(same(x), x)
    assert strided.downsample is not None
    torch.testing.assert_close(strided(x), strided.downsample(strided.bn1(x).clamp(min=0)))
    assert isinstance(first.bn1, nn.Identity)


# -- mistakes --------------------------------------------------------------------------------------------------------


NAMES = (
    "pyramidnet-272-a200, resnet-200, resnet-50, shake-shake-26-2x112d, shake-shake-26-2x96d, "
    "small-cnn, wrn-28-10, wrn-40-2"
)
MISTAKES: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: ma.network("resnet", 10), f"unknown network 'resnet'; choose one of {NAMES}"),
    (lambda: ma.network("wrn-40-2", 1), "num_classes is 1"),
    (lambda: WideResNet(20, 2, 10), r"depth is 20; .* 6 n \+ 4 layers"),
    (lambda: ShakeShakeNet(28, 32, 10), r"depth is 28; .* 6 n \+ 2 layers"),
    (lambda: ShakeShakeNet(26, 33, 10), r"width is 33; .* must be even"),
    (lambda: PyramidNet(270, 200, 10), r"depth is 270; .* 9 n \+ 2 layers"),
]


@pytest.mark.parametrize(("make", "sentence"), MISTAKES)
def test_mistakes_are_named(make: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
