"""Parameters that are moved, replaced or cut off from their hooks for a while, and are as before afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# A layer with this attribute declares that its backward pass is not the derivative of its forward pass; set to True, it
# makes the layer use the expectation of its forward coefficient in both.
EXPECTATION = "at_expectation"


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained; looked up at each step, as layers may be frozen or weights replaced."""
    parameters = {name: w for name, w in network.named_parameters() if w.requires_grad}
    if not parameters:
        raise ValueError("no parameter of the network requires a gradient; there is nothing to train")
    return parameters


def version(parameters: Mapping[str, Tensor]) -> int:
    """Grows whenever one of the parameters changes."""
    return sum(w._version for w in parameters.values())


@contextmanager
def moved(parameters: Sequence[Tensor], direction: Sequence[Tensor], length: Tensor) -> Iterator[None]:
    """Parameters at w + length · direction; bit for bit at w again afterwards, whatever happens inside.

    They move through `.data`, out of sight of autograd, which would otherwise reject a retained graph over w as stale.
    """
    data = [parameter.data for parameter in parameters]
    kept = [value.clone() for value in data]
    try:
        torch._foreach_add_(data, torch._foreach_mul(list(direction), length.to(data[0].dtype.to_real())))
        yield
    finally:
        torch._foreach_copy_(data, kept)


@contextmanager
def replaced(network: nn.Module, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Passes inside use these values instead of the parameters, wherever in the network a parameter is.

    Not by torch's functional_call: where one module is at two places of the network, it does not put the parameters of
    that module back.
    """
    new = dict(zip(parameters, values, strict=True))
    owners = [module._parameters for module in network.modules()]
    places = [(owner, name, w) for owner in owners for name, w in owner.items() if w in new]
    try:
        for owner, name, w in places:
            owner[name] = new[w]  # type: ignore[index, assignment]
        yield
    finally:
        for owner, name, w in places:
            owner[name] = w


@contextmanager
def unhooked(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Backward passes inside leave out the hooks on these parameters."""
    hooks = [w._backward_hooks for w in parameters if w._backward_hooks]
    kept = [dict(of_one) for of_one in hooks]
    try:
        for of_one in hooks:
            of_one.clear()
        yield
    finally:
        for of_one, before in zip(hooks, kept, strict=True):
            of_one.update(before)


@contextmanager
def at_expectation(network: nn.Module) -> Iterator[None]:
    """Layers with different coefficients forward and backward (shake) use the expected forward one in both passes.

    Otherwise their gradient is not that of the loss they compute.
    """
    shaking = [module for module in network.modules() if hasattr(module, EXPECTATION)]
    before = [getattr(module, EXPECTATION) for module in shaking]
    try:
        for module in shaking:
            setattr(module, EXPECTATION, True)
        yield
    finally:
        for module, value in zip(shaking, before, strict=True):
            setattr(module, EXPECTATION, value)


def refuse_shaking(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if hasattr(module, EXPECTATION):
            raise ValueError(
                f"the backward pass of layer {name!r} ({type(module).__name__}) is not the derivative of its forward "
                "pass, as route='difference' requires; use route='forward'"
            )


def refuse_cached_weights() -> None:
    if parametrize._cache_enabled:
        raise ValueError(
            "inside torch.nn.utils.parametrize.cached() a weight stays as it was when its parameters move, as they do "
            "for Eqs. 2 and 3; leave it out around the learner's calls"
        )
