"""DADA's search: its estimator against brute force, what it leaves alone, what it learns, and going on after a stop."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical
from torch.func import functional_call

import metaaugment as ma
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import SubPolicies
from metaaugment.lab.data import dataset
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.experiment import assemble
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import dada
from metaaugment.lab.search.relaxed import (
    FUNCTIONS,
    Draws,
    RelaxedLearner,
    RelaxedPolicy,
    RelaxedTransformation,
    gumbel,
    gumbel_given,
    logistic_given,
)
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.trainer import Trainer
from metaaugment.observation import Observation
from metaaugment.ops import INDEX, OPS

import searches
from searches import QUIET, Moment, asked_to_stop, assert_goes_on, killed, rows

EPOCHS = 10
FEW = ("Invert", "Rotate", "Brightness")


def shaken(functions: tuple[str, ...] = FEW, variates: float = 0.3) -> RelaxedPolicy:
    """A policy in float64 away from its start, whose control variates say something of about this size."""
    policy = RelaxedPolicy(functions).double()
    with torch.no_grad():
        policy.logits.normal_()
        policy.probabilities.uniform_(0.2, 0.8)
        policy.levels.uniform_(0.1, 0.9)
        for variate in (policy.of_selection, policy.of_application):
            variate.output.weight.normal_(std=variates)
            variate.output.bias.normal_(std=variates)
    return policy


def draws(n: int, policy: RelaxedPolicy, seed: int = 0) -> Draws:
    return Draws.draw(n, len(policy.logits), torch.Generator().manual_seed(seed)).to(policy.logits)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_the_sub_policies_are_the_unordered_pairs_of_what_dada_published() -> None:
    policy = RelaxedPolicy()
    assert len(policy.names) == len({frozenset(pair) for pair in policy.names}) == 15 * 14 // 2
    assert set(FUNCTIONS) == {op.name for op in OPS} - {"Identity"}
    released = published.find("dada-cifar10")
    assert isinstance(released, SubPolicies)
    # Their order within a pair is the released one, wherever the released policy has the pair.
    assert {(first.name, second.name) for first, second in released.sub_policies} <= set(policy.names)


def test_choices_follow_the_distribution() -> None:
    policy = shaken()
    selected, applied = policy.choose(draws(100_000, policy))
    shares = torch.bincount(selected, minlength=3) / len(selected)
    torch.testing.assert_close(shares.double(), policy.logits.softmax(0).detach(), atol=5e-3, rtol=0)
    for pair in range(3):
        share = applied[selected == pair].double().mean(0)
        torch.testing.assert_close(share, policy.probabilities[pair].detach(), atol=1e-2, rtol=0)


def test_what_is_drawn_anew_agrees_with_the_choice_and_is_distributed_as_before_it() -> None:
    policy = shaken()
    drawn = draws(200_000, policy)
    selected, applied = policy.choose(drawn)
    log_p, p = policy.logits.log_softmax(0).detach(), policy.probabilities[selected].detach()
    tied = gumbel_given(log_p, selected, drawn.relaxed_selected)
    assert torch.equal(tied.argmax(1), selected)
    moments(tied, log_p + gumbel(drawn.selected))
    tied = logistic_given(p, applied, drawn.relaxed_applied)
    assert torch.equal(tied > 0, applied)
    moments(tied, p.logit() + drawn.applied.logit())


def moments(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.mean(0), other.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(one.T.cov(), other.T.cov(), atol=0.06, rtol=0.02)


def test_inputs_are_what_apply_gives_bit_for_bit() -> None:
    policy = RelaxedPolicy()
    with torch.no_grad():
        policy.levels.uniform_()
    network = ma.network("small-cnn", 5)
    learner = RelaxedLearner(network, policy, space="faa", fill=7, generator=torch.Generator().manual_seed(3))
    images, labels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 5, (64,))
    seen = learner.observe(images, labels)
    t = seen.transformation
    assert torch.equal(seen.images, ma.apply(images, t, "faa", 7))
    assert torch.equal(seen.inputs, seen.images / 255)
    assert isinstance(t, RelaxedTransformation)
    drawn = t.draws
    for i, (selected, *applied) in enumerate(zip(drawn.selected, *drawn.applied.T, strict=True)):
        pair = int((-selected.log()).argmin())  # all pairs are alike, so the smallest exponential number wins
        names = [name if u > 0.5 else "Identity" for name, u in zip(policy.names[pair], applied, strict=True)]
        assert [int(t.first[i]), int(t.second[i])] == [INDEX[name] for name in names]
        torch.testing.assert_close(t.magnitudes[i], 10 * policy.levels[pair].detach().double())


# -- the estimator -----------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_expectation_whatever_the_control_variates_say() -> None:
    policy, n = shaken(), 60_000
    worth = torch.tensor([[[2, 1], [0, 1]], [[0, 1], [1, 2]], [[-1, 0], [0, -2]]]).double()  # [selected, first, second]
    chosen = policy.logits.softmax(0)[:, None, None]
    first, second = (torch.stack([1 - p, p], 1) for p in policy.probabilities.T)
    expected = (chosen * first[:, :, None] * second[:, None, :] * worth).sum()
    exact = torch.autograd.grad(expected, [policy.logits, policy.probabilities])
    drawn = draws(n, policy)
    selected, applied = policy.choose(drawn)
    led_to = worth[selected, applied[:, 0].long(), applied[:, 1].long()]
    for got, wanted in zip(policy.gradients(led_to, torch.zeros(n).double(), drawn), exact, strict=False):
        assert wanted.abs().max() > 0.2
        torch.testing.assert_close(got, wanted, atol=0.04, rtol=0)


def test_control_variates_learn_by_the_derivative_of_the_squared_gradient() -> None:
    policy, n = shaken(), 6
    drawn, worth, none = draws(n, policy), torch.randn(n).double(), torch.zeros(n).double()

    def squares() -> Tensor:
        return torch.stack([g.square().sum() for g in policy.gradients(worth, none, drawn)[:2]]).sum()

    gradients = policy.gradients(worth, none, drawn)
    for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
        if all(parameter is not kept for kept in (policy.logits, policy.probabilities, policy.levels)):
            flat = parameter.data.view(-1)
            place = int(gradient.abs().argmax())
            around = []
            for move in (1e-6, -2e-6):
                flat[place] += move
                around.append(squares())
            flat[place] += 1e-6
            torch.testing.assert_close((around[0] - around[1]) / 2e-6, gradient.view(-1)[place], rtol=1e-4, atol=1e-7)


def test_a_learned_control_variate_makes_the_gradient_less_noisy() -> None:
    def spread(policy: RelaxedPolicy) -> float:
        gradients = [policy.gradients(worth(drawn), torch.zeros(16).double(), drawn) for drawn in fresh]
        return torch.stack([torch.cat([g.flatten() for g in parts[:2]]) for parts in gradients]).var(0).sum().item()

    def worth(drawn: Draws) -> Tensor:
        selected, applied = policy.choose(drawn)
        return 1 + 0.5 * (selected == 0) - 0.25 * applied.double().sum(1)

    policy = shaken(variates=0.0)
    fresh = [draws(16, policy, seed) for seed in range(1000, 1300)]
    variates = [*policy.of_selection.parameters(), *policy.of_application.parameters()]
    optimizer, before = torch.optim.Adam(variates, 1e-2), spread(policy)
    for seed in range(200):
        drawn = draws(16, policy, seed)
        for variate, gradient in zip(variates, policy.gradients(worth(drawn), worth(drawn), drawn)[3:], strict=True):
            variate.grad = gradient
        optimizer.step()
    assert spread(policy) < before / 3


def test_the_gradient_of_the_validation_loss_against_an_unrolled_update() -> None:
    """The second route differentiates L_val(ŵ) twice backward, by weights that carry log p and inputs that carry m."""
    torch.set_default_dtype(torch.float64)
    try:
        network = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 3))
        policy = shaken(("Invert", "Rotate", "Brightness", "Cutout"), variates=0.0)
        learner = RelaxedLearner(network, policy, alpha=0.3, space="faa", generator=torch.Generator().manual_seed(0))
        images, labels = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8), torch.randint(0, 3, (40,))
        val_images, val_labels = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8), torch.randint(0, 3, (20,))
        seen = learner.observe(images, labels)
        learner.policy_backward(seen, val_images, val_labels)
        assert isinstance(seen.transformation, RelaxedTransformation)
        selected, applied = policy.choose(seen.transformation.draws)
        log_p = Categorical(logits=policy.logits).log_prob(selected)
        log_p = log_p + Bernoulli(policy.probabilities[selected]).log_prob(applied.double()).sum(1)
        level = policy.levels[selected] * (applied & (policy.functions[selected] != INDEX["Invert"]))
        shift = level.sum(1)[:, None, None, None]
        inputs = seen.inputs.detach() + shift - shift.detach()
        w = dict(network.named_parameters())
        losses = F.cross_entropy(functional_call(network, w, (inputs,)), labels, reduction="none")
        inner = ((log_p - log_p.detach()).exp() * losses).mean()
        g = torch.autograd.grad(inner, list(w.values()), create_graph=True)
        ahead = {name: value - 0.3 * step for (name, value), step in zip(w.items(), g, strict=True)}
        outer = F.cross_entropy(functional_call(network, ahead, (val_images / 255,)), val_labels)
        learned = [policy.logits, policy.probabilities, policy.levels]
        for parameter, exact in zip(learned, torch.autograd.grad(outer, learned), strict=True):
            assert parameter.grad is not None
            assert exact.abs().max() > 1e-5
            torch.testing.assert_close(parameter.grad, exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item())
    finally:
        torch.set_default_dtype(torch.float32)


# -- in the loop -------------------------------------------------------------------------------------------------------


def test_a_policy_update_leaves_the_network_alone_and_gives_it_its_gradient() -> None:
    network = ma.network("small-cnn", 5)
    learner = RelaxedLearner(network, RelaxedPolicy(), space="faa")
    images, labels = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 5, (32,))
    seen = learner.observe(images, labels)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    exact = torch.autograd.grad(seen.losses.mean(), list(network.parameters()), retain_graph=True)
    learner.policy_backward(seen, images, labels)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    learner.weighted_loss(seen).backward()
    for parameter, gradient in zip(network.parameters(), exact, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert learner.alpha.grad is None
    assert all(float(p.grad.abs().sum()) > 0 for p in (learner.relaxed.logits, learner.relaxed.probabilities))  # type: ignore[union-attr]


def test_each_observation_has_the_gradient_of_its_own_draws() -> None:
    """Whatever else was observed or looked at before its turn came: that replaced the draws."""
    network, few = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)), torch.Generator().manual_seed(0)
    batches = [
        (torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=few), torch.arange(n) % 5)
        for n in (16, 16, 24)
    ]

    def gradients(in_turn: bool) -> list[Tensor]:
        learner = RelaxedLearner(network, policy, space="faa", generator=torch.Generator().manual_seed(1))
        found = []

        def learn(seen: Observation) -> None:
            learner.policy_backward(seen, *batches[2])
            for parameter in learner.policy_parameters():
                assert parameter.grad is not None
                found.append(parameter.grad)
                parameter.grad = None

        if in_turn:
            for batch in batches[:2]:
                learn(learner.observe(*batch))
        else:
            pending = [learner.observe(*batch) for batch in batches[:2]]
            learner.look(*batches[2], seed=7)
            for seen in pending:
                learn(seen)
        return found

    policy = shaken().float()
    in_turn, pending = gradients(True), gradients(False)
    assert len(in_turn) == len(pending) == 2 * len(list(policy.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(in_turn, pending, strict=True))


def test_a_function_that_destroys_the_label_is_given_up() -> None:
    """Two classes, each the negative of the other: Invert makes a sample of the one look like the other."""
    generator = torch.Generator().manual_seed(0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        ramp = torch.linspace(40, 215, 8).expand(64, 1, 8, 8)
        while True:
            labels = torch.randint(0, 2, (64,), generator=generator)
            noise = torch.randint(-40, 41, ramp.shape, generator=generator)
            images = torch.where(labels[:, None, None, None] == 1, ramp, 255 - ramp) + noise
            yield images.clamp(0, 255).to(torch.uint8), labels

    def share(name: str) -> float:
        chance = policy.logits.softmax(0)[:, None] * policy.probabilities
        return chance[policy.functions == INDEX[name]].sum().item()

    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
    policy = RelaxedPolicy(("Invert", "Sharpness", "Posterize", "Brightness"))
    learner = RelaxedLearner(network, policy, space="faa", generator=generator)
    task = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    optimizer = torch.optim.Adam(learner.policy_parameters(), 1e-2, dada.BETAS)
    training, validation = batches(), batches()
    assert share("Invert") == pytest.approx(0.25)
    for _ in range(200):
        learner.step(*next(training), task, optimizer, validation)
    policy.project()
    assert share("Invert") < 0.08
    assert share("Invert") < 0.5 * min(share(name) for name in ("Sharpness", "Posterize", "Brightness"))


# -- a search ----------------------------------------------------------------------------------------------------------


def recipe() -> Recipe:
    return replace(dada.trial(RECIPES["digits"]()), epochs=EPOCHS, per_class=10, batch=25)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that went through at once."""
    out = tmp_path_factory.mktemp("dada") / "search"
    searches.searched(recipe(), dada.Settings(), out)
    return out


def test_the_objective_improves_over_its_first_tenth(searched: Path) -> None:
    objectives = [trial["objective"] for trial in rows(searched)]
    first, last = objectives[: EPOCHS // 10], objectives[-EPOCHS // 10 :]
    assert len(objectives) == EPOCHS
    assert max(last) > max(first) + 0.2


def test_it_ends_in_a_policy(searched: Path) -> None:
    found = published.find(searched / "policy.json")
    assert isinstance(found, SubPolicies)
    assert (found.system, found.space, found.max_level) == ("dada", "faa", 1)
    assert len(found.sub_policies) == len({tuple(f.name for f in pair) for pair in found.sub_policies}) == 25
    functions = [function for pair in found.sub_policies for function in pair]
    # Something was learned: half of what can be drawn often enough has left its start.
    assert sum(abs(function.probability - 0.5) > 1e-3 for function in functions) > 25
    assert sum(abs(function.level - 0.5) > 1e-3 for function in functions if function.takes_level) > 20
    assert all(function.level == 0 for function in functions if not function.takes_level)


def test_the_policy_has_the_likeliest_sub_policies() -> None:
    policy = shaken(FUNCTIONS)
    likeliest = policy.likeliest(25)
    shares = dict(zip(policy.names, policy.logits.softmax(0).tolist(), strict=True))
    taken = [shares[first.name, second.name] for first, second in likeliest]
    assert taken == sorted(shares.values(), reverse=True)[:25]
    first, second = likeliest[0]
    place = policy.names.index((first.name, second.name))
    assert [first.probability, second.probability] == policy.probabilities[place].tolist()


@pytest.mark.parametrize(
    "moment",
    [
        (Trainer, "_add", 10, True, killed),  # in epoch 3
        (Laboratory, "note", 2, False, killed),  # between the checkpoint and the note
        (Trainer, "_add", 23, True, asked_to_stop),  # in epoch 6
    ],
)
def test_stopped_anywhere_it_ends_in_the_same_policy(moment: Moment, searched: Path, tmp_path: Path) -> None:
    assert_goes_on(moment, recipe(), dada.Settings(), searched, tmp_path / "search")


# -- what can be set ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
def test_a_network_that_diverged_is_refused(tmp_path: Path) -> None:
    """At once, and also when its search is resumed."""
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"diverged: its validation loss after epoch 1 is .* a smaller --lr$"):
            searches.searched(replace(recipe(), lr=1e20, clip=None), dada.Settings(), tmp_path / "s", resume)
    assert not (tmp_path / "s" / "policy.json").exists()


def test_only_adam_learns_the_policy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--policy-optimizer is 'sgd'; this search learns by adam only$"):
        searches.searched(replace(recipe(), policy_optimizer="sgd"), dada.Settings(), tmp_path / "x")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_trial_that_can_be_trained(name: str) -> None:
    made = dada.trial(RECIPES[name]())
    validity.check(made)
    assert (made.method, made.epochs, made.policy_lr, made.policy_optimizer) == ("dada", 20, 5e-3, "adam")
    assert dada.trial(made) == made


def test_the_gradient_of_the_policy_can_be_clipped() -> None:
    """--policy-clip had no effect, and nobody said so."""
    recipe = replace(dada.trial(RECIPES["digits"]()), policy_clip=0.5)
    experiment = assemble(recipe, dataset("digits", per_class=10), torch.device("cpu"), QUIET)
    learner, optimizer = dada.relaxed(experiment, dada.Settings())
    learned = list(learner.policy_parameters())
    for parameter in learned:
        parameter.grad = torch.full_like(parameter, 100.0)
    optimizer.step()
    assert nn.utils.get_total_norm([p.grad for p in learned if p.grad is not None]) == pytest.approx(0.5, rel=1e-4)
