"""The gradient of the validation loss in θ and α through one inner update, Eqs. 2 and 3.

The policy's outputs are not differentiated in w (Sec. 3.2), so everything follows from one linear map, the Jacobian J
of the vector of sample losses at w:

    Eq. 2    g = Jᵀ V(θ),   ŵ = w − α g
    Eq. 3    s = J v   with   v = ∇ L_val(ŵ)

and −α Σ V_i(θ) s_i, with s held fixed, has the exact gradient of L_val(ŵ(θ, α)) in θ; that in α is −⟨g, v⟩. The
*alignment* s_i is the inner product of ∇L_i(w) and ∇L_val(ŵ). As V is normalized, a sample gains weight if its gradient
agrees with that of the validation loss more than the others' do.

Three routes lead to s, each a function of the same arguments. `difference` is the fast one, `forward` the exact one,
and `unrolled` the slow and obvious one that the others are tested against.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.nn.utils import parametrize

from metaaugment.guard.replay import capturing

Parameters = dict[str, nn.Parameter]
Gradient = Sequence[Tensor]

# A layer with this attribute declares that its backward pass is not the derivative of its forward pass; set to True, it
# makes the layer use the expectation of its forward coefficient in both.
EXPECTATION = "at_expectation"
FINE = 1e-12  # relative error of one operation: float64 is below, float32 and coarser ones are above
SCALE = 2.0**10  # of gradients during the backward pass


@dataclass(frozen=True)
class Pass:
    """The training pass, to be repeated at other parameters: same images, same draws of dropout, same precision."""

    network: nn.Module
    parameters: Parameters
    logits: Float[Tensor, "n classes"]  # at w
    again: Callable[[], Float[Tensor, "n classes"]]
    losses: Callable[[Tensor], Float[Tensor, " n"]]  # from logits
    precision: float  # the relative error of one operation


Route = Callable[[Pass, Gradient], Float[Tensor, " n"]]


def weighted_gradient(
    losses: Float[Tensor, " n"], weights: Float[Tensor, " n"], parameters: Parameters, retain_graph: bool
) -> list[Tensor | None]:
    """Jᵀ V = Σ V_i ∇L_i(w), the g of Eq. 2, with None for parameters that the losses do not depend on.

    Without the hooks on parameters, which must see a gradient at its own scale, and once: see `hooked`.
    """
    # Scaled by a power of two, the same on all processes: nothing underflows in float16, and otherwise no bit changes.
    weighted = (SCALE * weights.detach() * losses).sum()
    w = list(parameters.values())
    with unhooked(w):
        gradient = torch.autograd.grad(weighted, w, retain_graph=retain_graph, allow_unused=True)
    found = [g for g in gradient if g is not None]
    scaled_back = iter(torch._foreach_div(found, SCALE) if found else ())
    return [None if g is None else next(scaled_back) for g in gradient]


def not_compiled() -> AbstractContextManager[object]:
    """Run compiled code eagerly inside: it supports neither tangents nor second derivatives, and drops them silently.

    If nothing has been compiled yet, torch.compile's machinery, which is slow to load, is not loaded.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def filled(gradient: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for None."""
    return [torch.zeros_like(w) if g is None else g for w, g in zip(parameters, gradient, strict=True)]


def outer_loss(
    alpha: Tensor, weights: Float[Tensor, " n"], alignment: Float[Tensor, " n"], along: Tensor | float
) -> Tensor:
    """Eq. 3: its gradient in θ and α is that of L_val(ŵ(θ, α)), the alignment and `along`, ⟨g, v⟩, being held fixed.

    Not α's by the alignment, too: a hook on a parameter may clip g, and s is taken back through what it does, which is
    not what it makes of g.
    """
    return -alpha.detach() * (weights * alignment.detach()).sum() - alpha * along


def inner(one: Gradient, other: Gradient) -> Tensor:
    """⟨one, other⟩ over all parameters; of complex ones the real part."""
    return _flat(one).dot(_flat(other))


def _flat(gradient: Gradient) -> Float[Tensor, " w"]:
    parts = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in gradient]
    flat = torch.cat([part.reshape(-1) for part in parts])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


# -- three routes to the alignment s = J v -----------------------------------------------------------------------------


def difference(training: Pass, v: Gradient) -> Float[Tensor, " n"]:
    """One more forward pass of the unmodified module, at w + h v.

    Only the network is differenced; the loss is differentiated exactly at its logits z: s_i = ⟨∇ℓ(z_i), Δz_i⟩ / h. So
    the curvature of the loss, which is most of the curvature, does not enter, and the move can be long enough to stand
    out from rounding.
    """
    refuse_shaking(training.network)
    parameters = list(training.parameters.values())
    h = step_length(training, v)
    with torch.no_grad(), moved(parameters, v, h):
        ahead = training.again()
    return along_logits(training, (ahead - training.logits.detach()) / h)


def forward(training: Pass, v: Gradient) -> Float[Tensor, " n"]:
    """One pass in forward mode: exact, for networks whose layers all support it."""
    with torch.no_grad(), forward_ad.dual_level(), not_compiled():
        tangents = zip(training.parameters.values(), v, strict=True)
        dual = [forward_ad.make_dual(w.detach(), tangent.to(w.dtype)) for w, tangent in tangents]
        try:
            with replaced(training, dual):
                tangent = forward_ad.unpack_dual(training.again()).tangent
        except NotImplementedError as error:
            raise NotImplementedError(
                f"a layer has no forward mode, which route='forward' needs; use route='difference' ({error})"
            ) from error
    return along_logits(training, torch.zeros_like(training.logits) if tangent is None else tangent)


def unrolled(training: Pass, v: Gradient) -> Float[Tensor, " n"]:
    """Backward through the backward pass of the inner update: s is the derivative of ⟨Jᵀ V, v⟩ in V."""
    w = [parameter.detach().requires_grad_() for parameter in training.parameters.values()]
    with torch.enable_grad(), not_compiled():
        with replaced(training, w):
            losses = training.losses(training.again())
        weights = torch.ones_like(losses, requires_grad=True)
        g = torch.autograd.grad(losses, w, weights, create_graph=True, allow_unused=True)
        used = [(gradient, direction) for gradient, direction in zip(g, v, strict=True) if gradient is not None]
        # The real part matters for complex parameters only.
        along = torch.stack([(gradient * direction.conj()).sum().real for gradient, direction in used]).sum()
    try:
        return torch.autograd.grad(along, weights)[0]
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise NotImplementedError(
            f"a layer has no second derivative, which route='unrolled' needs; use route='difference' ({error})"
        ) from error


def along_logits(training: Pass, change: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
    """⟨∇ℓ(z_i), change_i⟩: how the loss of each sample changes with its logits."""
    logits = training.logits.detach().to(change.dtype).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(training.losses(logits).sum(), logits)
    return (gradient * change).flatten(1).sum(1)


@torch.no_grad()
def step_length(training: Pass, v: Gradient) -> Tensor:
    """h for which the move h v has the length `move_length`, each tensor of w measured against its own size.

    Measured against ‖w‖ as a whole, a gradient concentrated in a few small tensors, as at initialization, would move
    them too far. A tensor that is zero or tiny (a fresh head, a layer scale) counts as if its rows had length one, a
    vector as if filled with ones.
    """
    w: list[Tensor] = list(training.parameters.values())
    size = torch.stack(torch._foreach_norm(w))
    least = _constant(tuple((p.numel() if p.ndim < 2 else len(p)) ** 0.5 for p in w), size.device)
    share = torch.stack(torch._foreach_norm(list(v))) / torch.maximum(size, least.to(size.dtype))
    return move_length(training.precision) / share.norm().clamp(min=torch.finfo(size.dtype).tiny)


def move_length(precision: float) -> float:
    """½ precision^(2/3), or in float64 ½ precision^(1/2): where the error of a long move equals that of a short one.

    That of a short one is rounding, precision / length. That of a long one was seen to grow with about the square root
    of the length, measured early, midway and late in training, in float32, tf32 and bf16. A move in float64 is so short
    that it passes hardly any kink of a ReLU, and the error grows with the length itself (docs/decisions.md).
    """
    return 0.5 * precision ** (1 / 2 if precision < FINE else 2 / 3)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on a device, copied there once: the host waits for a copy, and a captured step cannot contain one."""
    return torch.tensor(values, dtype=torch.float64, device=device)


ROUTES: dict[str, Route] = {"difference": difference, "forward": forward, "unrolled": unrolled}


# -- what the routes need ---------------------------------------------------------------------------------------------


@contextmanager
def moved(parameters: Sequence[Tensor], direction: Gradient, length: Tensor) -> Iterator[None]:
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


def hooked(gradient: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
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


def back_through_hooks(v: Gradient, gradient: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
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


@contextmanager
def replaced(training: Pass, values: Sequence[Tensor]) -> Iterator[None]:
    """Passes inside use these values instead of the parameters, wherever in the network a parameter is.

    Not by torch's functional_call: where one module is at two places of the network, it does not put the parameters of
    that module back.
    """
    new = dict(zip(training.parameters.values(), values, strict=True))
    owners = [module._parameters for module in training.network.modules()]
    places = [(owner, name, w) for owner in owners for name, w in owner.items() if w in new]
    try:
        for owner, name, w in places:
            owner[name] = new[w]  # type: ignore[index, assignment]
        yield
    finally:
        for owner, name, w in places:
            owner[name] = w


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


def norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).norm()
