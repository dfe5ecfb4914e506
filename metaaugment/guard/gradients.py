"""Gradients as lists of tensors: None for zero, hooks on parameters, inner products, and `.grad`."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import Node

from metaaugment.guard.replay import capturing

Gradient = Sequence[Tensor | None]


def filled(gradient: Gradient, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for None."""
    return [torch.zeros_like(w) if g is None else g for w, g in zip(parameters, gradient, strict=True)]


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """⟨one, other⟩ over all parameters; of complex ones the real part."""
    return _flat(one).dot(_flat(other))


def _flat(gradient: Sequence[Tensor]) -> Float[Tensor, " w"]:
    parts = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in gradient]
    flat = torch.cat([part.reshape(-1) for part in parts])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).norm()


# -- hooks on parameters -----------------------------------------------------------------------------------------------


def hooked(gradient: Gradient, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradient as hooks on its parameters change it: one may clip it, or mask what is not to be trained.

    None, of a parameter that has no part in the pass, becomes zero; as in training, its hooks are not called.
    """
    pairs = zip(gradient, parameters, strict=True)
    return [torch.zeros_like(w) if g is None else _hooked(g, w) for g, w in pairs]


def _hooked(gradient: Tensor, w: Tensor) -> Tensor:
    hooks = (w._backward_hooks or {}).values()
    gradient = gradient.clone() if hooks else gradient  # a hook may write into what it is given
    for hook in hooks:
        result = hook(gradient)
        gradient = gradient if result is None else result
    return gradient


def back_through_hooks(v: Sequence[Tensor], gradient: Gradient, parameters: Sequence[Tensor]) -> list[Tensor]:
    """v by the chain rule through what the hooks did to this gradient, which is not what they would do to v."""
    back = list(v)
    for place, (g, w) in enumerate(zip(gradient, parameters, strict=True)):
        if g is None or not w._backward_hooks:
            continue
        with torch.enable_grad():
            given = g.detach().requires_grad_()
            changed = _hooked(given, w)
        if changed.requires_grad:
            back[place] = torch.autograd.grad(changed, given, v[place])[0]
        elif not capturing(w.device) and changed.any():
            raise ValueError(
                f"a hook on a parameter of shape {list(w.shape)} cuts its result off from the gradient that it is "
                "given, so that Eq. 3 cannot be taken back through it; leave out no_grad(), detach() and .data inside"
            )
        else:
            back[place] = torch.zeros_like(given)
    return back


# -- backward passes ---------------------------------------------------------------------------------------------------


def accumulate(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Add to `.grad`, as a backward pass does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # A copy: two parameters that are added to each other have one gradient, which clipping in place scales twice.
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def with_gradient(value: Tensor, gradient: Gradient, parameters: Sequence[Tensor]) -> Tensor:
    """A loss of this value, whose gradient is known already."""
    known = [(w, g) for w, g in zip(parameters, gradient, strict=True) if g is not None]
    return _Given.apply(value.detach(), [g for _, g in known], *(w for w, _ in known))


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, None, *torch._foreach_mul(ctx.gradient, outer[0])


def refuse_reentrant(losses: Tensor) -> None:
    """Refuse reentrant checkpoints, which hide layers in a node of their own: only a full backward pass finds these."""
    known: set[Node] = set()
    left = [losses.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "the network checkpoints activations with use_reentrant=True, so Eq. 2 would miss the gradient of "
                "those layers; set use_reentrant=False"
            )
        left += [before for before, _ in node.next_functions]
