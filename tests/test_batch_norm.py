"""Batch normalisation over several processes is torch's own over all their samples in one."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from metaaugment.batch_norm import GlobalBatchNorm, statistics, with_global_statistics
from metaaugment.distributed import add_up, share

from processes import together

Make = Callable[[], nn.Module]
# Shares of different sizes, and values that lie far from zero, where sums of squares would lose eight digits.
SHARES = {1: (12,), 2: (5, 7), 4: (1, 4, 2, 5)}
FAR = 1e4
LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), ()),
    "2d": (lambda: nn.BatchNorm2d(3), (4, 5)),
    "2d, far from zero": (lambda: nn.BatchNorm2d(3), (4, 5)),
    "3d": (lambda: nn.BatchNorm3d(3, eps=1e-2), (2, 3, 2)),
    "mean of all": (lambda: nn.BatchNorm2d(3, momentum=None), (4, 5)),
    "no parameters": (lambda: nn.BatchNorm2d(3, affine=False, momentum=0.3), (4, 5)),
    "no running statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 5)),
}


def everything(rank: int, world: int) -> dict[str, Any]:
    """All that is looked at here: starting processes takes longer than their work."""
    layers = {name: derivatives(name, rank, world) for name in LAYERS}
    return {"layers": layers, "far from zero": far_from_zero(rank, world), "half": half(rank, world)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many processes has found."""
    return cache(lambda world: together(world, everything, tmp_path_factory.mktemp("processes") / str(world)))


def derivatives(name: str, rank: int, world: int) -> dict[str, Tensor]:
    """What a layer gives for this process's samples, and all derivatives that training takes."""
    make, extent = LAYERS[name]
    torch.manual_seed(5)
    layer = make().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0)
    start, end = sum(SHARES[world][:rank]), sum(SHARES[world][: rank + 1])
    away = FAR if "far" in name else 0.0
    values = [torch.randn(12, 3, *extent, dtype=torch.float64) * 2 for _ in range(5)]
    x, tangent, weights, direction, later = (value[start:end] for value in values)
    x, later = (x + away + 1).requires_grad_(), later + away
    layer = with_global_statistics(layer) if world > 1 else layer
    found = {"output": layer(x)}
    # Each process has its part of one loss of all: weights that are learned take part in it.
    weights = weights.clone().requires_grad_()
    loss = (weights * found["output"].square()).sum()
    parameters = dict(layer.named_parameters())
    inputs = [x, *parameters.values()]
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    along = (gradients[0] * direction).sum() + sum((0.3 * g).sum() for g in gradients[1:])
    second = torch.autograd.grad(along, [*inputs, weights])
    summed = [value.detach().clone() for value in (*gradients[1:], *second[1:-1])]
    add_up(summed)
    found |= {"gradient": gradients[0], "second": second[0], "weights": second[-1]}
    found |= {f"parameter {place}": value for place, value in enumerate(summed)}
    with forward_ad.dual_level(), torch.no_grad():
        moved = {key: forward_ad.make_dual(value.detach(), torch.ones_like(value)) for key, value in parameters.items()}
        dual = forward_ad.make_dual(x.detach(), tangent)
        found["tangent"] = forward_ad.unpack_dual(functional_call(layer, moved, (dual,))).tangent
    found["twice"] = layer(later)
    found |= {f"state {key}": value.clone() for key, value in layer.state_dict().items()}
    layer.eval()
    found["evaluated"] = layer(later)
    return {key: value.detach() for key, value in found.items()}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("world", [2, 4])
def test_it_is_torchs_over_all_samples(world: int, name: str, parts: Callable[[int], Any]) -> None:
    tolerance = 1e-12 * (FAR if "far" in name else 1)  # the samples themselves have fewer digits there
    found = [part["layers"][name] for part in parts(world)]
    for key, value in derivatives(name, 0, 1).items():
        alike = key.startswith(("parameter", "state"))  # on all processes
        for one in [part[key] for part in found] if alike else [torch.cat([part[key] for part in found])]:
            torch.testing.assert_close(
                one, value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
            )


def far_from_zero(rank: int, world: int) -> Tensor:
    return statistics(normal(8, 2, 50, 50).add(1e7)[share(8)])[1]


def test_variance_far_from_zero(parts: Callable[[int], Any]) -> None:
    """Of values of 1e7 a square has no digits left for a variance of 1; around their mean they have nine."""
    exact = (normal(8, 2, 50, 50) + 1e7 - 1e7).var((0, 2, 3), correction=0)
    for part in parts(2):
        torch.testing.assert_close(part["far from zero"], exact, rtol=1e-9, atol=0)


def half(rank: int, world: int) -> tuple[Tensor, Any]:
    layer = with_global_statistics(nn.BatchNorm2d(3))
    return layer(normal(8, 3, 4, 4).bfloat16()[share(8)]).detach(), layer.running_var


def test_half_precision_is_computed_in_single(parts: Callable[[int], Any]) -> None:
    layer = nn.BatchNorm2d(3)
    expected = layer(normal(8, 3, 4, 4).bfloat16()).detach()
    found = torch.cat([part["half"][0] for part in parts(2)])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # one digit of eight bits
    torch.testing.assert_close(parts(2)[1]["half"][1], layer.running_var)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


# -- converting a network ----------------------------------------------------------------------------------------------


def test_a_network_keeps_its_parameters_and_the_names_of_its_state() -> None:
    shared = nn.BatchNorm1d(4)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(2), shared, shared))
    network[1].eval()
    before, parameters = deepcopy(network.state_dict()), list(network.parameters())
    after = with_global_statistics(network)
    assert after is network
    assert [type(after[1]), type(after[2][1])] == [GlobalBatchNorm] * 2
    assert after[2][1] is after[2][2], "a layer in two places stays one"
    assert not after[1].training
    assert all(one is other for one, other in zip(parameters, after.parameters(), strict=True))
    assert list(before) == list(after.state_dict())
    after.load_state_dict(before)


def test_with_one_process_it_is_torchs_own() -> None:
    torch.manual_seed(8)
    x, plain = torch.randn(6, 3, 4, 4), nn.BatchNorm2d(3)
    layer = with_global_statistics(deepcopy(plain))
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_var, plain.running_var)


def test_layers_that_do_more_are_refused() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    with pytest.raises(ValueError, match=r"layer '0' is a Own"):
        with_global_statistics(nn.Sequential(Own(3)))
