"""What is seen of a policy while it is learned, and that looking changes nothing."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.files import sealed
from metaaugment.lab.data.batches import Batches, Reader, once
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.experiment import prepare
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.report.learned import shown
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training import look as look_module
from metaaugment.lab.training.look import CONTRASTS, EXTREMES, QUANTILES, chosen, negatives
from metaaugment.lab.training.trainer import Trainer

QUIET = Console(quiet=True)


def trained(folder: Path, looks: bool = True, device: str = "cpu", **changes: object) -> Trainer:
    recipe = replace(RECIPES["digits"](), epochs=3, per_class=10, batch=16, policy_batch=16, every=2, **changes)
    place = Place(device=device)
    folder.mkdir(exist_ok=True)
    trainer = run.trainer(prepare(recipe, place, QUIET), place, folder, Reader(), [])
    trainer.look = trainer.look if looks else None
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return trained(tmp_path_factory.mktemp("run"))


def parameters(trainer: Trainer) -> list[Tensor]:
    learned = (trainer.network, trainer.learner.policy)
    return [value for module in learned for value in module.state_dict().values()]


def test_a_run_is_the_same_without_it(looked_at: Trainer, tmp_path: Path) -> None:
    blind = trained(tmp_path, looks=False)
    assert all(torch.equal(a, b) for a, b in zip(parameters(looked_at), parameters(blind), strict=True))
    timeless = [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in blind.log.rows]
    assert all(row.items() <= whole.items() for row, whole in zip(timeless, looked_at.log.rows, strict=True))
    assert not (tmp_path / checkpoint.LOOK).exists()


def test_a_look_leaves_no_trace_and_repeats_itself(looked_at: Trainer) -> None:
    learner = looked_at.learner
    images, labels = next(looked_at.train.since(0))
    assert learner.generator is not None
    draws = learner.generator

    def state() -> list[Tensor]:
        live = (*parameters(looked_at), *learner.sampler.state_dict().values())
        return [torch.get_rng_state(), draws.get_state(), *(value.clone() for value in live)]

    before, steps = state(), learner.steps
    first, second, other = (learner.look(images, labels, seed) for seed in (1, 1, 2))
    assert learner.steps == steps
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.images, other.images)


def test_a_look_is_decided_by_its_seed_whichever_generator_a_layer_draws_from() -> None:
    """And leaves those generators alone."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (random.random() + np.random.rand() + torch.rand(()))

    network = nn.Sequential(nn.Flatten(), Drawing(), nn.Linear(3 * 8 * 8, 4))
    learner = ma.Learner(network, ma.TransformationSampler(), ma.UniformPolicy())
    images, labels = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % 4
    looks, after = [], []
    for seed in (1, 1, 2):
        looks.append(learner.look(images, labels, seed).losses)
        for reset in (random.seed, np.random.seed, torch.manual_seed):
            reset(5)
        learner.look(images, labels, seed)
        after.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert torch.equal(looks[0], looks[1])
    assert not torch.equal(looks[0], looks[2])
    assert len(set(after)) == 1


def test_a_look_leaves_the_statistics_of_a_policy_alone() -> None:
    class Normalizing(ma.PolicyNetwork):
        def __init__(self, feature_dim: int) -> None:
            super().__init__(feature_dim)
            self.norm = nn.BatchNorm1d(feature_dim)

        def forward(self, features: Tensor, embedding: Tensor, *evidence: Tensor) -> Tensor:
            return super().forward(self.norm(features), embedding)

    policy = Normalizing(8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8), nn.ReLU(), nn.Linear(8, 4))
    learner = ma.Learner(network, ma.TransformationSampler(), policy)
    images, labels = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % 4
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    learner.look(images, labels, 0)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    learner.observe(images, labels)
    assert not torch.equal(policy.norm.running_mean, before["norm.running_mean"])


def test_what_the_file_holds(looked_at: Trainer) -> None:
    look = sealed.load(looked_at.folder / checkpoint.LOOK, "look")
    samples, shown = look["samples"], look["shown"]
    assert look["epoch"] == 3
    assert look["classes"] == [str(digit) for digit in range(10)]
    # The labels, and the images before the transformation, are those of the split.
    split = looked_at.train.split
    assert torch.equal(split.labels[samples["place"]], samples["label"])
    assert torch.equal(split.images[samples["place"][shown["sample"]]], shown["originals"])
    # Weights of a mini-batch have the mean 1, and are the policy's outputs up to scale.
    for weight, output in zip(samples["weight"].split(16), samples["output"].split(16), strict=True):
        torch.testing.assert_close(weight, output / output.mean())
    # What is shown was made by the transformation that stands beside it.
    rows = shown["sample"]
    t = ma.Transformation(*(samples[name][rows] for name in ("first", "second", "magnitudes", "signs")))
    learner = looked_at.learner
    plain = (t.first < 14) & (t.second < 14)
    made = ma.apply(shown["originals"], t, learner.space, learner.fill)
    assert plain.all()
    assert torch.equal(made, shown["images"])


def test_what_the_log_holds(looked_at: Trainer) -> None:
    rows = looked_at.log.rows
    for row in rows:
        assert len(row["weights"]) == len(QUANTILES)
        assert row["weights"] == sorted(row["weights"])
        assert sum(map(sum, row["probabilities"])) == pytest.approx(1, abs=2e-4)
    assert rows[-1]["probabilities"] != rows[0]["probabilities"]
    look = sealed.load(looked_at.folder / checkpoint.LOOK, "look")
    last = look["samples"]["weight"][look["samples"]["epoch"] == 3][:16]
    assert rows[-1]["weights"][3] == pytest.approx(float(last.double().quantile(0.5)), abs=1e-5)


def test_methods_without_a_policy_have_nothing_to_look_at(tmp_path: Path) -> None:
    trainer = trained(tmp_path, method="randaugment")
    assert "weights" not in trainer.log.rows[-1]
    assert not (tmp_path / checkpoint.LOOK).exists()


@pytest.mark.parametrize(("copies", "limit"), [(4, 40), (1, 40), (8, 100)])
def test_what_is_shown_is_among_what_is_kept(
    copies: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a mini-batch, or its copies, are more than is kept."""
    monkeypatch.setitem(look_module.SAMPLES, "small", limit)
    trained(tmp_path, copies=copies)
    look = sealed.load(tmp_path / checkpoint.LOOK, "look")
    samples, rows = look["samples"], look["shown"]["sample"]
    assert len(samples["weight"]) == limit
    assert rows.min() >= 0
    assert rows.max() < limit
    order = samples["weight"][rows[:EXTREMES]]
    assert order[0] == samples["weight"][samples["epoch"] == 3].max()


def test_which_samples_are_shown() -> None:
    weight = torch.arange(200.0).roll(50)
    loss = torch.arange(200.0).flip(0)
    rows = chosen(weight, loss)
    high, low, hard, easy = rows.split([EXTREMES, EXTREMES, CONTRASTS, CONTRASTS])
    assert weight[high].tolist() == list(range(199, 199 - EXTREMES, -1))
    assert weight[low].tolist() == list(range(EXTREMES))
    assert set(weight[hard].tolist()) <= set(range(20))
    assert loss[hard].tolist() == sorted(loss[weight < 20].tolist(), reverse=True)[:CONTRASTS]
    assert loss[easy].tolist() == sorted(loss[weight >= 180].tolist())[:CONTRASTS]


@pytest.mark.parametrize("n", [2, 5, 14, 20, 31])
def test_of_few_samples_none_is_shown_as_high_and_as_low(n: int) -> None:
    """As the report divides them: it had the same 16 samples under both headings."""
    weight, loss = torch.randperm(n).float(), torch.rand(n)
    seen = SimpleNamespace(pictures=SimpleNamespace(sample=chosen(weight, loss).tolist()))
    parts = {name: {seen.pictures.sample[at] for at in places} for name, places in shown(seen).items()}
    assert not (parts["high"] | parts["easy"]) & (parts["low"] | parts["hard"])
    assert len(parts["high"]) == len(parts["low"]) == min(EXTREMES, n // 2)


@torch.no_grad()
def test_the_hardest_negative_is_the_nearest_of_another_class(looked_at: Trainer) -> None:
    learner, validation = looked_at.learner, looked_at.validation
    images, labels = looked_at.train.split.images[:12], looked_at.train.split.labels[:12]
    found = negatives(learner, images, labels, Batches(validation.split, 7, 0, validation.device))
    network = looked_at.network.eval()
    kept: list[Tensor] = []
    hook = learner.features.layers[0].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    others = torch.cat([batch for batch, _ in once(validation.split, validation.device)])
    for batch in (images, others):
        network(learner.prepare(batch))
    hook.remove()
    network.train()
    for i, feature in enumerate(kept[0]):
        by_hand = torch.nn.functional.cosine_similarity(feature[None].double(), kept[1].double())
        by_hand[validation.split.labels == labels[i]] = -2
        assert float(found["similarity"][i]) == pytest.approx(float(by_hand.max()), abs=1e-5)
        assert torch.equal(found["images"][i], others[by_hand.argmax()])
        assert found["label"][i] == validation.split.labels[by_hand.argmax()]


@pytest.mark.gpu
def test_a_captured_run_is_the_same_without_it(tmp_path: Path) -> None:
    runs = [trained(tmp_path / name, looks, "cuda") for name, looks in (("with", True), ("without", False))]
    for a, b in zip(*map(parameters, runs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)  # some of cuDNN's sums have no order
