"""Theorems 1 and 2, measured: how two averages of squared gradients fall with the horizon T.

    python benchmarks/convergence.py --out results/convergence

The theorems run Algorithm 1 for T iterations, with step sizes that are fixed by T,

    α = c log T / T,    β = √(c' log log T / T),    γ = c'' log T / T,

and bound two averages over the iterations t:

    validation    ‖∇_θ L_val(ŵ_t(θ_t))‖²       by the order of log T / √(T log log T), whatever the policy sees through
    training      ‖∇_w L_tr(w_t, θ_{t+1})‖²    goes to 0 where the policy has its own feature extractor (in the proof as
                                               log log T / log T), and to 2 ρ₁ δ̃₁ C₁ C₂ at most where it shares the
                                               task network's

The problem here is chosen so that their assumptions hold. L_tr is a sum over a finite set: each of a few images under
each of a few functions, whose magnitudes and signs are drawn once. Every batch is the whole set, so gradients are exact
and their variance, which has to be bounded, is zero. The networks are smooth (tanh, no batch normalisation), so losses
and outputs have bounded values and derivatives as long as w and θ stay bounded. α is fixed. Weights are P/n, as in
Eqs. 2 to 4, and not P/ΣP as in the paper's experiments. The smallest T is large enough for the theorems' conditions
with the constants measured (`Constants.conditions`). The steps are those of `Learner`, in float64 and by an exact
route; both gradients are what it leaves in `.grad`.

The constants of the bounds are estimates from below: the largest values at a few evenly spaced iterations of a run,
with norms of Hessians by power iteration. Over all w and θ they are larger.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import tyro
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.optim import SGD

from metaaugment.distributed import whole_length
from metaaugment.embedding import embed
from metaaugment.guard.checks import Batch
from metaaugment.guard.gradients import norm
from metaaugment.guard.replay import seeded
from metaaugment.lab.data import Images, dataset
from metaaugment.lab.data.splits import Split
from metaaugment.lab.report.picture import save
from metaaugment.lab.seeds import INITIAL, derived_seed
from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.machine import commit, machine
from metaaugment.learner import Learner
from metaaugment.observation import Observation
from metaaugment.ops import INDEX, MAX_MAGNITUDE
from metaaugment.policy import Around, PolicyNetwork
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation

Eyes = Literal["own", "shared"]
EYES: tuple[Eyes, ...] = ("own", "shared")
HORIZONS = tuple(2**k for k in range(8, 14))

# Few classes: w moves only for a time γT = c'' log T, in which ten classes are hardly learned, and until they are, the
# average does not fall.
CLASSES, PER_CLASS, SIZE, HIDDEN = 3, 7, 8, 8
FUNCTIONS = ("Identity", "Rotate", "TranslateX", "Contrast")
MAGNITUDES = 1  # what the seed of magnitudes and signs is derived by
LOOKS = 4  # iterations of a run at which the constants are measured
POWER = 10  # iterations for the norm of a Hessian


# -- what the theorems say ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The three step sizes of a horizon; the theorems leave their factors c, c' and c'' open."""

    alpha: float
    beta: float
    gamma: float

    @classmethod
    def at(cls, horizon: int, c: float = 4.0, c_prime: float = 4.0, c_second: float = 4.0) -> "Rates":
        log = math.log(horizon)
        return cls(c * log / horizon, math.sqrt(c_prime * math.log(log) / horizon), c_second * log / horizon)


def validation_rate(horizon: float) -> float:
    """Both theorems: log T / √(T log log T)."""
    return math.log(horizon) / math.sqrt(horizon * math.log(math.log(horizon)))


def lemma_rate(horizon: float) -> float:
    """Lemma 1 on the same gradients: each is at most α ρ₁² δ₁, so the average of squares is of order (log T / T)²."""
    return (math.log(horizon) / horizon) ** 2


def moved_rate(horizon: float) -> float:
    """How far θ moves in T steps of at most β α ρ₁² δ₁, by Lemma 1 again: log T √(log log T / T), which goes to 0."""
    return math.log(horizon) * math.sqrt(math.log(math.log(horizon)) / horizon)


def training_rate(horizon: float) -> float:
    """The proof of Theorem 1: log log T / log T."""
    return math.log(math.log(horizon)) / math.log(horizon)


def exact_training_rate(horizon: float) -> float:
    """What is left of Theorem 1's bound where gradients are exact: 1 / log T."""
    return 1 / math.log(horizon)


@dataclass(frozen=True)
class Constants:
    """The theorems' constants, by their names: bounds for single samples; of gradients and Hessians, on the norm."""

    rho1: float  # of ∇_w of the losses, training and validation
    rho2: float  # of the Hessian of the losses in w
    delta1: float  # of ∇_θ P
    delta2: float  # of the Hessian of P in θ
    delta1_tilde: float  # of ∇_w P: 0 where the policy has its own feature extractor
    c1: float  # of P
    c2: float  # of the losses

    def bias(self) -> float:
        """Theorem 2: what the training average may keep, however large T is."""
        return 2 * self.rho1 * self.delta1_tilde * self.c1 * self.c2

    def conditions(self, rates: Rates) -> tuple[float, float]:
        """Two numbers that must be below 1 for T to count as sufficiently large."""
        a, b = rates.alpha, rates.beta
        of_policy = a * b * self.rho1**2 * (a * self.delta1**2 * self.rho2 + self.delta2)
        return of_policy, rates.gamma * self.c1 * self.rho2


# -- a problem on which it holds ---------------------------------------------------------------------------------------


class Standing(Sampler):
    """Each image gets each of the functions, with magnitudes and signs drawn once: the same at every call."""

    def __init__(self, images: int, functions: Sequence[str], generator: torch.Generator) -> None:
        second = torch.tensor([INDEX[name] for name in functions]).repeat(images)
        self.transformation = Transformation.draw(torch.full_like(second, INDEX["Identity"]), second, generator)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        if n != len(self.transformation):
            raise ValueError(f"{n} samples, but {len(self.transformation)} transformations; give the whole set")
        return self.transformation


class SmoothPolicy(PolicyNetwork):
    """The policy network with tanh, since ReLU has no second derivative, and embeddings scaled to at most 1."""

    def forward(
        self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"], *evidence: Tensor
    ) -> Float[Tensor, " n"]:
        small = embedding / (MAX_MAGNITUDE + 1)
        both = torch.cat([self.embedding(small).tanh(), self.feature(features).tanh()], dim=1)
        return self.output(both).sigmoid().squeeze(1)


class Unnormalized(Around):
    """Weights losses by another policy's outputs as Eqs. 2 to 4 are written: P/n, with n of the global batch."""

    def normalize(self, outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return outputs / whole_length(outputs)


class SmallNetwork(nn.Module):
    """One hidden layer of tanh over grey pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(SIZE**2, HIDDEN), nn.Tanh())
        self.output = nn.Linear(HIDDEN, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.body(images))


class Outputs(nn.Module):
    """P as a function of all it depends on: the policy, and the network it sees through."""

    def __init__(self, eyes: SmallNetwork, policy: nn.Module) -> None:
        super().__init__()
        self.eyes, self.policy = eyes.body, policy

    def forward(self, inputs: Tensor, embedding: Tensor) -> Float[Tensor, " n"]:
        return self.policy(self.eyes(inputs), embedding)


@dataclass(frozen=True)
class Problem:
    """A learner, and the batches that it gets at every step."""

    learner: Learner
    outputs: Outputs
    train: Batch
    val: Batch

    @classmethod
    def of(cls, eyes: Eyes, seed: int) -> "Problem":
        """Digits of the first classes. Everything is drawn from the seed, and is the same for both kinds of eyes."""
        data = dataset("digits", seed=seed, size=SIZE, per_class=PER_CLASS)
        train, val = (of_first_classes(split) for split in (data.train, data.val))
        sampler = Standing(len(train[0]), FUNCTIONS, torch.Generator().manual_seed(derived_seed(seed, MAGNITUDES)))
        with seeded(torch.device("cpu"), derived_seed(seed, INITIAL)):
            network, own = (SmallNetwork(CLASSES).double() for _ in range(2))
            policy = Unnormalized(SmoothPolicy(HIDDEN, HIDDEN).double())
        extractor = own if eyes == "own" else None
        learner = Learner(
            network, sampler, policy, extractor=extractor, route="forward", copies=len(FUNCTIONS), prepare=centered
        )
        learner.alpha.requires_grad_(False)
        return cls(learner, Outputs(extractor or network, policy), train, val)


def of_first_classes(data: Split) -> Batch:
    """Images of the first classes, with one channel; digits have three identical ones."""
    assert isinstance(data, Images)
    kept = data.labels < CLASSES
    return data.images[kept, :1].contiguous(), data.labels[kept]


def centered(images: Tensor) -> Tensor:
    """Centred at the mean of the digits: what all images have in common would make the loss steep and teach nothing."""
    return images.double() / 255 - 0.3


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What T iterations gave, with one kind of eyes and one seed."""

    eyes: Eyes
    seed: int
    horizon: int
    validation: float  # average of ‖∇_θ L_val(ŵ_t(θ_t))‖²
    training: float  # average of ‖∇_w L_tr(w_t, θ_{t+1})‖²
    drift: float  # average of what a step of w adds to L_tr by changing the weights, over γ; at most half the bias
    moved: float  # ‖θ_T − θ_0‖
    constants: Constants
    bias: float
    conditions: tuple[float, float]
    seconds: float


def run(eyes: Eyes, seed: int, horizon: int) -> Run:
    """Algorithm 1 for T iterations, measured; it starts the same way for every T."""
    started, problem, rates = time.perf_counter(), Problem.of(eyes, seed), Rates.at(horizon)
    learner = problem.learner
    with torch.no_grad():
        learner.alpha.fill_(rates.alpha)
    w, theta = list(learner.w.values()), learner.policy_parameters()
    beginning = [parameter.detach().clone() for parameter in theta]
    task, outer = SGD(w, rates.gamma), SGD(theta, rates.beta)
    validation, training, drift, constants = [], [], [], []
    for t in range(horizon):
        seen = learner.observe(*problem.train)
        learner.policy_backward(seen, *problem.val)
        validation.append(squared_norm(theta))
        if t % math.ceil(horizon / LOOKS) == 0:
            constants.append(look(problem, seen))
        outer.step()
        outer.zero_grad()
        learner.weighted_loss(seen).backward()
        training.append(squared_norm(w))
        before = outputs(problem, seen) if eyes == "shared" else None  # own eyes do not depend on w
        task.step()
        task.zero_grad()
        drift.append(0.0 if before is None else added(problem, seen, before) / rates.gamma)
    most = Constants(*(max(getattr(one, field.name) for one in constants) for field in fields(Constants)))
    return Run(
        eyes=eyes,
        seed=seed,
        horizon=horizon,
        validation=statistics.fmean(validation),
        training=statistics.fmean(training),
        drift=statistics.fmean(drift),
        moved=float(norm([now.detach() - then for now, then in zip(theta, beginning, strict=True)])),
        constants=most,
        bias=most.bias(),
        conditions=most.conditions(rates),
        seconds=time.perf_counter() - started,
    )


def squared_norm(parameters: Sequence[nn.Parameter]) -> float:
    """‖∇‖² of the gradient that the learner left in `.grad`."""
    return float(norm([p.grad for p in parameters if p.grad is not None]) ** 2)


@torch.no_grad()
def outputs(problem: Problem, seen: Observation) -> Float[Tensor, " n"]:
    """P of the samples seen, with w and θ as they are now."""
    return problem.outputs(seen.inputs, embed(seen.transformation).to(seen.inputs.dtype))


@torch.no_grad()
def added(problem: Problem, seen: Observation, before: Float[Tensor, " n"]) -> float:
    """What a step of w, which took the weights as fixed, adds to L_tr by changing them: I₄₁ in Theorem 2's proof.

    Above 0 this works against convergence, below 0 for it.
    """
    losses = problem.learner.loss(problem.learner.network(seen.inputs), seen.labels)
    return float(((outputs(problem, seen) - before) * losses).mean())


# -- constants ---------------------------------------------------------------------------------------------------------

Parameters = dict[str, Tensor]
Single = Callable[..., Tensor]  # from parameters and the tensors of one sample to a number


def look(problem: Problem, seen: Observation) -> Constants:
    """The constants at w and θ as they are now: the largest over samples."""
    learner, network = problem.learner, problem.learner.network
    w = {name: parameter.detach() for name, parameter in network.named_parameters()}
    everything = {name: parameter.detach() for name, parameter in problem.outputs.named_parameters()}
    shared = {name for name in everything if name.startswith("eyes.") and learner.extractor is None}
    of_w, theta = ({n: p for n, p in everything.items() if (n in shared) == part} for part in (True, False))

    def loss(parameters: Parameters, image: Tensor, label: Tensor) -> Tensor:
        return learner.loss(functional_call(network, parameters, (image[None],)), label[None])[0]

    def output(parameters: Parameters, image: Tensor, embedding: Tensor) -> Tensor:
        return functional_call(problem.outputs, {**everything, **parameters}, (image[None], embedding[None]))[0]

    images, labels = problem.val
    both = (torch.cat([seen.inputs, learner.prepare(images)]), torch.cat([seen.labels, labels]))
    weighed = (seen.inputs, embed(seen.transformation).to(seen.inputs.dtype))
    return Constants(
        rho1=gradient_norm(loss, w, *both),
        rho2=hessian_norm(loss, w, *both),
        delta1=gradient_norm(output, theta, *weighed),
        delta2=hessian_norm(output, theta, *weighed),
        delta1_tilde=gradient_norm(output, of_w, *weighed) if of_w else 0.0,
        c1=float(seen.outputs.detach().max()),
        c2=float(vmap(loss, (None, 0, 0))(w, *both).max()),
    )


def gradient_norm(function: Single, parameters: Parameters, *samples: Tensor) -> float:
    """The largest ‖∇‖ over the samples."""
    gradients = vmap(grad(function), (None, *(0 for _ in samples)))(parameters, *samples)
    return float(lengths(gradients).max())


def hessian_norm(function: Single, parameters: Parameters, *samples: Tensor) -> float:
    """The largest spectral norm of a Hessian over the samples, estimated from below by power iteration."""

    def product(direction: Parameters, *sample: Tensor) -> Parameters:
        return jvp(lambda at: grad(function)(at, *sample), (parameters,), (direction,))[1]

    generator = torch.Generator().manual_seed(0)
    n, found = len(samples[0]), torch.zeros(())
    direction = {name: torch.randn(n, *p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}
    for _ in range(POWER):
        length = lengths(direction).clamp(min=torch.finfo(torch.float64).tiny)
        direction = {name: d / length.view(-1, *[1] * (d.ndim - 1)) for name, d in direction.items()}
        direction = vmap(product)(direction, *samples)
        found = lengths(direction)
    return float(found.max())


def lengths(vectors: Parameters) -> Float[Tensor, " n"]:
    return torch.stack([v.flatten(1).square().sum(1) for v in vectors.values()]).sum(0).sqrt()


# -- what is said of all runs ------------------------------------------------------------------------------------------

Order = Callable[[float], float]
# The theorem's bound on each average, and a sharper one that holds here by the same proofs. With shared eyes the
# training average is bounded by a constant, unless the drift is below 0 (the remark after Theorem 2).
BOUNDS: dict[tuple[Eyes, str], tuple[Order, Order]] = {
    ("own", "validation"): (validation_rate, lemma_rate),
    ("shared", "validation"): (validation_rate, lemma_rate),
    ("own", "training"): (training_rate, exact_training_rate),
    ("shared", "training"): (lambda horizon: 1.0, exact_training_rate),
}


@dataclass(frozen=True)
class Slope:
    """How an average falls with T: the exponent of T that fits it best, beside those of its bounds."""

    eyes: Eyes
    average: str  # "validation" or "training"
    mean: float  # over seeds
    deviation: float | None
    theorem: float  # of the bound that the theorem states, fitted over the same horizons
    sharper: float


def slope(horizons: Sequence[float], values: Sequence[float]) -> float:
    """The exponent a of the power T^a that fits best, by least squares in logarithms."""
    return statistics.linear_regression([math.log(t) for t in horizons], [math.log(v) for v in values]).slope


def slopes(runs: Sequence[Run]) -> list[Slope]:
    found = []
    horizons = sorted({one.horizon for one in runs})
    for (eyes, average), bounds in BOUNDS.items():
        mine = [one for one in runs if one.eyes == eyes]
        by_seed = [[one for one in mine if one.seed == seed] for seed in sorted({one.seed for one in mine})]
        fitted = [slope([one.horizon for one in some], [getattr(one, average) for one in some]) for some in by_seed]
        deviation = statistics.stdev(fitted) if len(fitted) > 1 else None
        theorem, sharper = (slope(horizons, [bound(horizon) for horizon in horizons]) for bound in bounds)
        found.append(Slope(eyes, average, statistics.fmean(fitted), deviation, theorem, sharper))
    return found


def in_words(runs: Sequence[Run]) -> Iterator[str]:
    """A line on each slope, and on what Theorem 2's bias comes to."""
    for one in slopes(runs):
        deviation = "" if one.deviation is None else f" ± {one.deviation:.3f}"
        yield (
            f"{one.average}, {one.eyes} eyes: falls as T^{one.mean:.3f}{deviation}; "
            f"the theorem's bound as T^{one.theorem:.3f}, the sharper one as T^{one.sharper:.3f}"
        )
    shared = [run for run in runs if run.eyes == "shared"]
    drift = [run.drift for run in shared]
    yield (
        f"bias of shared eyes: Theorem 2 allows up to {allowed(runs):.3g}; changing weights added {min(drift):.1e} to "
        f"{max(drift):.1e}, and the whole training average is {max(run.training for run in shared):.1e} or less"
    )
    if late := sorted({run.horizon for run in runs if max(run.conditions) >= 1}):
        yield f"not yet sufficiently large for the theorems, under the constants seen: T = {', '.join(map(str, late))}"


def allowed(runs: Sequence[Run]) -> float:
    """The largest bias that Theorem 2 allows, over the runs with shared eyes."""
    return max(run.bias for run in runs if run.eyes == "shared")


def figure(runs: Sequence[Run]) -> Figure:
    """Both averages and the distance that θ moves, against T, beside the orders of their bounds; all with slopes."""
    drawing = Figure(figsize=(12.5, 4), layout="constrained")
    validation, training, moved = drawing.subplots(1, 3)
    orders = {r"$\log T/\sqrt{T\log\log T}$, theorems": validation_rate, r"$(\log T/T)^2$, Lemma 1": lemma_rate}
    panel(validation, runs, "validation", orders)
    validation.set_title(r"average of $\|\nabla_\theta L^{val}(\hat w_t(\theta_t))\|^2$")
    orders = {r"$\log\log T/\log T$, Theorem 1": training_rate, r"$1/\log T$, no variance": exact_training_rate}
    panel(training, runs, "training", orders)
    training.set_title(r"average of $\|\nabla_w L^{tr}(w_t, \theta_{t+1})\|^2$")
    bias = f"Theorem 2 lets shared eyes\nkeep up to {allowed(runs):.2g}"
    training.text(0.04, 0.05, bias, transform=training.transAxes, fontsize=8)
    panel(moved, runs, "moved", {r"$T\alpha\beta$, Lemma 1": moved_rate})
    moved.set_title(r"$\|\theta_T - \theta_0\|$, how far the policy moves")
    return drawing


def panel(axes: Axes, runs: Sequence[Run], name: str, orders: dict[str, Order]) -> None:
    """Geometric means, whose slope is the mean slope of the seeds, and deviations; orders start where own eyes do."""
    horizons = sorted({run.horizon for run in runs})
    drawn = []
    for eyes in EYES:
        values = [[getattr(r, name) for r in runs if r.eyes == eyes and r.horizon == horizon] for horizon in horizons]
        means = [statistics.geometric_mean(some) for some in values]
        spread = [statistics.stdev(some) if len(some) > 1 else 0.0 for some in values]
        label = f"{eyes} eyes: {slope(horizons, means):.3f}"
        axes.errorbar(horizons, means, spread, marker="o", markersize=4, capsize=3, label=label)
        drawn.append(means)
    for (said, order), style in zip(orders.items(), ("--", ":"), strict=False):
        line = [order(horizon) * drawn[0][0] / order(horizons[0]) for horizon in horizons]
        axes.plot(horizons, line, style, color="grey", label=f"{said}: {slope(horizons, line):.3f}")
    axes.margins(y=0.12)
    axes.set(xscale="log", yscale="log", xlabel="T")
    axes.set_xticks(horizons, [str(horizon) for horizon in horizons])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.legend(fontsize=8, title="slopes", title_fontsize=8)


def main(horizons: tuple[int, ...] = HORIZONS, seeds: int = 3, out: Path | None = None) -> None:
    """Eleven minutes on two cores. With --out DIR, the figures and a picture of them are kept there.

    Two horizons or more, each at least 3, where log log T is positive.
    """
    code = commit()
    todo = list(itertools.product(sorted(set(horizons)), range(seeds), EYES))
    runs = [run(eyes, seed, horizon) for horizon, seed, eyes in track(todo, "shortest first")]
    print(*in_words(runs), sep="\n")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found = {"slopes": [asdict(one) for one in slopes(runs)], "runs": [asdict(one) for one in runs]}
        seconds = sum(one.seconds for one in runs)
        write_json(out / "convergence.json", {"commit": code, "machine": machine("cpu"), "seconds": seconds, **found})
        save(figure(runs), out / "convergence.png")


if __name__ == "__main__":
    tyro.cli(main)
