"""The alignment s = J v: how much the loss of each sample falls with a step of w along −v.

Three routes lead to it, each a function of the same arguments. `difference` is the fast one, `forward` the exact one,
and `unrolled` the slow and obvious one that the others are tested against.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from metaaugment.guard.gradients import norm
from metaaugment.guard.parameters import moved, refuse_shaking, replaced

FINE = 1e-12  # relative error of one operation: float64 is below, float32 and coarser ones are above


@dataclass(frozen=True)
class Pass:
    """The training pass, to be repeated at other parameters: same images, same draws of dropout, same precision."""

    network: nn.Module
    w: Sequence[nn.Parameter]
    logits: Float[Tensor, "n classes"]  # at w
    again: Callable[[], Float[Tensor, "n classes"]]
    losses: Callable[[Tensor], Float[Tensor, " n"]]  # from logits
    precision: float  # the relative error of one operation


Route = Callable[[Pass, Sequence[Tensor]], Float[Tensor, " n"]]


def difference(training: Pass, v: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """One more forward pass of the unmodified module, at w + h v.

    Only the network is differenced; the loss is differentiated exactly at its logits z: s_i = ⟨∇ℓ(z_i), Δz_i⟩ / h. So
    the curvature of the loss, which is most of the curvature, does not enter, and the move can be long enough to stand
    out from rounding.
    """
    refuse_shaking(training.network)
    h = step_length(training, v)
    with torch.no_grad(), moved(training.w, v, h):
        ahead = training.again()
    return along_logits(training, (ahead - training.logits.detach()) / h)


def forward(training: Pass, v: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """One pass in forward mode: exact, for networks whose layers all support it."""
    with torch.no_grad(), forward_ad.dual_level(), not_compiled():
        dual = [forward_ad.make_dual(w.detach(), tangent.to(w.dtype)) for w, tangent in zip(training.w, v, strict=True)]
        try:
            with replaced(training.network, training.w, dual):
                tangent = forward_ad.unpack_dual(training.again()).tangent
        except NotImplementedError as error:
            raise NotImplementedError(
                f"a layer has no forward mode, which route='forward' needs; use route='difference' ({error})"
            ) from error
    return along_logits(training, torch.zeros_like(training.logits) if tangent is None else tangent)


def unrolled(training: Pass, v: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Backward through the backward pass of the inner update: s is the derivative of ⟨Jᵀ V, v⟩ in V."""
    w = [parameter.detach().requires_grad_() for parameter in training.w]
    with torch.enable_grad(), not_compiled():
        with replaced(training.network, training.w, w):
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
def step_length(training: Pass, v: Sequence[Tensor]) -> Tensor:
    """h for which the move h v has the length `move_length`, each tensor of w measured against its own size.

    Measured against ‖w‖ as a whole, a gradient concentrated in a few small tensors, as at initialization, would move
    them too far. A tensor that is zero or tiny (a fresh head, a layer scale) counts as if its rows had length one, a
    vector as if filled with ones.
    """
    w: list[Tensor] = list(training.w)
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


def not_compiled() -> AbstractContextManager[object]:
    """Run compiled code eagerly inside: it supports neither tangents nor second derivatives, and drops them silently.

    If nothing has been compiled yet, torch.compile's machinery, which is slow to load, is not loaded.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@torch.no_grad()
def check_repeatable(training: Pass, route: Route) -> bool:
    """Refuse a pass that gives other logits when it is repeated at w as the route repeats it: the derivative of a pass
    with other draws is not that of this one. Returns whether it could be told: a fresh head may give zeros, always.
    """
    eager = route is not difference
    with not_compiled() if eager else nullcontext():
        again, logits = training.again(), training.logits.detach()
    other = norm([again - logits]) > training.precision**0.5 * norm([logits])  # by far more than rounding
    if not other:  # nor where they are not finite: that is another fault
        return bool(norm([logits]) > 0)
    way = ", or use route='difference': run eagerly, compiled dropout draws other numbers" if eager else ""
    if not eager and any(hasattr(module, "_orig_mod") for module in training.network.modules()):
        way = (
            "; compiled dropout draws from them if, before the first pass, you import torch._inductor.config "
            "and set torch._inductor.config.fallback_random = True"
        )
    raise ValueError(
        f"repeating the training pass gives different logits, so route={route.__name__!r} cannot work; keep the "
        "network in the mode that it had in observe(), and its state in buffers, and draw random numbers from torch's, "
        f"numpy's or Python's own generators{way}"
    )


ROUTES: dict[str, Route] = {"difference": difference, "forward": forward, "unrolled": unrolled}
