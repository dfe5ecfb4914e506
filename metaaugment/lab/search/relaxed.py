"""DADA's policy, relaxed: a learner whose augmentation follows the gradient of the validation loss.

A sub-policy is drawn from a categorical distribution; each of its two functions is applied with a probability, at a
level. The logits of the distribution, the probabilities and the levels are all learned by ∇ L_val(ŵ) through one inner
update ŵ = w − α ∇ Σ V_i L_i(w) with equal weights V, as in DARTS. Every image draws its own sub-policy; DADA draws one
per mini-batch, which has the same expectation and is noisier.

∇ L_val(ŵ) reaches the policy as a finite difference between the training passes at w + h v and w − h v, with
v = ∇ L_val(ŵ): the difference of the losses tells which draws were good, that of the gradients in the inputs which way
the levels should move.

The estimator is the one that DADA published.

- Choices: RELAX (Grathwohl et al., 2018), the score-function estimator with a control variate: a network that sees the
  relaxed choices and is trained to lower the variance. It is unbiased. Here one control variate serves the selection of
  a sub-policy and another the application of its functions given the selection, so that sub-policies that were not
  drawn add no noise. Each approximates the difference itself (docs/decisions.md).
- Levels: straight-through. The derivative of each input pixel in the level of an applied function is taken to be one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from metaaugment.algorithm import weighted_sum
from metaaugment.alignment import step_length
from metaaugment.distributed import bare
from metaaugment.guard.gradients import accumulate
from metaaugment.guard.parameters import at_expectation, moved
from metaaugment.lab.baselines.found import Function
from metaaugment.learner import Learner
from metaaugment.observation import Observation
from metaaugment.ops import INDEX, MAX_MAGNITUDE, OPS
from metaaugment.policy import UniformPolicy
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation

# DADA's 15, in its order: of a pair, the function listed first is applied first. Identity means "not applied".
FUNCTIONS = (
    "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "AutoContrast", "Invert", "Equalize", "Solarize",
    "Posterize", "Contrast", "Color", "Brightness", "Sharpness", "Cutout",
)  # fmt: skip

# The least distance of probabilities and uniform numbers from 0 and 1: their logarithms are taken.
MARGIN = 1e-6


@dataclass(frozen=True)
class Draws:
    """The uniform numbers behind the choices of n images.

    `selected` and `applied` make the choices; `relaxed_*` draw relaxed choices anew, conditioned on those made.
    """

    selected: Float[Tensor, "n K"]
    applied: Float[Tensor, "n 2"]
    relaxed_selected: Float[Tensor, "n K"]
    relaxed_applied: Float[Tensor, "n 2"]

    @classmethod
    def draw(cls, n: int, sub_policies: int, generator: torch.Generator | None = None) -> "Draws":
        device = torch.device("cpu") if generator is None else generator.device
        sizes = (sub_policies, 2, sub_policies, 2)
        uniform = (torch.rand(n, size, generator=generator, device=device) for size in sizes)
        return cls(*(u.clamp(MARGIN, 1 - MARGIN) for u in uniform))

    def to(self, like: Tensor) -> "Draws":
        """The same on another tensor's device, in its precision."""
        return self.map(lambda u: u.to(like))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Draws":
        return Draws(*map(function, (self.selected, self.applied, self.relaxed_selected, self.relaxed_applied)))


@dataclass(frozen=True, eq=False)
class RelaxedTransformation(Transformation):
    """A transformation, with the draws that its functions were chosen by."""

    draws: Draws = field(kw_only=True)

    @classmethod
    def of(cls, t: Transformation, draws: Draws) -> "RelaxedTransformation":
        return cls._trusted(t.first, t.second, t.magnitudes, t.signs, t.positions, draws)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "RelaxedTransformation":
        return self.of(super()._map(function), self.draws.map(function))


class ControlVariate(nn.Module):
    """A number for each relaxed choice in [0, 1]^d; zero at first, so that RELAX starts as the plain score function."""

    def __init__(self, d: int, hidden: int = 100) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(d, hidden), nn.Linear(hidden, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, choices: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        return self.output(self.hidden(2 * choices - 1).tanh()).squeeze(1)


class RelaxedPolicy(UniformPolicy):
    """A distribution over the K unordered pairs of functions, with probabilities and levels, [K, 2] each, in [0, 1].

    It starts as in DADA: all pairs equally likely, probabilities and levels one half.
    """

    functions: Int64[Tensor, "K 2"]
    takes_level: Bool[Tensor, "K 2"]

    def __init__(self, functions: Sequence[str] = FUNCTIONS, temperature: float = 0.5) -> None:
        super().__init__()
        self.temperature = temperature
        self.names = list(combinations(functions, 2))
        places = [[INDEX[name] for name in pair] for pair in self.names]
        self.register_buffer("functions", torch.tensor(places), persistent=False)
        takes_level = [[OPS[place].magnitude for place in pair] for pair in places]
        self.register_buffer("takes_level", torch.tensor(takes_level), persistent=False)
        self.logits = nn.Parameter(torch.zeros(len(places)))
        self.probabilities = nn.Parameter(torch.full((len(places), 2), 0.5))
        self.levels = nn.Parameter(torch.full((len(places), 2), 0.5))
        self.of_selection = ControlVariate(len(places))
        self.of_application = ControlVariate(len(places) + 2)

    @torch.no_grad()
    def project(self) -> None:
        """Clamp probabilities and levels to their ranges, which a step may have left."""
        self.probabilities.clamp_(MARGIN, 1 - MARGIN)
        self.levels.clamp_(0, 1)

    def choose(self, draws: Draws) -> tuple[Int64[Tensor, " n"], Bool[Tensor, "n 2"]]:
        """Which sub-policy each image gets, and which of its functions are applied."""
        selected = (self.logits.log_softmax(0) + gumbel(draws.selected)).argmax(1)
        return selected, self.probabilities[selected].logit() + draws.applied.logit() > 0

    def gradients(self, worth: Float[Tensor, " n"], slope: Float[Tensor, " n"], draws: Draws) -> list[Tensor]:
        """Gradients of E[Σ worth_i / n] over the draws, in the order of the parameters.

        Those of the control variates are of its estimate's variance instead. `worth` is what each image's draw led to;
        `slope` is the derivative of that sum in a shift of all inputs of the image.
        """
        selected, applied = self.choose(draws)
        chances = [self._selection(worth, draws, selected), self._application(worth, draws, selected, applied)]
        variance = torch.stack([gradient.square().sum() for gradient in chances]).sum()
        variates = [*self.of_selection.parameters(), *self.of_application.parameters()]
        learned = torch.autograd.grad(variance, variates)
        # A product with a one-hot matrix: on a GPU it adds in the same order every time, which index_add_ does not.
        which = nn.functional.one_hot(selected, len(self.logits)).to(slope.dtype)
        levels = which.T @ (slope[:, None] * (applied & self.takes_level[selected]))
        return [*(gradient.detach() for gradient in chances), levels, *learned]

    def likeliest(self, count: int) -> list[tuple[Function, Function]]:
        """The `count` likeliest sub-policies, the likeliest first; functions that take no level have level 0."""
        self.project()
        order = self.logits.argsort(descending=True, stable=True)[:count].tolist()
        rows = zip(self.names, self.probabilities.tolist(), (self.levels * self.takes_level).tolist(), strict=True)
        pairs = [[Function(*function) for function in zip(*row, strict=True)] for row in rows]
        return [(pairs[place][0], pairs[place][1]) for place in order]

    def favourite(self) -> tuple[float, tuple[str, str]]:
        """The probability of the likeliest sub-policy, and its functions."""
        share, place = self.logits.softmax(0).max(0)
        return share.item(), self.names[int(place)]

    def _selection(self, worth: Tensor, draws: Draws, selected: Tensor) -> Tensor:
        """RELAX of the categorical choice: the gradient in the logits."""
        log_p = self.logits.log_softmax(0)
        free, tied = log_p + gumbel(draws.selected), gumbel_given(log_p, selected, draws.relaxed_selected)

        def variate(z: Tensor) -> Tensor:
            return self.of_selection((z / self.temperature).softmax(1))

        return relax(worth, log_p[selected], variate, free, tied, self.logits)

    def _application(self, worth: Tensor, draws: Draws, selected: Tensor, applied: Tensor) -> Tensor:
        """RELAX of the two Bernoulli choices, given the sub-policy: the gradient in the probabilities."""
        p = self.probabilities[selected]
        log_p = torch.where(applied, p.log(), (-p).log1p()).sum(1)
        free, tied = p.logit() + draws.applied.logit(), logistic_given(p, applied, draws.relaxed_applied)
        which = nn.functional.one_hot(selected, len(self.logits)).to(p.dtype)

        def variate(z: Tensor) -> Tensor:
            return self.of_application(torch.cat([which, (z / self.temperature).sigmoid()], dim=1))

        return relax(worth, log_p, variate, free, tied, self.probabilities)


# -- RELAX -------------------------------------------------------------------------------------------------------------


def relax(
    worth: Float[Tensor, " n"],
    log_p: Float[Tensor, " n"],
    variate: Callable[[Tensor], Float[Tensor, " n"]],
    free: Tensor,
    tied: Tensor,
    parameter: Tensor,
) -> Tensor:
    """The gradient of the expected worth f in a parameter: the mean of (f − c(z̃)) ∇ log p(b) + ∇ c(z) − ∇ c(z̃).

    `free` is z, from which the choice b was made; `tied` is z̃, drawn anew given b; `variate` is c. The result keeps
    its graph: to learn the control variate, it is differentiated once more.
    """
    again, one = variate(tied), torch.ones_like(worth)
    outer = [worth - again, one, -one]
    (total,) = torch.autograd.grad([log_p, variate(free), again], [parameter], outer, create_graph=True)
    return total / len(worth)


def gumbel(u: Tensor) -> Tensor:
    return -(-u.log()).log()


def gumbel_given(log_p: Float[Tensor, " K"], best: Int64[Tensor, " n"], u: Float[Tensor, "n K"]) -> Tensor:
    """log p plus Gumbel noise, given which of the K is largest: that one is a Gumbel number, the others are lower."""
    largest = u.gather(1, best[:, None]).log()
    below = -(-u.log() / log_p.exp() - largest).log()
    return below.scatter(1, best[:, None], -(-largest).log())


def logistic_given(p: Tensor, above: Bool[Tensor, "n 2"], u: Tensor) -> Tensor:
    """The log-odds of p plus logistic noise, given whether it is above zero."""
    v = torch.where(above, 1 - p + u * p, u * (1 - p))
    return p.logit() + v.clamp(MARGIN, 1 - MARGIN).logit()


# -- in the loop -------------------------------------------------------------------------------------------------------


class RelaxedSampler(Sampler):
    """Draws from a relaxed policy; the draws stay with the transformations that they chose."""

    def __init__(self, policy: RelaxedPolicy) -> None:
        self.policy = policy

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> RelaxedTransformation:
        policy = self.policy
        draws = Draws.draw(n, len(policy.logits), generator).to(policy.logits)
        selected, applied = policy.choose(draws)
        functions = torch.where(applied, policy.functions[selected], INDEX["Identity"])
        magnitudes = MAX_MAGNITUDE * policy.levels[selected].double()
        t = Transformation.draw(functions[:, 0], functions[:, 1], generator, magnitudes)
        return RelaxedTransformation.of(t, draws)


class RelaxedLearner(Learner):
    """Learns a relaxed policy while a network trains; the inner step size α stays as given.

    DADA's inner update also has the optimizer's momentum and weight decay, which do not depend on the policy, and its
    step size falls with the learning rate. Works in one process only.
    """

    def __init__(self, network: nn.Module, policy: RelaxedPolicy, **settings: Any) -> None:
        self.relaxed = policy
        super().__init__(network, RelaxedSampler(policy), policy, lagged=True, **settings)
        self.alpha.requires_grad_(False)

    def observe(self, images: Tensor, labels: Tensor) -> Observation:
        self.relaxed.project()
        return super().observe(images, labels)

    def policy_backward(self, seen: Observation, images: Tensor, labels: Tensor) -> None:
        """Add the gradient of the validation loss at ŵ to `.grad` of the policy, and theirs to its control variates."""
        self.checks.validation(images, labels)
        assert isinstance(seen.transformation, RelaxedTransformation)
        draws = seen.transformation.draws
        ahead = self.look_ahead(seen, images, labels)
        seen.alignment, slope = self._along(seen, ahead.v)
        with torch.autocast(self.device.type, enabled=False):
            gradients = self.relaxed.gradients(-self.alpha * seen.alignment, -self.alpha * slope, draws)
        if self.guard.passes(gradients):
            accumulate(self.policy_parameters(), gradients)
        # All weights are equal whatever the policy is, so this is the gradient that trains the network too.
        seen.gradient = list(ahead.own)

    def _along(self, seen: Observation, v: Sequence[Tensor]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """The change of the training pass from w − h v to w + h v, divided by 2 h: that of its losses, and that of the
        derivative of Σ V_i L_i in a shift of all inputs of each sample."""
        network, w = bare(self.network), list(self.w.values())
        leaf = replace(seen, inputs=seen.inputs.detach().requires_grad_())
        training = self.passes.again(leaf)
        h, ends = step_length(training, v).detach(), []
        for length in (h, -h):
            with moved(w, v, length), at_expectation(network):
                losses = training.losses(training.again())
                (gradient,) = torch.autograd.grad(weighted_sum(seen.weights, losses), leaf.inputs)
            ends.append((losses.detach(), gradient.flatten(1).sum(1)))
        (loss_ahead, slope_ahead), (loss_behind, slope_behind) = ends
        return (loss_ahead - loss_behind) / (2 * h), (slope_ahead - slope_behind) / (2 * h)
