"""Algorithm 1: Eqs. 2 to 5 of the paper, and the lines of one iteration that they are made of.

w are the parameters of the task network, θ those of the policy, P its outputs, V the weights that they become, and L
the losses of a mini-batch of augmented samples. The weights are not differentiated in w (Sec. 3.2), so everything
follows from one linear map, the Jacobian J of the vector of sample losses at w:

    Eq. 2    g = Jᵀ V(θ),  ŵ = w − α g
    Eq. 3    s = J v,  v = ∇L_val(ŵ);  −α Σ V_i(θ) s_i, with s held fixed, has the gradient of L_val(ŵ) in θ
    Eq. 4    Jᵀ V(θ') trains w, with the θ' that Eq. 3 has led to
    Eq. 5    p = (1 − ε) v / Σv + ε / K²,  where v are the mean outputs of each pair of functions

The *alignment* s_i is the inner product of ∇L_i(w) and ∇L_val(ŵ): as the weights are normalized, a sample gains weight
if its gradient agrees with that of the validation loss more than the others' do. `alignment.py` has three ways to s.

With several processes each has its part of every mini-batch; sums are over the whole of it. `guard` has what moves
parameters and puts them back.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.distributed import add_up, drawn, total, world_size
from metaaugment.guard.gradients import Gradient, back_through_hooks, filled, hooked, inner
from metaaugment.guard.parameters import moved, unhooked

SCALE = 2.0**10  # of gradients during the backward pass


# -- the equations -----------------------------------------------------------------------------------------------------


def normalize(P: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """V = P / ΣP, over the global mini-batch (Sec. 4)."""
    return P / total(P.sum())


def weighted_sum(V: Float[Tensor, " n"], L: Float[Tensor, " n"]) -> Tensor:
    """Σ V_i L_i, whose gradient in w is Jᵀ V."""
    return (V * L).sum()


def inner_gradient(
    V: Float[Tensor, " n"], L: Float[Tensor, " n"], w: Sequence[Tensor], retain_graph: bool
) -> list[Tensor | None]:
    """Eq. 2: g = Jᵀ V = Σ V_i ∇L_i(w), with None for parameters that the losses do not depend on.

    Without the hooks on parameters, which must see a gradient at its own scale, and once: see `hooked`.
    """
    # Scaled by a power of two, the same on all processes: nothing underflows in float16, and otherwise no bit changes.
    loss = weighted_sum(SCALE * V.detach(), L)
    with unhooked(w):
        g = torch.autograd.grad(loss, list(w), retain_graph=retain_graph, allow_unused=True)
    found = [part for part in g if part is not None]
    scaled_back = iter(torch._foreach_div(found, SCALE) if found else ())
    return [None if part is None else next(scaled_back) for part in g]


def inner_update(w: Sequence[Tensor], g: Sequence[Tensor], alpha: Tensor) -> AbstractContextManager[None]:
    """Eq. 2: inside, the parameters are at ŵ = w − α g; afterwards they are at w again, bit for bit."""
    return moved(w, g, -alpha.detach())


def outer_loss(alpha: Tensor, V: Float[Tensor, " n"], s: Float[Tensor, " n"], along: Tensor | float) -> Tensor:
    """Eq. 3: its gradient in θ and α is that of L_val(ŵ(θ, α)), the alignment s and `along`, ⟨g, v⟩, being held fixed.

    Not α's by the alignment, too: a hook on a parameter may clip g, and s is taken back through what it does, which is
    not what it makes of g.
    """
    return -alpha.detach() * weighted_sum(V, s.detach()) - alpha * along


def task_loss(V: Float[Tensor, " n"], L: Float[Tensor, " n"]) -> Tensor:
    """Eq. 4: w descends along the gradient of Σ V_i L_i, with the weights V(θ') of the policy as Eq. 3 has left it."""
    return weighted_sum(V, L)


def probabilities(v: Float[Tensor, "..."], epsilon: float) -> Float[Tensor, "..."]:
    """Eq. 5: the estimated distribution mixed with the uniform one."""
    return (1 - epsilon) * v / v.sum() + epsilon / v.numel()


# -- the lines of one iteration ----------------------------------------------------------------------------------------


def augmented(x: Tensor, sample: Callable[[int], Any], apply: Callable[[Tensor, Any], Tensor]) -> tuple[Tensor, Any]:
    """Lines 4 and 5: a transformation T for each sample, and the samples T(x)."""
    T = drawn(sample, len(x)).to(x.device)
    return apply(x, T), T


class Ahead(NamedTuple):
    """What line 7 leads to."""

    own: Gradient  # this process's part of g
    g: Gradient  # the whole of it
    v: list[Tensor]  # ∇L_val(ŵ)
    along: Tensor  # ⟨g, v⟩


def look_ahead(
    V: Float[Tensor, " n"],
    L: Float[Tensor, " n"],
    w: Sequence[Tensor],
    alpha: Tensor,
    validation_gradient: Callable[[], list[Tensor]],
    retain_graph: bool,
) -> Ahead:
    """Lines 6 and 7, Eq. 2: the validation gradient at ŵ. Hooks on parameters change g as they do in training."""
    own = g = inner_gradient(V, L, w, retain_graph)
    if world_size() > 1:
        g = filled([None if part is None else part.clone() for part in own], w)
        add_up(g)
    step = hooked(g, w)
    with inner_update(w, step, alpha):
        v = validation_gradient()
    return Ahead(own, g, back_through_hooks(v, g, w), inner(step, v))


def outer_gradient(loss: Tensor, learned: Sequence[Tensor]) -> list[Tensor]:
    """Line 8, Eq. 3: the gradient of the outer loss in all that is learned, θ and α."""
    gradients = filled(torch.autograd.grad(loss, list(learned), allow_unused=True), learned)
    add_up(gradients)
    return gradients
