"""The controller against enumeration, and Adversarial AutoAugment's sampler by hand and by planted losses."""

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.capture import WARM_UP, CapturedStep
from metaaugment.files import sealed
from metaaugment.lab.baselines.adversarial import AdversarialSampler, rewards
from metaaugment.lab.baselines.controller import FUNCTIONS, Controller, Reinforce, expected_reward
from metaaugment.lab.experiments.methods import METHODS, Method
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.run import train
from metaaugment.ops import INDEX
from metaaugment.policy import UniformPolicy

from processes import together

KINDS, REPEATS = (2, 3), 2
EVERY = torch.tensor(list(itertools.product(*map(range, KINDS * REPEATS))))  # all 36 sequences


def controller() -> Controller:
    """Small, in float64, and with weights so large that its decisions depend on those before them."""
    made = Controller(KINDS, REPEATS, torch.Generator().manual_seed(3), hidden=4).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(15)
    return made


# -- the controller ---------------------------------------------------------------------------------------------------


def test_log_probability_is_the_lstm_by_hand() -> None:
    """Gate by gate, one decision after the other."""
    made = controller()
    (w_in, w_hidden, b_in, b_hidden), head = made.lstm.parameters(), made.head
    for decisions, found in zip(EVERY, made.log_probability(EVERY), strict=True):
        h, c, token, log = torch.zeros(4).double(), torch.zeros(4).double(), sum(KINDS), 0.0
        for place, decision in enumerate(decisions.tolist()):
            x = made.embedding.weight[token]
            i, f, g, o = (w_in @ x + b_in + w_hidden @ h + b_hidden).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            begin, end = ((0, 2), (2, 5))[place % 2]
            logits = (head.weight @ h + head.bias)[begin:end]
            log = log + logits[decision] - logits.logsumexp(0)
            token = begin + decision
        torch.testing.assert_close(found, log)


def test_probabilities_of_all_sequences_sum_to_one() -> None:
    probabilities = controller().log_probability(EVERY).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    assert probabilities.max() > 3 / 36  # far from uniform: the checks below say something


def test_entropy_is_that_of_all_sequences() -> None:
    made = controller()
    logs = made.log_probability(EVERY)
    torch.testing.assert_close((logs.exp() * made.entropy(EVERY)).sum(), -(logs.exp() * logs).sum())
    assert made.most_entropy == pytest.approx(math.log(len(EVERY)))


def test_sequences_are_drawn_by_their_probability() -> None:
    """And draws, as well as first weights, come from the generator."""
    made, n = controller(), 20_000
    drawn = made.sample(n, torch.Generator().manual_seed(0))
    place = (drawn * torch.tensor([18, 6, 3, 1])).sum(1)  # in the order of EVERY
    share = torch.bincount(place, minlength=36) / n
    p = made.log_probability(EVERY).exp()
    assert ((share - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()
    before = torch.get_rng_state()
    one, same, other = (Controller((3, 4), 2, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    alike = [one.sample(5, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert alike[0] == alike[1] != alike[2]


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_reinforce_is_the_gradient_of_the_expected_reward(baseline: float) -> None:
    """Exactly, when all sequences are there as often as they are drawn; whatever the rewards are held against."""
    made, reward = controller(), torch.rand(36, dtype=torch.float64)
    parameters = list(made.parameters())
    p = made.log_probability(EVERY).exp()
    exact = torch.autograd.grad((p * reward).sum(), parameters)
    weighted = 36 * p.detach() * (reward - baseline)
    found = torch.autograd.grad(expected_reward(made, EVERY, weighted, 0.0), parameters)
    assert max(gradient.abs().max() for gradient in exact) > 1e-3
    torch.testing.assert_close(found, exact)


def test_the_bonus_is_the_gradient_of_the_entropy() -> None:
    made = controller()
    parameters = list(made.parameters())
    exact = torch.autograd.grad(0.3 * made.entropy(EVERY).mean(), parameters)
    found = torch.autograd.grad(expected_reward(made, EVERY, torch.zeros(36).double(), 0.3), parameters)
    torch.testing.assert_close(found, exact)


def test_the_rewarded_choice_is_found() -> None:
    """Of 15 functions, Rotate alone is worth something: its share is 1 in 15 at first, and nearly all of them later."""
    generator = torch.Generator().manual_seed(0)
    made = Controller((15, 10), 3, generator)
    learning, shares, expected = Reinforce(made, rate=3.5e-3), [], 0.0
    for _ in range(200):
        decisions = made.sample(4, generator)
        reward = (decisions[:, ::2] == FUNCTIONS.index("Rotate")).double().mean(1)
        learning.step(decisions, reward - expected)
        expected = 0.95 * expected + 0.05 * reward.mean().item()
        shares.append(reward.mean().item())
    assert sum(shares[:20]) / 20 < 0.3
    assert sum(shares[-20:]) / 20 > 0.8


def test_a_learning_controller_goes_on_from_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    one = Reinforce(Controller((3, 4), 2, generator), rate=0.01)
    decisions, reward = one.controller.sample(6, generator), torch.rand(6)
    one.step(decisions, reward)
    sealed.save(tmp_path / "state", "controller", one.state_dict())
    other = Reinforce(Controller((3, 4), 2), rate=0.01)
    other.load_state_dict(sealed.load(tmp_path / "state", "controller"))
    for learning in (one, other):
        learning.step(decisions, -reward)
    assert all(map(torch.equal, one.controller.parameters(), other.controller.parameters()))


# -- the sampler ------------------------------------------------------------------------------------------------------


def decided(sampler: AdversarialSampler, policies: list[list[tuple[str, int]]]) -> AdversarialSampler:
    """The sampler with these policies: of each ten functions and levels."""
    numbers = [[n for name, level in policy for n in (FUNCTIONS.index(name), level)] for policy in policies]
    sampler.load_state_dict(sampler.state_dict() | {"decisions": torch.tensor(numbers)})
    return sampler


def test_each_sample_has_the_policy_of_its_copy() -> None:
    """Policy 0 is one sub-policy five times; policy 1 has five, of which each sample draws one, all alike."""
    five = [("Cutout", level) for level in range(10)]
    sampler = decided(AdversarialSampler(copies=2), [[("Rotate", 3), ("Invert", 9)] * 5, five])
    t = sampler.sample(20_000, torch.Generator().manual_seed(0))
    assert t.first[::2].eq(INDEX["Rotate"]).all()
    assert t.second[::2].eq(INDEX["Invert"]).all()
    assert t.magnitudes[::2].unique(dim=0).tolist() == [[3.0, 9.0]]
    assert t.first[1::2].eq(INDEX["Cutout"]).all()
    pairs, counts = t.magnitudes[1::2].unique(dim=0, return_counts=True)
    assert pairs.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert ((counts / 10_000 - 0.2).abs() < 5 * math.sqrt(0.16 / 10_000)).all()


def test_losses_are_added_up_by_policy() -> None:
    """Through the learner, which repeats images; held against the losses that it shows."""
    sampler = AdversarialSampler(copies=4)
    learner = ma.Learner(ma.network("small-cnn", 3), sampler, UniformPolicy(), copies=4, space="autoaugment")
    images, labels = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8), torch.tensor([0, 1, 2, 0, 1])
    losses = [learner.observe(images, labels).losses.detach().double() for _ in range(2)]
    expected = [sum(part[policy::4].sum().item() for part in losses) for policy in range(4)]
    assert sampler.losses[0].tolist() == pytest.approx(expected)
    assert sampler.losses[1].tolist() == [10] * 4


def test_rewards_by_hand() -> None:
    """Means 1, 2 and 6 are 3 ± sqrt(14 / 3); the policy without a loss is neither raised nor lowered."""
    found = rewards(torch.tensor([2.0, 2.0, 0.0, 18.0]), torch.tensor([2.0, 1.0, 0.0, 3.0]))
    spread = math.sqrt(14 / 3)
    assert found.tolist() == pytest.approx([-2 / spread, -1 / spread, 0, 3 / spread])
    assert rewards(torch.zeros(3), torch.zeros(3)).tolist() == [0] * 3
    assert rewards(torch.full((3,), 2.0), torch.ones(3)).tolist() == [0] * 3


def test_losses_that_are_not_finite_are_left_out() -> None:
    sampler = AdversarialSampler(copies=2)
    losses = torch.tensor([1.0, math.nan, math.inf, 5.0, 2.0, 7.0])
    sampler.record(sampler.sample(6), torch.ones(6), losses)
    assert sampler.losses.tolist() == [[3, 12], [2, 2]]
    sampler.update()
    assert all(parameter.isfinite().all() for parameter in sampler.controller.parameters())
    assert sampler.losses.eq(0).all()


def planted(sampler: AdversarialSampler, epochs: int, generator: torch.Generator) -> list[float]:
    """Losses that Rotate raises by one; the share of Rotate in the policies of each epoch."""
    shares = []
    for _ in range(epochs):
        shares.append((sampler.functions == INDEX["Rotate"]).double().mean().item())
        t = sampler.sample(160, generator)
        losses = sum((functions == INDEX["Rotate"]).double() for functions in (t.first, t.second))
        sampler.record(t, torch.ones(160), losses + torch.rand(160, generator=generator))
        sampler.update()
    return shares


def test_functions_that_raise_the_loss_are_drawn_more_often() -> None:
    """At the paper's learning rate: from about 1 in 15 to more than half, over 150 epochs.

    The log has the entropy of the controller: 1 with equal chances, 0 with one choice at each place, and falling.
    """
    sampler = AdversarialSampler()
    sampler.controller.head.weight.detach().zero_()
    sampler.controller.head.bias.detach().zero_()
    assert sampler.figures == {"controller_entropy": pytest.approx(1)}
    sampler.controller.head.bias.detach()[[0, len(FUNCTIONS)]] = 100.0
    assert sampler.figures == {"controller_entropy": pytest.approx(0, abs=1e-6)}

    sampler = AdversarialSampler()
    before = sampler.figures["controller_entropy"]
    shares = planted(sampler, 150, torch.Generator().manual_seed(0))
    assert sampler.figures["controller_entropy"] < 0.9 < before < 1
    assert sum(shares[:15]) / 15 < 0.15
    assert sum(shares[-15:]) / 15 > 0.5


def test_an_update_draws_other_policies_into_the_same_memory() -> None:
    """Of all functions but Identity, and of all levels."""
    sampler = AdversarialSampler(copies=64)
    assert sampler.functions.shape == (64, 5, 2)
    assert set(sampler.functions.flatten().tolist()) == set(range(16)) - {INDEX["Identity"]}
    assert set(sampler.magnitudes.flatten().tolist()) == set(range(10))
    before, memory = sampler.functions.clone(), (sampler.functions.data_ptr(), sampler.losses.data_ptr())
    sampler.record(sampler.sample(64), torch.ones(64), torch.rand(64))
    sampler.update()
    assert not torch.equal(sampler.functions, before)
    assert (sampler.functions.data_ptr(), sampler.losses.data_ptr()) == memory


def test_state_goes_on_where_it_was(tmp_path: Path) -> None:
    """In the middle of an epoch, through a file, into a sampler of another seed."""
    one, other = AdversarialSampler(seed=1), AdversarialSampler(seed=2)
    generator = torch.Generator().manual_seed(0)
    planted(one, 3, generator)
    one.record(one.sample(16, generator), torch.ones(16), torch.rand(16, generator=generator))
    sealed.save(tmp_path / "state", "sampler", one.state_dict())
    other.load_state_dict(sealed.load(tmp_path / "state", "sampler"))
    for sampler in (one, other):
        planted(sampler, 3, torch.Generator().manual_seed(5))
    assert torch.equal(one.decisions, other.decisions)
    assert torch.equal(one.magnitudes, other.magnitudes)
    assert all(map(torch.equal, one.controller.parameters(), other.controller.parameters()))


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match=r"copies is 1; .* at least 2"):
        AdversarialSampler(copies=1)
    sampler = AdversarialSampler(copies=2)
    with pytest.raises(ValueError, match="the losses that the policies are judged by are missing"):
        sampler.record(sampler.sample(4), torch.ones(4))
    with pytest.raises(ValueError, match="state has 3 policies, but this sampler has 2 copies; build it with copies=3"):
        sampler.load_state_dict(AdversarialSampler(copies=3).state_dict())


# -- many processes, a GPU, a run -------------------------------------------------------------------------------------


def epochs(rank: int, world: int) -> dict[str, Tensor]:
    """Five epochs with this process's part of the losses; what the controller has learned."""
    sampler, generator = AdversarialSampler(copies=4), torch.Generator().manual_seed(0)
    for _ in range(5):
        losses = torch.rand(32, generator=generator)[32 * rank // world : 32 * (rank + 1) // world]
        sampler.record(sampler.sample(len(losses)), torch.ones_like(losses), losses)
        sampler.update()
    return {**sampler.controller.state_dict(), "decisions": sampler.decisions, "functions": sampler.functions}


def test_two_processes_equal_one(tmp_path: Path) -> None:
    expected = epochs(0, 1)
    for found in together(2, epochs, tmp_path / "together"):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_captured_equals_eager() -> None:
    """Also behind an update, whose policies a captured step must see."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
            yield images.cuda(), torch.randint(0, 10, (8,), generator=generator).cuda()

    def parts(network: nn.Module) -> tuple[ma.Learner, torch.optim.SGD]:
        generator = torch.Generator("cuda").manual_seed(3)
        learner = ma.Learner(
            network, AdversarialSampler(copies=4), UniformPolicy().cuda(), copies=4, generator=generator,
            space="autoaugment",
        )  # fmt: skip
        return learner, torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, fused=True)

    network = ma.network("small-cnn", 10).cuda().double()
    eager, eager_optimizer = parts(copy.deepcopy(network))
    graph, graph_optimizer = parts(network)
    captured = CapturedStep(graph, graph_optimizer)
    one_data, other_data = batches(), batches()
    seen = set()
    for step in range(2 * (WARM_UP + 3)):
        one = eager.step(*next(one_data), eager_optimizer)
        other = captured(*next(other_data))
        assert torch.equal(one.transformation.first, other.transformation.first)
        assert torch.equal(one.images, other.images)
        torch.testing.assert_close(other.losses, one.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(graph.sampler.losses, eager.sampler.losses, rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]
        if step % 3 == 2:
            for learner in (eager, graph):
                learner.sampler.update()
            decisions = [learner.sampler.decisions for learner in (eager, graph)]  # type: ignore[attr-defined]
            assert torch.equal(*decisions)
            seen.add(str(decisions[0].tolist()))
    assert len(seen) == 4


def test_a_run_that_was_killed_ends_as_one_that_was_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    method = Method(lambda recipe, found: AdversarialSampler(8, recipe.seed), copies=8, space="autoaugment")
    monkeypatch.setitem(METHODS, "advaa", method)
    recipe = replace(RECIPES["digits"](), method="advaa", size=8, per_class=10, batch=20, epochs=4, lr=0.02)
    quiet = Console(quiet=True)
    whole = train(recipe, Place(out=tmp_path / "whole", device="cpu"), quiet)
    update, calls = AdversarialSampler.update, []

    def dying(sampler: AdversarialSampler) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("killed")
        update(sampler)

    with monkeypatch.context() as patch:
        patch.setattr(AdversarialSampler, "update", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe, Place(out=tmp_path / "killed", device="cpu"), quiet)
    resumed = train(recipe, Place(resume=tmp_path / "killed", device="cpu"), quiet)
    assert whole["test_loss"] == resumed["test_loss"]
    assert whole["epochs"] == resumed["epochs"] == 4
    assert whole["test_accuracy"] > 0.5
    one, other = (sealed.load(tmp_path / name / "checkpoint.safetensors", "checkpoint") for name in ("whole", "killed"))
    assert torch.equal(one["learner"]["sampler"]["decisions"], other["learner"]["sampler"]["decisions"])
