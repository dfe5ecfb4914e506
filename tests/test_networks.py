"""Task networks against their publications."""

import pytest
import torch

import metaaugment as ma
from metaaugment.networks import WideResNet
from metaaugment.networks.shake import ShakeShake, shaken


@pytest.mark.parametrize(("name", "millions"), [("wrn-40-2", 2.2), ("wrn-28-10", 36.5)])
def test_parameter_counts_are_the_published_ones(name: str, millions: float) -> None:
    """Zagoruyko and Komodakis, Tables 4 and 5, for ten classes."""
    count = sum(p.numel() for p in ma.network(name, 10).parameters())
    assert round(count / 1e6, 1) == millions


def test_wide_residual_network_by_layers() -> None:
    """Depth counts convolutions and the output layer; shortcuts are not counted."""
    network = ma.network("wrn-40-2", 10)
    kernels = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(kernels) + len([m for m in network.modules() if isinstance(m, WideResNet)]) * 3 == 37 + 3
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("channels", [1, 3])
def test_small_network(channels: int) -> None:
    assert ma.network("small-cnn", 7, channels)(torch.rand(2, channels, 32, 32)).shape == (2, 7)


def test_shaken_has_one_coefficient_forward_and_another_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    out = shaken(x, torch.tensor(0.3), torch.tensor(0.9))
    torch.testing.assert_close(out, 0.3 * x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 0.9))


def test_shake_shake_in_training_and_at_its_expectation() -> None:
    layer = ShakeShake()
    first, second = torch.zeros(1000, 1, 1, 1), torch.ones(1000, 1, 1, 1)
    mixed = layer(first, second)
    assert mixed.min() < 0.05
    assert mixed.max() > 0.95
    for module in (ShakeShake().eval(), layer):
        layer.at_expectation = True
        assert (module(first, second) == 0.5).all()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown network 'resnet'; choose one of small-cnn, wrn-28-10, wrn-40-2"):
        ma.network("resnet", 10)
    with pytest.raises(ValueError, match="num_classes is 1"):
        ma.network("wrn-40-2", 1)
    with pytest.raises(ValueError, match=r"depth is 20; .* 6 n \+ 4 layers"):
        WideResNet(20, 2, 10)
