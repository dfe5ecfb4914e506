"""What each method does to images and weights, from its recipe to a step; evaluation and clipping by hand."""

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import metaaugment as ma
from metaaugment.alignment import ROUTES
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.rand_augment import TrivialAugmentSampler
from metaaugment.lab.data import DataSet
from metaaugment.lab.data.batches import Reader
from metaaugment.lab.data.files import ImageFiles
from metaaugment.lab.data.images import Images
from metaaugment.lab.experiments.experiment import Experiment, clipped
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.run import trainer
from metaaugment.lab.training.evaluation import evaluate
from metaaugment.learner import Learner
from metaaugment.ops import INDEX, PAPER_OPS, find_space
from metaaugment.policy import FeaturePolicy, PolicyNetwork, RejectingPolicy, UniformPolicy
from metaaugment.sampler import FixedSampler, TransformationSampler, UniformSampler

from trees import write_folder

CPU = torch.device("cpu")
CLASSES, SIDE, FILL = 7, 10, (20, 90, 160)


def images(n: int) -> Images:
    return Images(torch.randint(0, 256, (n, 3, SIDE, SIDE), dtype=torch.uint8), torch.arange(n) % CLASSES)


def plain(**changes: Any) -> Recipe:
    return replace(Recipe(name="mine", dataset="none", network="small-cnn", batch=8, policy_batch=4), **changes)


def experiment(recipe: Recipe) -> Experiment:
    """Its parts on noise: 20 images for training, so that 8 a step are 2 steps an epoch."""
    classes = tuple(map(str, range(CLASSES)))
    data = DataSet("none", images(20), images(6), images(6), classes, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), FILL)
    network = ma.network("small-cnn", CLASSES)
    found = published.find(published.fitting(recipe.method, "digits")) if METHODS[recipe.method].found else None
    generator = torch.Generator().manual_seed(1)
    return Experiment(recipe, data, network, CPU, generator, torch.contiguous_format, found=found)


def a_step(learner: Learner, optimizer: Any = None, n: int = 8) -> ma.Observation:
    """One iteration on noise."""
    batch, validation = images(n), images(4)
    task = SGD(learner.network.parameters(), 0.1)
    return learner.step(batch.images, batch.labels, task, optimizer, iter([(validation.images, validation.labels)]))


def begin(**changes: Any) -> tuple[Learner, Any]:
    """The first learner of a recipe, and the optimizer of its policy."""
    return experiment(plain(**changes)).phases()[0].begin(None)


# -- baseline --------------------------------------------------------------------------------------------------------


def test_the_baseline_leaves_images_untouched() -> None:
    """What the other methods have besides, a crop and Cutout, is not the baseline's."""
    learner, optimizer = begin(method="baseline", crop=3, cutout=6)
    batch = images(16)
    seen = learner.observe(batch.images, batch.labels)
    assert torch.equal(seen.images, batch.images)
    assert seen.weights.tolist() == [1 / 16] * 16
    assert optimizer is None
    assert not learner.due


def test_the_baseline_flips_and_crops_only() -> None:
    """Each image is one of its 2 · 25 flipped and moved forms, padded in the fill color."""
    learner, _ = begin(method="baseline", flip=True, baseline_crop=2, crop=3, cutout=6)
    batch = images(64)
    seen = learner.observe(batch.images, batch.labels).images.numpy()
    color = np.array(FILL, np.uint8)[:, None, None]
    drawn = []
    for image, result in zip(batch.images.numpy(), seen, strict=True):
        forms = {}
        for flipped in (False, True):
            padded = np.broadcast_to(color, (3, SIDE + 4, SIDE + 4)).copy()
            padded[:, 2:-2, 2:-2] = image[:, :, ::-1] if flipped else image
            for top in range(5):
                for left in range(5):
                    forms[flipped, top, left] = padded[:, top : top + SIDE, left : left + SIDE]
        found = [form for form, pixels in forms.items() if np.array_equal(pixels, result)]
        assert len(found) == 1
        drawn += found
    # Of 64 draws: both sides of the coin, and all five shifts in both directions.
    assert {flipped for flipped, _, _ in drawn} == {False, True}
    assert {top for _, top, _ in drawn} == {left for _, _, left in drawn} == set(range(5))


# -- what all others have --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"baseline"}))
def test_others_flip_and_crop_before_and_cut_out_after(method: str) -> None:
    """A white pixel in the middle of black shows flips and shifts; and what is filled behind it, Cutout."""
    learner, _ = begin(method=method, flip=True, crop=2, baseline_crop=4, cutout=4)
    assert learner.before is not None
    assert learner.after is not None
    black = torch.zeros(400, 3, SIDE, SIDE, dtype=torch.uint8)
    marked = black.clone()
    marked[:, :, 4, 4] = 255
    places = (learner.before(marked) == 255).all(1).nonzero()[:, 1:]
    # Up to 2 pixels from row 4, and from columns 4 and, flipped, 5.
    assert {place for place, _ in places.tolist()} == {2, 3, 4, 5, 6}
    assert {place for _, place in places.tolist()} == {2, 3, 4, 5, 6, 7}
    filled = (learner.after(black) == torch.tensor(FILL)[:, None, None]).all(1)
    assert set(filled.any(2).sum(1).tolist()) == {2, 3, 4}
    batch = images(8)
    before, after, seen = learner.before, learner.after, []
    learner.before = lambda pixels: seen.append("before") or before(pixels)
    learner.after = lambda pixels: seen.append("after") or after(pixels)
    learner.observe(batch.images, batch.labels)
    assert seen == ["before", "after"]


# Of methods that have one of their own, by the system it comes from.
SPACES = {
    "trivialaugment": "trivialaugment-wide", "autoaugment": "autoaugment", "pba": "autoaugment", "advaa": "autoaugment",
    "faa": "faa", "dada": "faa",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_without_flip_crop_and_cutout_there_is_the_transformation_alone(method: str) -> None:
    learner, _ = begin(method=method, baseline_crop=0)
    batch = images(32)
    seen = learner.observe(batch.images, batch.labels)
    copied = batch.images.repeat_interleave(learner.copies, 0)
    assert torch.equal(seen.images, ma.apply(copied, seen.transformation, SPACES.get(method, "metaaugment"), FILL))
    mean, std = (torch.tensor(value)[:, None, None] for value in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    torch.testing.assert_close(seen.inputs, (seen.images / 255 - mean) / std)


@pytest.mark.parametrize("method", METHODS)
def test_copies_and_smoothing_reach_every_method(method: str) -> None:
    """Four transformations an image; a tenth of each label spread over all classes, by hand."""
    learner, _ = begin(method=method, copies=4, label_smoothing=0.1)
    batch = images(6)
    seen = learner.observe(batch.images, batch.labels)
    assert seen.labels.tolist() == [label for label in batch.labels.tolist() for _ in range(4)]
    log_p = seen.logits.detach().log_softmax(1)
    expected = -0.9 * log_p[torch.arange(24), seen.labels] - 0.1 * log_p.mean(1)
    torch.testing.assert_close(seen.losses.detach(), expected)


def test_the_last_phase_sees_through_what_the_policy_was_learned_with() -> None:
    recipe = plain(epochs=9, random_epochs=3, frozen_epochs=3, extractor="own")
    random, joint, frozen = experiment(recipe).phases()
    learned, _ = joint.begin(random.begin(None)[0])
    still, _ = frozen.begin(learned)
    assert learned.extractor is not None
    assert still.extractor is not None
    ours, own = next(still.extractor.parameters()), next(learned.extractor.parameters())
    assert torch.equal(ours, own)
    assert ours is not own
    assert not torch.equal(ours, next(learned.network.parameters()))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"metaaugment"}))
def test_all_but_one_method_weigh_samples_alike_and_learn_nothing(method: str) -> None:
    learner, optimizer = begin(method=method)
    assert isinstance(learner.policy, UniformPolicy)
    assert optimizer is None
    seen = a_step(learner, n=16)
    n = 16 * (8 if method == "advaa" else 1)
    assert seen.weights.tolist() == [1 / n] * n


# -- randaugment -----------------------------------------------------------------------------------------------------


def assert_alike(values: Tensor, kinds: int) -> None:
    """χ² against all kinds alike: six standard deviations above its mean, which one of ten million draws reaches."""
    counts = values.bincount(minlength=kinds).double()
    assert len(counts) == kinds
    expected = len(values) / kinds
    assert float(((counts - expected) ** 2 / expected).sum()) < kinds - 1 + 6 * (2 * (kinds - 1)) ** 0.5


def test_randaugment_draws_all_196_pairs_alike() -> None:
    sampler = METHODS["randaugment"].sampler(plain(), None)
    assert isinstance(sampler, UniformSampler)
    t = sampler.sample(196 * 200, torch.Generator().manual_seed(0))
    assert_alike(t.first * 14 + t.second, 196)
    assert_alike((t.magnitudes * 2).long().flatten(), 20)  # twentieths of [0, 10)
    assert_alike((t.signs.long().flatten() + 1) // 2, 2)


# -- trivialaugment --------------------------------------------------------------------------------------------------

# The authors' wide space, level 0 to 30 of PARAMETER_MAX = 30, from their code: int_parameter truncates.
WIDE = {
    "Rotate": lambda level: int(level * 135 / 30),
    "Posterize": lambda level: 8 - int(level * (8 - 2) / 30),
    "Solarize": lambda level: 256 - int(level * 256 / 30),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), lambda level: level * (2 - 0.01) / 30 + 0.01),
    **dict.fromkeys(("ShearX", "ShearY"), lambda level: level * 0.99 / 30),
    **dict.fromkeys(("TranslateX", "TranslateY"), lambda level: int(level * 32 / 30)),
}
WHOLE = ("Rotate", "Posterize", "Solarize", "TranslateX", "TranslateY")


def test_trivialaugment_draws_one_function_and_one_of_31_strengths() -> None:
    sampler = METHODS["trivialaugment"].sampler(plain(), None)
    assert isinstance(sampler, TrivialAugmentSampler)
    t = sampler.sample(31 * 14 * 100, torch.Generator().manual_seed(0))
    assert t.magnitudes.dtype == torch.float64
    levels = (t.magnitudes[:, 0] * 3).round().long()
    # To the last bits of float64: a truncation may need a magnitude that does not fall short.
    expected = [level * 10 / 30 for level in levels.tolist()]
    assert t.magnitudes[:, 0].tolist() == pytest.approx(expected, rel=1e-15, abs=0)
    assert_alike(t.first * 31 + levels, 14 * 31)
    assert_alike((t.signs.long()[:, 0] + 1) // 2, 2)
    assert t.second.unique().tolist() == [INDEX["Identity"]]


@pytest.mark.parametrize("name", [op.name for op in PAPER_OPS if op.magnitude])
def test_trivialaugments_strengths_are_the_authors(name: str) -> None:
    """Each function at each of the 31 strengths it is drawn with; whole numbers to the bit."""
    t = TrivialAugmentSampler().sample(14 * 31 * 50, torch.Generator().manual_seed(0))
    t = t[t.first == INDEX[name]]
    magnitudes, signs = t.magnitudes[:, 0], t.signs[:, 0]
    arguments = find_space("trivialaugment-wide").arguments(t.first, magnitudes, signs, 32, 32)
    if name == "Rotate" or name.startswith(("Shear", "Translate")):
        arguments = arguments * signs
    found = dict(zip((magnitudes * 3).round().long().tolist(), arguments.tolist(), strict=True))
    expected = {level: WIDE[name](level) for level in range(31)}
    assert found == (expected if name in WHOLE else pytest.approx(expected, abs=1e-12))


@pytest.mark.parametrize("space", ["metaaugment", "faa"])
def test_trivialaugment_keeps_its_own_space(space: str) -> None:
    learner, _ = begin(method="trivialaugment", space=space)
    assert learner.space is find_space("trivialaugment-wide")
    assert begin(method="randaugment", space=space)[0].space is find_space(space)


# -- metaaugment -----------------------------------------------------------------------------------------------------


def test_metaaugment_learns_policy_and_step_size() -> None:
    learner, optimizer = begin(
        policy_lr=0.02, policy_momentum=0.8, policy_weight_decay=3e-4, alpha=0.3, epsilon=0.25, window=7
    )
    assert isinstance(learner.sampler, TransformationSampler)
    assert (learner.sampler.epsilon, learner.sampler.window) == (0.25, 7)
    assert isinstance(learner.policy, PolicyNetwork)
    assert learner.policy.feature.in_features == 128  # of the small network
    assert isinstance(optimizer, SGD)
    (group,) = optimizer.param_groups
    assert [group[name] for name in ("lr", "momentum", "weight_decay", "nesterov")] == [0.02, 0.8, 3e-4, False]
    assert {id(p) for p in group["params"]} == {id(p) for p in (*learner.policy.parameters(), learner.alpha)}
    assert learner.alpha.item() == pytest.approx(0.3)

    before = [p.detach().clone() for p in group["params"]]
    a_step(learner, optimizer)
    assert not any(torch.equal(old, new) for old, new in zip(before, group["params"], strict=True))
    assert isinstance(begin(policy_network="feature-policy")[0].policy, FeaturePolicy)
    assert isinstance(begin(policy_network="rejecting-policy-network")[0].policy, RejectingPolicy)
    _, optimizer = begin(policy_optimizer="adam", policy_lr=0.02, policy_weight_decay=3e-4)
    assert isinstance(optimizer, Adam)
    assert [optimizer.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.02, 3e-4]


@pytest.mark.parametrize(("lagged", "every"), [(False, 1), (True, 3)])
def test_how_often_and_by_what_it_learns(lagged: bool, every: int) -> None:
    learner, _ = begin(lagged=lagged, every=every, route="forward")
    assert learner.lagged == lagged
    assert learner.route is ROUTES["forward"]
    assert [learner.due_at(step) for step in range(1, 7)] == [step % every == 0 for step in range(1, 7)]


def test_a_step_size_that_is_not_learned() -> None:
    learner, optimizer = begin(learn_alpha=False, policy_lr=0.02)
    a_step(learner, optimizer)
    assert learner.alpha.item() == pytest.approx(0.1)
    assert learner.due_at(1)


def test_eyes_of_the_policys_own_are_learned_with_it() -> None:
    learner, optimizer = begin(extractor="own", policy_lr=0.5)
    assert learner.extractor is not None
    stem = next(learner.extractor.parameters())
    before = stem.detach().clone()
    assert not torch.equal(before, next(learner.network.parameters()))
    a_step(learner, optimizer)
    assert not torch.equal(before, stem)


# -- phases ----------------------------------------------------------------------------------------------------------


def test_imagenets_phases_are_40_40_and_40_epochs() -> None:
    """ "First … random data augmentation for 40 epochs …, then … jointly for 40 epochs. Finally, we fix the policy"."""
    phases = experiment(replace(RECIPES["imagenet-resnet-50"](), batch=4)).phases()
    assert [phase.epochs for phase in phases] == [40, 40, 40]
    random, no_optimizer = phases[0].begin(None)
    assert isinstance(random.sampler, UniformSampler)
    assert isinstance(random.policy, UniformPolicy)
    joint, optimizer = phases[1].begin(random)
    assert isinstance(joint.sampler, TransformationSampler)
    assert isinstance(joint.policy, PolicyNetwork)
    assert optimizer is not None
    frozen, none = phases[2].begin(joint)
    assert isinstance(frozen.sampler, FixedSampler)
    assert no_optimizer is none is None
    assert not any(frozen.due_at(step) for step in range(1, 10))
    assert all(learner.network is random.network and learner.copies == 4 for learner in (random, joint, frozen))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"metaaugment"}))
def test_other_methods_have_one_phase(method: str) -> None:
    phases = experiment(replace(RECIPES["imagenet-resnet-50"](), method=method)).phases()
    assert [phase.epochs for phase in phases] == [120]


@pytest.mark.parametrize("epochs", [(0, 9, 0), (2, 7, 0), (0, 6, 3), (2, 4, 3)])
def test_phases_of_no_epochs_are_left_out(epochs: tuple[int, int, int]) -> None:
    random, joint, frozen = epochs
    recipe = plain(epochs=9, random_epochs=random, frozen_epochs=frozen)
    assert recipe.joint_epochs == joint
    assert [phase.epochs for phase in experiment(recipe).phases()] == [count for count in epochs if count]


def test_the_frozen_policy_is_the_learned_one_and_sees_as_it_did() -> None:
    """θ and p of the joint phase, and the network as it was at its end: training it on changes no output."""
    joint_phase, frozen_phase = experiment(plain(epochs=9, frozen_epochs=3)).phases()
    joint, _ = joint_phase.begin(None)
    joint.sampler.probabilities.copy_(torch.rand(14, 14, dtype=torch.float64))
    joint.sampler.probabilities.div_(joint.sampler.probabilities.sum())
    p, theta = joint.sampler.probabilities.clone(), copy.deepcopy(joint.policy.state_dict())
    eyes = copy.deepcopy(joint.network)
    frozen, _ = frozen_phase.begin(joint)
    for _ in range(2):
        a_step(frozen)
    frozen.sampler.update()
    assert torch.equal(frozen.sampler.probabilities, p)
    assert all(torch.equal(value, theta[name]) for name, value in frozen.policy.state_dict().items())
    batch = images(8)
    seen = frozen.observe(batch.images, batch.labels)
    features = eyes.eval().body(seen.inputs).mean((2, 3))
    expected = joint.policy(features, ma.embed(seen.transformation))
    torch.testing.assert_close(seen.outputs, expected)
    torch.testing.assert_close(seen.weights, expected / expected.sum())
    moved = frozen.network.body(seen.inputs).mean((2, 3))
    assert not torch.allclose(moved, features)


# -- what the recipe says to the optimizer ---------------------------------------------------------------------------


def test_the_task_networks_optimizer_and_rate(tmp_path: Path) -> None:
    """ImageNet's learning rates, at 5 steps of 4 images an epoch: 0, 2.5, 5, 62.5 and 120 epochs."""
    recipe = replace(RECIPES["imagenet-resnet-50"](), batch=4)
    training = trainer(experiment(recipe), Place(), tmp_path, Reader(), ())
    assert training.train.steps == 5
    rates = [training.rate(step) for step in (0, 12, 13, 25, 312, 313, 600)]
    expected = [0.08, 0.08 + 0.32 * 12 / 25, 0.08 + 0.32 * 13 / 25, 0.4]
    expected += [0.2 * (1 + math.cos(math.pi * (step - 25) / 575)) for step in (312, 313)]
    assert rates == pytest.approx([*expected, 0], abs=1e-15)
    assert pytest.approx((rates[4] + rates[5]) / 2, abs=1e-12) == 0.2
    (group,) = training.optimizer.param_groups
    assert [group[name] for name in ("momentum", "weight_decay", "nesterov")] == [0.9, 1e-4, False]
    assert {id(p) for p in group["params"]} == {id(p) for p in training.network.parameters()}
    assert training.validation.batch == 6  # all there are, of the 2,048 asked for
    (tmp_path / "nesterov").mkdir()
    training = trainer(experiment(plain(nesterov=True, momentum=0.5)), Place(), tmp_path / "nesterov", Reader(), ())
    assert [training.optimizer.param_groups[0][name] for name in ("nesterov", "momentum")] == [True, 0.5]


def test_an_unreadable_first_validation_image_is_skipped_like_any_other(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 6})
    (tmp_path / "a" / "000.png").write_bytes(b"no image at all")
    names = tuple(f"a/{place:03d}.png" for place in range(6))
    one = experiment(plain(epochs=1))
    broken = replace(one.data, val=ImageFiles(tmp_path, names, torch.arange(6), SIDE))
    reader = Reader(skip=True)
    (tmp_path / "run").mkdir()
    trainer(replace(one, data=broken), Place(), tmp_path / "run", reader, ()).run()
    assert reader.unreadable == {tmp_path / "a" / "000.png"}


# -- clipping --------------------------------------------------------------------------------------------------------


def norm(parameters: list[nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


@pytest.mark.parametrize(("limit", "factor"), [(2.5, 0.5), (5.0, 1.0), (7.0, 1.0), (None, 1.0)])
def test_a_longer_gradient_is_shortened(limit: float | None, factor: float) -> None:
    """Over two groups: (3) and (0, 4) together have the norm 5, whatever each has alone."""
    w, b = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizer = clipped(SGD([{"params": [w]}, {"params": [b], "lr": 0.5}], 0.1), limit)
    w.grad, b.grad = torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])
    optimizer.step()
    # torch divides by the norm + 1e-6.
    torch.testing.assert_close(w.detach(), torch.tensor([1 - 0.1 * 3 * factor]), atol=1e-6, rtol=0)
    torch.testing.assert_close(b.detach(), torch.tensor([[1.0, 2 - 0.5 * 4 * factor]]), atol=1e-6, rtol=0)
    assert norm([w, b]) == pytest.approx(5 * factor, rel=1e-6)


def test_weight_decay_is_not_clipped() -> None:
    """It is added by the optimizer: w − lr (g / 10 + λ w) where ‖g‖ = 10."""
    w = nn.Parameter(torch.tensor([100.0, 0.0]))
    optimizer = clipped(SGD([w], 0.1, weight_decay=0.5), 1.0)
    w.grad = torch.tensor([6.0, 8.0])
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([100 - 0.1 * (0.6 + 50), -0.08]), atol=1e-6, rtol=1e-6)


def test_both_clips_of_a_recipe_reach_their_optimizers(tmp_path: Path) -> None:
    """Task and policy, by limits so small that every gradient is longer."""
    training = trainer(experiment(plain(clip=1e-3, policy_clip=1e-4)), Place(), tmp_path, Reader(), ())
    batch, validation = images(8), images(4)
    learner, outer = training.learner, training.policy_optimizer
    assert outer is not None
    seen = learner.observe(batch.images, batch.labels)
    learner.policy_backward(seen, validation.images, validation.labels)
    learner.weighted_loss(seen).backward()
    w, theta = list(training.network.parameters()), learner.policy_parameters()
    assert norm(w) > 1e-2
    assert norm(theta) > 1e-3
    outer.step()
    training.optimizer.step()
    assert norm(w) == pytest.approx(1e-3, rel=1e-2)
    assert norm(theta) == pytest.approx(1e-4, rel=2e-2)


# -- evaluation ------------------------------------------------------------------------------------------------------


def batches(*sizes: int, classes: int = CLASSES) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randint(0, 256, (n, 3, SIDE, SIDE), dtype=torch.uint8), torch.randint(0, classes, (n,))) for n in sizes
    ]


def unit(pixels: Tensor) -> Tensor:
    return pixels / 255


def trained() -> nn.Module:
    """Its running statistics are not those of any batch."""
    network = ma.network("small-cnn", CLASSES)
    for pixels, _ in batches(8, 8):
        network(unit(pixels) * 3 - 1)
    return network


@pytest.mark.parametrize("sizes", [(5,), (8, 8, 3), (1, 1)])
def test_evaluation_equals_a_loop_over_single_images(sizes: tuple[int, ...]) -> None:
    network, data = trained(), batches(*sizes)
    score = evaluate(network, data, unit)
    losses, first, five = [], 0, 0
    judge = copy.deepcopy(network).eval()
    for pixels, labels in data:
        for image, label in zip(pixels, labels.tolist(), strict=True):
            with torch.no_grad():
                logits = judge(unit(image[None]))[0].double().numpy()
            losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label])
            better = int((logits > logits[label]).sum())
            first, five = first + (better == 0), five + (better < 5)
    assert score.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert score.top1 == first / sum(sizes)
    assert score.top5 == five / sum(sizes)


class Table(nn.Module):
    """The logits of an image are the row that its first pixel names."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.rows[pixels[:, 0, 0, 0].long()]


def test_evaluation_by_hand() -> None:
    """Six classes: the label is the best, the fifth and the last one."""
    row = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    pixels = torch.zeros(3, 1, 1, 1, dtype=torch.uint8)
    score = evaluate(Table([row]), [(pixels, torch.tensor([0, 4, 5]))], lambda pixels: pixels)
    assert (score.top1, score.top5) == pytest.approx((1 / 3, 2 / 3))
    assert score.loss == pytest.approx(math.log(sum(map(math.exp, row))) - (5 + 1 + 0) / 3)
    # Of three classes all are among the first five.
    score = evaluate(Table([[2.0, 1.0, 0.0]]), [(pixels[:2], torch.tensor([2, 0]))], lambda pixels: pixels)
    assert (score.top1, score.top5) == (0.5, 1.0)


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_network_as_it_was(training: bool, interrupted: bool) -> None:
    """Parameters, running statistics, gradients, and the mode of each layer, of which some may be frozen; no graph."""
    network, kept = trained().train(training), []
    next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    modes, before = [module.training for module in network.modules()], copy.deepcopy(network.state_dict())
    network.register_forward_hook(lambda module, inputs, logits: kept.append((logits.requires_grad, module.training)))

    def some() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches(8, 3)
        if interrupted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        evaluate(network, some(), unit)
    assert kept == [(False, False)] * 2
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    assert [module.training for module in network.modules()] == modes


def test_there_must_be_an_image() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(trained(), [], unit)


def test_logits_of_half_precision_are_judged_in_float32() -> None:
    """The network rounds; the loss and its sum must not be rounded as well."""
    network, data = trained().bfloat16().eval(), batches(16)
    score = evaluate(network, data, lambda pixels: unit(pixels).bfloat16())
    with torch.no_grad():
        logits = network(unit(data[0][0]).bfloat16())
    assert logits.dtype == torch.bfloat16
    assert score.loss == pytest.approx(float(F.cross_entropy(logits.double(), data[0][1])), rel=1e-6)
