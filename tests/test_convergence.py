"""Theorems 1 and 2 are measured as they are stated: rates, gradients and averages against others made by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.alignment import ROUTES

import convergence
from convergence import EYES, Constants, Eyes, Problem, Rates


def test_the_rates_by_hand() -> None:
    """log 1000 = 6.907755, and the logarithm of that 1.932645."""
    rates = Rates.at(1000, c=2, c_prime=3, c_second=5)
    assert rates.alpha == pytest.approx(2 * 6.907755 / 1000, rel=1e-6)
    assert rates.beta == pytest.approx((3 * 1.932645 / 1000) ** 0.5, rel=1e-6)
    assert rates.gamma == pytest.approx(5 * 6.907755 / 1000, rel=1e-6)
    assert convergence.validation_rate(1000) == pytest.approx(6.907755 / 1932.645**0.5, rel=1e-6)
    assert convergence.lemma_rate(1000) == pytest.approx(6.907755**2 / 1e6, rel=1e-6)
    assert convergence.training_rate(1000) == pytest.approx(1.932645 / 6.907755, rel=1e-6)
    assert convergence.exact_training_rate(1000) == pytest.approx(1 / 6.907755, rel=1e-6)
    assert convergence.moved_rate(1000) == pytest.approx(6.907755 * 0.001932645**0.5, rel=1e-6)


def test_the_bias_and_the_conditions_by_hand() -> None:
    constants = Constants(rho1=2, rho2=3, delta1=5, delta2=7, delta1_tilde=11, c1=0.5, c2=13)
    assert constants.bias() == 2 * 2 * 11 * 0.5 * 13
    assert constants.conditions(Rates(alpha=0.1, beta=0.2, gamma=0.4)) == pytest.approx(
        (0.1 * 0.2 * 4 * (0.1 * 25 * 3 + 7), 0.4 * 0.5 * 3)
    )


def test_a_planted_slope_is_found() -> None:
    horizons = [10, 100, 1000, 5000]
    assert convergence.slope(horizons, [7 * t**-0.75 for t in horizons]) == pytest.approx(-0.75)


class Written:
    """Eqs. 2 to 4 once more, straight from the paper: whole graphs, no alignment, P/n by hand."""

    def __init__(self, problem: Problem, rates: Rates) -> None:
        learner = problem.learner
        self.problem, self.rates, self.loss = problem, rates, nn.CrossEntropyLoss(reduction="none")
        self.w = {name: p.detach().clone().requires_grad_() for name, p in learner.network.named_parameters()}
        self.parts = {name: p.detach().clone() for name, p in problem.outputs.named_parameters()}
        self.theta = [name for name in self.parts if learner.extractor is not None or name.startswith("policy.")]
        for name in self.theta:
            self.parts[name].requires_grad_()
        images = problem.train[0].repeat_interleave(len(convergence.FUNCTIONS), 0)
        t = learner.sampler.sample(len(images))
        self.inputs = ma.apply(images, t).double() / 255 - 0.3
        self.labels = problem.train[1].repeat_interleave(len(convergence.FUNCTIONS))
        self.embedding = ma.embed(t).double()

    def outputs(self, w: dict[str, Tensor]) -> Tensor:
        """P_i(w, θ), with the features of w where they are shared; w is not differentiated through."""
        eyes = self.problem.learner.extractor is None
        shared = {f"eyes.{n.removeprefix('body.')}": p.detach() for n, p in w.items() if n.startswith("body.") and eyes}
        parts = {**self.parts, **shared}
        return torch.func.functional_call(self.problem.outputs, parts, (self.inputs, self.embedding))

    def losses(self, w: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(torch.func.functional_call(self.problem.learner.network, w, (inputs,)), labels)

    def training_loss(self, w: dict[str, Tensor], outputs: Tensor) -> Tensor:
        return (outputs * self.losses(w, self.inputs, self.labels)).sum() / len(self.labels)

    def validation_loss(self) -> Tensor:
        """L_val(ŵ(θ)), as a function of θ by one long graph."""
        gradient = torch.autograd.grad(
            self.training_loss(self.w, self.outputs(self.w)), list(self.w.values()), create_graph=True
        )
        moved = {name: p - self.rates.alpha * g for (name, p), g in zip(self.w.items(), gradient, strict=True)}
        images, labels = self.problem.val
        return self.losses(moved, images.double() / 255 - 0.3, labels).mean()

    def iterate(self) -> tuple[float, float, float]:
        """One iteration: both squared norms, and what the step of w adds to L_tr through the weights, over γ."""
        theta = [self.parts[name] for name in self.theta]
        outer = torch.autograd.grad(self.validation_loss(), theta)
        with torch.no_grad():
            for parameter, g in zip(theta, outer, strict=True):
                parameter -= self.rates.beta * g
        before = self.outputs(self.w).detach()
        inner = torch.autograd.grad(self.training_loss(self.w, before), list(self.w.values()))
        with torch.no_grad():
            for parameter, g in zip(self.w.values(), inner, strict=True):
                parameter -= self.rates.gamma * g
            change = self.training_loss(self.w, self.outputs(self.w)) - self.training_loss(self.w, before)
        validation, training = (float(sum(g.square().sum() for g in gradient)) for gradient in (outer, inner))
        return validation, training, float(change) / self.rates.gamma


@pytest.mark.parametrize("eyes", EYES)
def test_a_run_averages_what_the_equations_give(eyes: Eyes) -> None:
    """Three whole iterations by another route, in float64: P/n is exact, and so are both gradients."""
    found = convergence.run(eyes, seed=1, horizon=3)
    written = Written(Problem.of(eyes, seed=1), Rates.at(3))
    by_hand = [written.iterate() for _ in range(3)]
    for name, values in zip(("validation", "training", "drift"), zip(*by_hand, strict=True), strict=True):
        assert getattr(found, name) == pytest.approx(sum(values) / 3, rel=1e-9, abs=1e-14), name
    start = Written(Problem.of(eyes, seed=1), Rates.at(3)).parts
    way = sum((written.parts[name] - start[name]).square().sum() for name in written.theta)
    assert found.moved == pytest.approx(float(way.detach()) ** 0.5, rel=1e-9)
    assert (found.drift == 0) == (eyes == "own")


def test_every_step_sees_the_same_set() -> None:
    problem = Problem.of("shared", seed=0)
    first, second = (problem.learner.observe(*problem.train) for _ in range(2))
    torch.testing.assert_close(first.inputs, second.inputs, rtol=0, atol=0)
    n = convergence.CLASSES * convergence.PER_CLASS
    names = [ma.OPS[int(k)].name for k in first.transformation.second]
    assert names == list(convergence.FUNCTIONS) * n
    torch.testing.assert_close(first.weights, first.outputs / (4 * n))
    with pytest.raises(ValueError, match="5 samples, but 84 transformations"):
        problem.learner.sampler.sample(5)


def test_both_kinds_of_eyes_begin_alike() -> None:
    """So that what differs between them is what the policy sees through."""
    own, shared = (Problem.of(eyes, seed=0) for eyes in EYES)
    for name, parameter in own.learner.policy.named_parameters():
        torch.testing.assert_close(parameter, shared.learner.policy.get_parameter(name), rtol=0, atol=0)
    for name, parameter in own.learner.network.named_parameters():
        torch.testing.assert_close(parameter, shared.learner.network.get_parameter(name), rtol=0, atol=0)
    assert own.learner.extractor is not None
    assert all(p is not own.learner.alpha for p in own.learner.policy_parameters())


@pytest.mark.parametrize("route", ROUTES)
def test_one_over_n_by_every_route(route: str) -> None:
    """The wrapper is no matter of the route: the same gradient of θ as by the whole graph."""
    problem = Problem.of("shared", seed=2)
    problem.learner.route = ROUTES[route]
    with torch.no_grad():
        problem.learner.alpha.fill_(0.3)
    problem.learner.policy_backward(problem.learner.observe(*problem.train), *problem.val)
    written = Written(problem, Rates(alpha=0.3, beta=0, gamma=0))
    expected = torch.autograd.grad(written.validation_loss(), [written.parts[name] for name in written.theta])
    for name, gradient in zip(written.theta, expected, strict=True):
        close = {"rtol": 1e-4, "atol": 1e-8} if route == "difference" else {"rtol": 1e-9, "atol": 1e-14}
        torch.testing.assert_close(problem.outputs.get_parameter(name).grad, gradient, **close)


def test_norms_of_gradients_and_hessians() -> None:
    """f(w) = ½ wᵀ A w + bᵀ w of two samples: its gradient is A w + b, its Hessian A."""
    matrices = torch.stack([torch.diag(torch.tensor([1.0, -6.0, 2.0])), torch.diag(torch.tensor([4.0, 0.5, 0.0]))])
    matrices, offsets = matrices.double(), torch.tensor([[0.0, 0, 0], [3, 0, 4]]).double()

    def function(at: dict[str, Tensor], matrix: Tensor, offset: Tensor) -> Tensor:
        w = torch.cat([at["a"], at["b"]])
        return w @ matrix @ w / 2 + offset @ w

    at = {"a": torch.zeros(1).double(), "b": torch.zeros(2).double()}
    assert convergence.gradient_norm(function, at, matrices, offsets) == pytest.approx(5)
    assert convergence.hessian_norm(function, at, matrices, offsets) == pytest.approx(6, rel=1e-3)


@pytest.mark.parametrize("eyes", EYES)
def test_the_constants_bound_what_a_step_does(eyes: Eyes) -> None:
    """Lemma 1 with the constants seen, and the gradients of P and of the losses sample by sample."""
    problem = Problem.of(eyes, seed=0)
    learner = problem.learner
    seen = learner.observe(*problem.train)
    found = convergence.look(problem, seen)
    w, theta = list(learner.w.values()), learner.policy_parameters()

    def largest(values: Tensor, parameters: list[nn.Parameter]) -> float:
        rows = [torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True) for v in values]
        return max(float(sum(g.square().sum() for g in row if g is not None)) ** 0.5 for row in rows)

    outputs = problem.outputs(seen.inputs, ma.embed(seen.transformation).double())
    images, labels = problem.val
    validation = learner.loss(learner.network(learner.prepare(images)), labels)
    assert found.rho1 == pytest.approx(max(largest(seen.losses, w), largest(validation, w)))
    assert found.delta1 == pytest.approx(largest(outputs, theta))
    assert found.delta1_tilde == (pytest.approx(largest(outputs, w)) if eyes == "shared" else 0)
    assert found.c1 == float(outputs.detach().max())
    assert found.c2 == pytest.approx(float(torch.cat([seen.losses, validation]).detach().max()))
    learner.policy_backward(seen, *problem.val)
    assert convergence.squared_norm(theta) ** 0.5 <= float(learner.alpha) * found.rho1**2 * found.delta1


def test_what_is_kept_falls_with_the_horizon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convergence.main((8, 32), 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convergence.json", "convergence.png"]
    assert "validation, own eyes: falls as T^-" in capsys.readouterr().out
    kept = json.loads((tmp_path / "convergence.json").read_text())
    found = {(run["eyes"], run["horizon"]): run for run in kept["runs"]}
    for slope in kept["slopes"]:
        first, last = (found[slope["eyes"], horizon][slope["average"]] for horizon in (8, 32))
        assert slope["mean"] == pytest.approx(math.log(last / first, 4))
        assert last < first
    assert found["shared", 32]["training"] < found["shared", 32]["bias"]
