"""DADA's policy, relaxed: a learner whose augmentation follows the gradient of the validation loss.

A sub-policy is drawn from a categorical distribution, each of its two functions is applied or not by a Bernoulli, and
works at a level: log-odds, probabilities and levels are all learned by ∇ L_val(ŵ) through one inner update
ŵ = w − α ∇ Σ V_i L_i(w) with equal weights V, as in DARTS. Every image draws its own sub-policy; DADA draws one for a
mini-batch, which is the same in the mean and noisier.

What reaches the policy of ∇ L_val(ŵ) is a finite difference between the training passes at w + h v and w − h v, with
v = ∇ L_val(ŵ): that of the losses says which draws were good ones, that of the gradients in the inputs where the levels
should go.

The estimator is the one DADA publishes.

- Choices: RELAX (Grathwohl et al., 2018), the score function with a control variate, which is a network that sees the
  relaxed choices and is learned to lower the variance. It is without bias. Here one stands for the selection and one
  for the application given the selection, so that sub-policies which were not drawn add no noise. In DADA's released
  code the control variate does not reach the policy: both ends of the finite difference subtract the same one. Here it
  stands for the difference itself.
- Levels: straight-through. The inputs of the network count as growing by one, in each pixel, with the level of each
  function applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from metaaugment.baselines.found import Function
from metaaugment.distributed import bare
from metaaugment.hypergradient import at_expectation, moved, step_length
from metaaugment.learner import Learner, accumulate
from metaaugment.observation import Observation, check_batch
from metaaugment.ops import INDEX, MAX_MAGNITUDE, OPS
from metaaugment.policy import UniformPolicy
from metaaugment.sampler import StillSampler
from metaaugment.transformation import Transformation

# DADA's 15, in its order: of two, the one that stands first here is applied first. Identity is "not applied".
FUNCTIONS = (
    "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "AutoContrast", "Invert", "Equalize", "Solarize",
    "Posterize", "Contrast", "Color", "Brightness", "Sharpness", "Cutout",
)  # fmt: skip

# How near to 0 and 1 probabilities and uniform numbers may come: their logarithms are taken.
MARGIN = 1e-6


@dataclass(frozen=True)
class Draws:
    """The uniform numbers behind the choices of n images: `selected` and `applied` decide them, `relaxed_*` are for
    choices that are relaxed anew, given what was decided."""

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
        """On another tensor's device, in its precision."""
        return Draws(*(u.to(like) for u in (self.selected, self.applied, self.relaxed_selected, self.relaxed_applied)))


class ControlVariate(nn.Module):
    """A number for each relaxed choice in [0, 1]^d; zero at first, which makes RELAX the plain score function."""

    def __init__(self, d: int, hidden: int = 100) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(d, hidden), nn.Linear(hidden, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, choices: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        return self.output(self.hidden(2 * choices - 1).tanh()).squeeze(1)


class RelaxedPolicy(UniformPolicy):
    """A distribution over the K unordered pairs of functions, with probabilities and levels, [K, 2] each, in [0, 1].

    It starts where DADA does: all pairs alike, probabilities and levels one half.
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
        """Back into their ranges, which a step may have left."""
        self.probabilities.clamp_(MARGIN, 1 - MARGIN)
        self.levels.clamp_(0, 1)

    def choose(self, draws: Draws) -> tuple[Int64[Tensor, " n"], Bool[Tensor, "n 2"]]:
        """Which sub-policy each image gets, and which of its functions are applied."""
        selected = (self.logits.log_softmax(0) + gumbel(draws.selected)).argmax(1)
        return selected, self.probabilities[selected].logit() + draws.applied.logit() > 0

    def gradients(self, worth: Float[Tensor, " n"], slope: Float[Tensor, " n"], draws: Draws) -> list[Tensor]:
        """For all parameters in their order, the gradient of the expectation of Σ worth_i / n over what is drawn.

        `worth` is what the draw of each image led to; `slope` the derivative of that sum in a shift of its inputs.
        """
        selected, applied = self.choose(draws)
        chances = [self._selection(worth, draws, selected), self._application(worth, draws, selected, applied)]
        variance = torch.stack([gradient.square().sum() for gradient in chances]).sum()
        variates = [*self.of_selection.parameters(), *self.of_application.parameters()]
        learned = torch.autograd.grad(variance, variates)
        # A product with ones and zeros: on a GPU it adds in the same order every time, which index_add_ does not.
        which = nn.functional.one_hot(selected, len(self.logits)).to(slope.dtype)
        levels = which.T @ (slope[:, None] * (applied & self.takes_level[selected]))
        return [*(gradient.detach() for gradient in chances), levels, *learned]

    def likeliest(self, count: int) -> list[tuple[Function, Function]]:
        """So many sub-policies, the likeliest first; functions that take no level have none."""
        self.project()
        order = self.logits.argsort(descending=True, stable=True)[:count].tolist()
        rows = zip(self.names, self.probabilities.tolist(), (self.levels * self.takes_level).tolist(), strict=True)
        pairs = [[Function(*function) for function in zip(*row, strict=True)] for row in rows]
        return [(pairs[place][0], pairs[place][1]) for place in order]

    def favourite(self) -> tuple[float, tuple[str, str]]:
        """The largest share that a sub-policy has, and its functions."""
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
    """The gradient of the expected worth f in a parameter: (f − c(z̃)) ∇ log p(b) + ∇ c(z) − ∇ c(z̃), in the mean.

    `free` is z, which the choice b was made from; `tied` is z̃, drawn anew given b; `variate` is c. It has a graph:
    what learns the control variate differentiates it once more.
    """
    again, one = variate(tied), torch.ones_like(worth)
    outer = [worth - again, one, -one]
    (total,) = torch.autograd.grad([log_p, variate(free), again], [parameter], outer, create_graph=True)
    return total / len(worth)


def gumbel(u: Tensor) -> Tensor:
    return -(-u.log()).log()


def gumbel_given(log_p: Float[Tensor, " K"], best: Int64[Tensor, " n"], u: Float[Tensor, "n K"]) -> Tensor:
    """log p plus Gumbel noise, given which of the K is largest: that one is a Gumbel number, the others fall below."""
    largest = u.gather(1, best[:, None]).log()
    below = -(-u.log() / log_p.exp() - largest).log()
    return below.scatter(1, best[:, None], -(-largest).log())


def logistic_given(p: Tensor, above: Bool[Tensor, "n 2"], u: Tensor) -> Tensor:
    """The log-odds of p plus logistic noise, given whether it is above zero."""
    v = torch.where(above, 1 - p + u * p, u * (1 - p))
    return p.logit() + v.clamp(MARGIN, 1 - MARGIN).logit()


# -- in the loop -------------------------------------------------------------------------------------------------------


class RelaxedSampler(StillSampler):
    """Draws by a relaxed policy, and keeps what the choices of the last mini-batch were made from."""

    def __init__(self, policy: RelaxedPolicy) -> None:
        self.policy = policy
        self.draws: Draws | None = None

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        policy = self.policy
        self.draws = Draws.draw(n, len(policy.logits), generator).to(policy.logits)
        selected, applied = policy.choose(self.draws)
        functions = torch.where(applied, policy.functions[selected], INDEX["Identity"])
        magnitudes = MAX_MAGNITUDE * policy.levels[selected].double()
        return Transformation.draw(functions[:, 0], functions[:, 1], generator, magnitudes)


class RelaxedLearner(Learner):
    """Learns a relaxed policy while a network trains; α is a step size that stays as it is given.

    DADA's inner update has the optimizer's momentum and weight decay besides, which do not depend on the policy, and
    its step falls with the learning rate. In one process only.
    """

    def __init__(self, network: nn.Module, policy: RelaxedPolicy, **settings: Any) -> None:
        self.relaxed, self.drawn = policy, RelaxedSampler(policy)
        super().__init__(network, self.drawn, policy, **settings)
        self.alpha.requires_grad_(False)

    def observe(self, images: Tensor, labels: Tensor) -> Observation:
        self.relaxed.project()
        return super().observe(images, labels)

    def policy_backward(self, seen: Observation, images: Tensor, labels: Tensor) -> None:
        """Add to `.grad` of the policy its gradient of the validation loss at ŵ, and to its control variates theirs."""
        check_batch(images, labels, self.device, "validation")
        assert self.drawn.draws is not None
        inner, g = self._inner_gradient(seen, retain_graph=False)
        v = self._gradient_ahead(seen, g, images, labels)
        seen.alignment, slope = self._along(seen, v)
        with torch.autocast(self.device.type, enabled=False):
            gradients = self.relaxed.gradients(-self.alpha * seen.alignment, -self.alpha * slope, self.drawn.draws)
        if self._finite(gradients):
            accumulate(self.policy_parameters(), gradients)
        # All weights are equal whatever the policy is, so this is the gradient that trains the network too.
        seen.gradient = inner

    def _along(self, seen: Observation, v: Sequence[Tensor]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """How the training pass changes from w − h v to w + h v, by 2 h: its losses, and the derivative of Σ V_i L_i in
        a shift of all inputs of each sample."""
        network, w = bare(self.network), list(self.parameters.values())
        leaf = replace(seen, inputs=seen.inputs.detach().requires_grad_())
        training = self._pass(leaf)
        h, ends = step_length(training, v).detach(), []
        for length in (h, -h):
            with moved(w, v, length), at_expectation(network):
                losses = training.losses(training.again(network))
                (gradient,) = torch.autograd.grad((seen.weights * losses).sum(), leaf.inputs)
            ends.append((losses.detach(), gradient.flatten(1).sum(1)))
        (loss_ahead, slope_ahead), (loss_behind, slope_behind) = ends
        return (loss_ahead - loss_behind) / (2 * h), (slope_ahead - slope_behind) / (2 * h)
