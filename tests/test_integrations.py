"""A policy, and joint training, in other libraries: what they compute there is what they compute in a loop of ours."""

import copy
import itertools
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, default_collate

import metaaugment as ma
from metaaugment.integrations import lightning as mixins
from metaaugment.integrations.normalization import Normalization, NormalizedPolicy
from metaaugment.integrations.timm import PolicyMixup, one_hot
from metaaugment.integrations.torchvision import PolicyTransform
from metaaugment.integrations.transformers import Transfer as TrainerTransfer
from metaaugment.lab.bench.ops import define_missing_operators

from images import from_pillow, to_pillow
from processes import leave, meet
from small import CLASSES, LABELS, SIDE, N, photos, trained

EXAMPLES = Path(__file__).parent.parent / "examples"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALVES = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# Lightning's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def library(name: str) -> ModuleType:
    """Another library where it imports; the test is skipped where not."""
    define_missing_operators()
    return pytest.importorskip(name, exc_type=ImportError)


@cache
def learned(channels: int = 3) -> ma.LearnedPolicy:
    """With weights that differ and some p; no test changes it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner, mean, std = trained(channels=channels, prepare=None), (0.0,) * channels, (1.0,) * channels
        return ma.LearnedPolicy.from_learner(learner, "small-cnn", CLASSES, mean, std, SIDE)


def small_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 7 * 7, CLASSES))


def gradients(network: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(network.parameters())))


def explicit(policy: ma.LearnedPolicy, network: nn.Module, images: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Σ V_i L_i, written down, on a draw of seed 5."""
    torch.manual_seed(5)
    images, weights = policy.augment(images)
    log_p = network(Normalization(*IMAGENET)(images)).log_softmax(1)
    losses = -(1 - smoothing) * log_p[torch.arange(len(labels)), labels] - smoothing * log_p.mean(1)
    return (weights * losses).sum()


# -- normalisation ----------------------------------------------------------------------------------------------------

# Who normalises, in which order, in which precision: pixels, mean, std and type to images.
ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]] = {
    "in float32, rounded once": lambda x, m, s, t: ((x / 255 - m) / s).to(t),
    "timm": lambda x, m, s, t: x.to(t).sub_((m.double() * 255).to(t)).div_((s.double() * 255).to(t)),
    "torchvision": lambda x, m, s, t: (x.to(t) / 255).sub_(m.to(t)).div_(s.to(t)),
}


def all_values(numbers: tuple[tuple[float, ...], ...], order: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    mean, std = (torch.tensor(values)[:, None, None] for values in numbers)
    return pixels, ORDERS[order](pixels, mean, std, dtype)


@pytest.mark.parametrize("numbers", [IMAGENET, HALVES, CLIP], ids=["ImageNet", "halves", "CLIP"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
def test_all_256_values_come_back(numbers: Any, dtype: torch.dtype, order: str) -> None:
    pixels, images = all_values(numbers, order, dtype)
    assert torch.equal(Normalization(*numbers).undo(images), pixels)


@pytest.mark.parametrize("numbers", [IMAGENET, HALVES], ids=["ImageNet", "halves"])
def test_bfloat16_comes_back_where_it_was_rounded_once(numbers: Any) -> None:
    pixels, images = all_values(numbers, "in float32, rounded once", torch.bfloat16)
    assert torch.equal(Normalization(*numbers).undo(images), pixels)


@pytest.mark.parametrize(
    ("numbers", "order", "message"),
    [
        (IMAGENET, "timm", "not a uint8 pixel"),  # 253 and 254 are the same number there
        (IMAGENET, "torchvision", "not a uint8 pixel"),
        (CLIP, "in float32, rounded once", r"pixels become the same number in torch\.bfloat16; pass float32"),
    ],
)
def test_bfloat16_is_refused_where_pixels_are_lost(numbers: Any, order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalization(*numbers).undo(all_values(numbers, order, torch.bfloat16)[1])


def test_images_that_no_pixels_became_are_refused() -> None:
    normalization = Normalization(*IMAGENET)
    good = normalization(photos())
    spoiled = {
        "erased": good.clone().index_put_((torch.tensor(3),), torch.tensor(0.0)),
        "mixed": good.lerp(good.flip(0), 0.3),
        "not a number": good.clone().index_put_((torch.tensor(3),), torch.tensor(torch.nan)),
        "too bright": good + 10,
        "normalised otherwise": Normalization(*HALVES)(photos()),
        "not normalised": photos() / 255,
    }
    for name, images in spoiled.items():
        with pytest.raises(ValueError, match="not a uint8 pixel normalised with mean") as error:
            normalization.undo(images)
        assert "\n" not in str(error.value), name
    with pytest.raises(ValueError, match=r"are torch.uint8; they must be normalised, in floating point"):
        normalization.undo(photos())
    with pytest.raises(ValueError, match=r"\(12, 1, 16, 16\); with a mean of 3 channels"):
        normalization.undo(photos(channels=1) / 255)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5, 0.5)), ((), ()), ((0.5,), (0.0,)), ((float("nan"),), (1.0,))])
def test_a_normalisation_needs_a_mean_and_a_deviation(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="one finite number per channel"):
        Normalization(mean, std)


def test_a_policy_is_for_its_channels() -> None:
    with pytest.raises(ValueError, match="for 3 channels, but the policy was learned on images with 1"):
        NormalizedPolicy(learned(1), *IMAGENET)
    with pytest.raises(ValueError, match="for 1 channels, but the policy was learned on images with 3"):
        NormalizedPolicy(learned(), (0.5,), (0.5,))


# -- torchvision ------------------------------------------------------------------------------------------------------


def drawn(image: Tensor, seed: int, channels: int = 3) -> Tensor:
    """What `apply` makes of an image, on the draw of a seed."""
    policy = learned(channels)
    t = policy.sample(1, torch.Generator().manual_seed(seed))
    return ma.apply(image[None], t, policy.space, policy.source.fill)[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_transform_is_apply_on_every_kind_of_image(channels: int) -> None:
    transform, image = PolicyTransform(learned(channels)), photos(1, channels)[0]
    for seed in range(30):
        expected = drawn(image, seed, channels)
        torch.manual_seed(seed)
        assert torch.equal(transform(image), expected)
        torch.manual_seed(seed)
        picture = transform(to_pillow(image))
        assert picture.mode == {1: "L", 3: "RGB"}[channels]
        assert torch.equal(from_pillow(picture), expected)
        torch.manual_seed(seed)
        assert torch.equal(transform(image / 255), expected / 255)
        torch.manual_seed(seed)
        assert torch.equal(transform((image / 255).half()), expected.half() / 255)
    same = photos(1, channels).expand(20, -1, -1, -1)  # in a batch, each image has its own draw
    torch.manual_seed(0)
    found = transform(same)
    torch.manual_seed(0)
    assert torch.equal(found, learned(channels).augment(same)[0])
    assert len({image.numpy().tobytes() for image in found}) > 10


def test_the_transform_is_small_and_travels() -> None:
    transform = PolicyTransform(learned())
    packed = pickle.dumps(transform)
    assert len(packed) < 20_000
    torch.manual_seed(4)
    found = pickle.loads(packed)(photos())
    torch.manual_seed(4)
    assert torch.equal(found, transform(photos()))
    assert not list(transform.parameters())
    assert "fill=(125, 100, 80)" in repr(transform)


class Same(Dataset[Tensor]):
    """The same image again and again, transformed."""

    def __init__(self, transform: nn.Module) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Tensor:
        return self.transform(photos(1)[0])


def test_workers_draw_by_the_loaders_seed() -> None:
    def epoch(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return list(DataLoader(Same(PolicyTransform(learned())), 4, num_workers=2, generator=generator))

    first, again, other = epoch(0), epoch(0), epoch(1)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    assert not torch.equal(first[0], first[1])  # of two workers


def test_torchvisions_pipelines_and_types() -> None:
    v2 = library("torchvision.transforms.v2")
    transforms, tv_tensors = library("torchvision.transforms"), library("torchvision.tv_tensors")
    transform, image = PolicyTransform(learned()), photos(1)[0]
    expected = drawn(image, 7)
    new = v2.Compose([transform, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*IMAGENET)])
    old = transforms.Compose([transform, transforms.ToTensor(), transforms.Normalize(*IMAGENET)])
    for compose in (new, old):
        torch.manual_seed(7)
        found = compose(to_pillow(image))
        torch.testing.assert_close(found.as_subclass(Tensor), Normalization(*IMAGENET)(expected))
    torch.manual_seed(7)
    wrapped = transform(tv_tensors.Image(image))
    assert type(wrapped) is tv_tensors.Image
    assert torch.equal(wrapped.as_subclass(Tensor), expected)
    torch.manual_seed(7)
    with_label = v2.Compose([transform])(tv_tensors.Image(image), 3)
    assert torch.equal(with_label[0], wrapped)
    assert with_label[1] == 3


def test_what_the_transform_refuses() -> None:
    grey, colors = PolicyTransform(learned(1)), PolicyTransform(learned())
    wrong: list[tuple[nn.Module, Any, str]] = [
        (colors, photos(1, 1)[0], "have 1 channels, but the policy was learned on images with 3"),
        (grey, photos(1)[0], "have 3 channels, but the policy was learned on images with 1"),
        (colors, to_pillow(photos(1, 1)[0]), "have 1 channels, but the policy was learned on images with 3"),
        (grey, to_pillow(photos(1)[0]), "have 3 channels, but the policy was learned on images with 1"),
        (colors, to_pillow(photos(1)[0]).convert("RGBA"), "mode 'RGBA'; convert it to one of L, RGB"),
        (colors, Normalization(*IMAGENET)(photos(1))[0], r"must lie in \[0, 1\]: put PolicyTransform before Normalize"),
        (colors, photos(1)[0].float(), r"values from 0 to 255; a floating-point image must lie in \[0, 1\]"),
        (colors, photos(1)[0].int(), "has dtype torch.int32"),
        (colors, photos(1)[0].numpy(), "is a ndarray; give a Pillow image or a torch tensor"),
    ]
    for transform, image, message in wrong:
        with pytest.raises(ValueError, match=message):
            transform(image)


# -- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_timms_loss_of_weighted_targets_is_the_weighted_loss(smoothing: float) -> None:
    """And so are its gradients."""
    loss_fn = library("timm.loss").SoftTargetCrossEntropy()
    network, images, labels = small_network(), photos(), LABELS
    expected = explicit(learned(), network, images, labels, smoothing)
    torch.manual_seed(5)
    mixup_fn = PolicyMixup(learned(), *IMAGENET, num_classes=CLASSES, label_smoothing=smoothing)
    inputs, targets = mixup_fn(Normalization(*IMAGENET)(images), labels)
    found = loss_fn(network(inputs), targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients(network, found), gradients(network, expected), rtol=0, atol=1e-6)
    assert targets.sum(1).std() > 0.1  # weights differ
    assert targets.sum().item() == pytest.approx(N, abs=1e-4)


def weighted_targets(policy: ma.LearnedPolicy, **options: Any) -> tuple[Tensor, Tensor]:
    """Images and targets of the hook."""
    return PolicyMixup(policy, *IMAGENET, num_classes=CLASSES, **options)(Normalization(*IMAGENET)(photos()), LABELS)


LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "binary": lambda: library("timm.loss").BinaryCrossEntropy(),
    "binary, with a threshold": lambda: library("timm.loss").BinaryCrossEntropy(target_threshold=0.2),
    "asymmetric": lambda: library("timm.loss").AsymmetricLossMultiLabel(),
    "smoothed again": lambda: torch.nn.CrossEntropyLoss(label_smoothing=0.1),
    "squared": lambda: torch.nn.MSELoss(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_linear_in_weighted_targets_is_refused(name: str) -> None:
    """Its gradient is not that of the weighted mean of what the samples' own targets give."""
    _, targets = weighted_targets(learned())
    weights, logits, loss_fn = targets.sum(1), torch.randn(N, CLASSES, requires_grad=True), LOSSES[name]()
    plain = targets.as_subclass(Tensor)
    parts = [loss_fn(one[None], target[None] / w) * w for one, target, w in zip(logits, plain, weights, strict=True)]
    meant, found = (
        torch.autograd.grad(loss, logits)[0] for loss in (torch.stack(parts).mean(), loss_fn(logits, plain))
    )
    assert not torch.allclose(found / found.norm(), meant / meant.norm(), rtol=0.01)
    with pytest.raises(ValueError, match=r"only a loss that is linear in them takes; use timm\.loss\.SoftTargetCross"):
        loss_fn(logits, targets)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "of another type": lambda targets: targets.to(torch.float64),
    "a part": lambda targets: targets[:],
    "with a threshold": lambda targets: (targets > 0.2).float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weighted_targets_stay_what_they_are(change: Callable[[Tensor], Tensor]) -> None:
    _, targets = weighted_targets(learned())
    with pytest.raises(ValueError, match="only a loss that is linear in them takes"):
        F.binary_cross_entropy_with_logits(torch.zeros(N, CLASSES), change(targets))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_loss_of_weighted_targets_is_a_plain_tensor(backend: str | None) -> None:
    inputs, targets = weighted_targets(learned())
    logits = small_network()(inputs)
    own, torchs = library("timm.loss").SoftTargetCrossEntropy(), torch.nn.CrossEntropyLoss()
    loss_fn = own if backend is None else torch.compile(own, backend=backend)
    found = loss_fn(logits, targets)
    assert type(found) is Tensor
    torch.testing.assert_close(found, own(logits, targets.as_subclass(Tensor)))
    torch.testing.assert_close(found, torchs(logits, targets))


def test_targets_without_weights_are_for_any_loss() -> None:
    """Those of a distribution alone are all as heavy."""
    _, targets = weighted_targets(learned().sampler_only(), label_smoothing=0.0)
    torch.testing.assert_close(targets, F.one_hot(LABELS, CLASSES).float())
    library("timm.loss").BinaryCrossEntropy()(torch.zeros(N, CLASSES), targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_targets_are_timms(smoothing: float) -> None:
    """On, off, type and device as of its Mixup with nothing mixed; where --mixup-off-epoch came, nothing else is."""
    mixup = library("timm.data.mixup")
    labels = LABELS
    theirs = mixup.mixup_target(labels, CLASSES, 1.0, smoothing)
    ours = one_hot(labels, CLASSES, smoothing)
    assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
    assert torch.equal(ours, theirs)
    images = Normalization(*IMAGENET)(photos())
    off = PolicyMixup(learned(), *IMAGENET, num_classes=CLASSES, label_smoothing=smoothing)
    their_off = mixup.Mixup(0.8, label_smoothing=smoothing, num_classes=CLASSES)
    off.mixup_enabled = their_off.mixup_enabled = False
    for found, expected in zip(off(images, labels), their_off(images.clone(), labels), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_behind_timms_prefetcher(dtype: torch.dtype) -> None:
    loader = library("timm.data.loader")
    samples = [(image.numpy(), i % CLASSES) for i, image in enumerate(photos())]
    batches = DataLoader(samples, N, collate_fn=loader.fast_collate)  # type: ignore[arg-type]
    (images, labels), *_ = loader.PrefetchLoader(batches, *IMAGENET, device=torch.device("cpu"), img_dtype=dtype)
    normalization = Normalization(*IMAGENET)
    assert torch.equal(normalization.undo(images), photos())
    if dtype == torch.float32:
        assert torch.equal(images, normalization(photos()))
    torch.manual_seed(5)
    found, targets = PolicyMixup(learned(), *IMAGENET, num_classes=CLASSES)(images, labels)
    torch.manual_seed(5)
    pixels, weights = learned().augment(photos())
    assert torch.equal(found, normalization(pixels, dtype))
    assert torch.equal(targets, one_hot(labels, CLASSES, 0.1) * (N * weights)[:, None])


def test_what_the_hook_refuses() -> None:
    hook = PolicyMixup(learned(), *IMAGENET, num_classes=CLASSES)
    images, labels = Normalization(*IMAGENET)(photos()), LABELS
    wrong = [
        (photos(), labels, "are torch.uint8; they must be normalised, in floating point"),
        (photos() / 255, labels, "not a uint8 pixel"),
        (images[:, :1], labels, "with a mean of 3 channels"),
        (images, labels + 1, "labels are 1 to 5; classes are 0 to 4"),
        (images, F.one_hot(labels), "give class numbers"),
    ]
    for image, label, message in wrong:
        with pytest.raises(ValueError, match=message):
            hook(image, label)
    with pytest.raises(ValueError, match="label_smoothing is 1;"):
        PolicyMixup(learned(), *IMAGENET, num_classes=CLASSES, label_smoothing=1.0)


# -- Lightning --------------------------------------------------------------------------------------------------------

STEPS, HELD_OUT = 5, 3  # batches an epoch, and for the policy: not as many, so that an epoch begins anywhere in them


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    labels = torch.arange(N * STEPS) % CLASSES
    train = TensorDataset(photos(N * STEPS, seed=1), labels)
    return DataLoader(train, N), DataLoader(TensorDataset(*train[: N * HELD_OUT]), N)


def parts(network: nn.Module) -> tuple[ma.Learner, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(2)
    policy = ma.PolicyNetwork(6 * 7 * 7)
    learner = ma.Learner(network, ma.TransformationSampler(), policy, every=2, generator=torch.Generator())
    task = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    return learner, task, torch.optim.Adam(learner.policy_parameters(), 1e-2)


def schedules(task: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """One for each epoch, one for each step."""
    return [torch.optim.lr_scheduler.ExponentialLR(task, gamma) for gamma in (0.5, 0.9)]


def joint_module(**methods: Any) -> Any:
    """A LightningModule for joint training; seeded an epoch, because Lightning's checkpoint holds no generators."""
    module = library("lightning.pytorch").LightningModule

    class Joint(mixins.JointTraining, module):
        def __init__(self) -> None:
            super().__init__()
            self.network = small_network()

        def configure_optimizers(self) -> Any:
            self.learner, task, policy = parts(self.network)
            epoch, step = schedules(task)
            return [task, policy], [epoch, {"scheduler": step, "interval": "step"}]

        def on_train_epoch_start(self) -> None:
            assert self.learner.generator is not None
            self.learner.generator.manual_seed(self.current_epoch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.network(batch[0] / 255), batch[1]))

    return type("Joint", (Joint,), methods)()


def trainer(epochs: int, folder: Path | None = None, **options: Any) -> Any:
    pytorch = library("lightning.pytorch")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    keeps = {"callbacks": [pytorch.callbacks.ModelCheckpoint(folder)]} if folder else {"enable_checkpointing": False}
    return pytorch.Trainer(max_epochs=epochs, **{**quiet, **keeps, **options})


def states(learner: ma.Learner) -> dict[str, Any]:
    """All that is learned."""
    return {"w": dict(bare_state(learner.network)), **learner.state_dict()}


def bare_state(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def test_joint_training_in_lightning_is_the_plain_loop() -> None:
    learner, task, policy = parts(small_network())
    epoch_schedule, step_schedule = schedules(task)
    train, validation = loaders()
    held_out = itertools.cycle(list(validation))
    for epoch in range(2):
        learner.generator.manual_seed(epoch)  # type: ignore[union-attr]
        for images, labels in train:
            learner.step(images, labels, task, policy, held_out)
            step_schedule.step()
        learner.sampler.update()
        epoch_schedule.step()
    module, fit = joint_module(), trainer(2)
    fit.fit(module, *loaders())
    torch.testing.assert_close(states(module.learner), states(learner), rtol=0, atol=0)
    assert module.learner.steps == fit.global_step == 2 * STEPS
    assert fit.callback_metrics["train_loss"] > 0
    assert module.optimizers()[0].param_groups[0]["lr"] == task.param_groups[0]["lr"]
    assert not torch.equal(learner.sampler.probabilities, ma.TransformationSampler().probabilities)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_joint_training_resumes_from_lightnings_checkpoint(tmp_path: Path) -> None:
    whole = joint_module()
    trainer(3).fit(whole, *loaders())
    trainer(1, tmp_path).fit(joint_module(), *loaders())
    (checkpoint,) = tmp_path.glob("*.ckpt")
    resumed, fit = joint_module(), trainer(3, tmp_path)
    fit.fit(resumed, *loaders(), ckpt_path=checkpoint)
    assert fit.global_step == 3 * STEPS
    torch.testing.assert_close(states(resumed.learner), states(whole.learner), rtol=0, atol=0)


class Stream(IterableDataset[Any]):
    """Of unknown length."""

    def __iter__(self) -> Any:
        return iter(loaders()[1].dataset)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
@pytest.mark.parametrize("kind", ["a loader", "a stream", "an endless stream"])
def test_the_policy_learns_from_the_batches_it_is_given(kind: str) -> None:
    asked = []

    def policy_dataloader(self: Any) -> Any:
        asked.append(self)
        loader = loaders()[1] if kind == "a loader" else DataLoader(Stream(), N)
        return itertools.chain.from_iterable(itertools.repeat(loader)) if kind == "an endless stream" else loader

    given, usual = joint_module(policy_dataloader=policy_dataloader), joint_module()
    trainer(1, limit_val_batches=0).fit(given, loaders()[0])
    trainer(1).fit(usual, *loaders())
    assert asked == [given]
    torch.testing.assert_close(states(given.learner), states(usual.learner), rtol=0, atol=0)


def test_a_second_fit_goes_on_with_the_policy() -> None:
    """The learner is made anew each time, and began again."""
    module = joint_module()
    trainer(2).fit(module, *loaders())
    before = module.learner
    trainer(1).fit(module, *loaders())
    assert module.learner is not before
    assert module.learner.steps == 3 * STEPS
    assert torch.equal(module.learner.sampler.past[:2], before.sampler.past)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_a_checkpoint_that_was_only_looked_at_keeps_the_policy(tmp_path: Path) -> None:
    module = joint_module()
    trainer(1, tmp_path).fit(module, *loaders())
    (file,) = tmp_path.glob("*.ckpt")
    looked_at, looks = joint_module(), trainer(1, tmp_path)
    looks.validate(looked_at, loaders()[1], ckpt_path=file, verbose=False)
    looks.save_checkpoint(tmp_path / "again.ckpt")
    kept = torch.load(tmp_path / "again.ckpt", weights_only=True)[mixins.KEY]
    torch.testing.assert_close(kept, module.learner.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_a_second_fit_begins_a_stream_again_that_ends_before_its_length() -> None:
    class Short(list[Any]):
        def __len__(self) -> int:
            return super().__len__() + STEPS

    batches = Short(itertools.islice(loaders()[1], 1))
    module = joint_module(policy_dataloader=lambda self: batches)
    for _ in range(2):
        trainer(1, limit_val_batches=0).fit(module, loaders()[0])
    assert module.learner.steps == 2 * STEPS


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_what_joint_training_refuses_in_lightning() -> None:
    train, validation = loaders()
    with pytest.raises(ValueError, match="the trainer has none; give fit"):
        trainer(1).fit(joint_module(), train)

    def floats(batch: Any) -> Any:
        images, labels = default_collate(batch)
        return Normalization(*IMAGENET)(images), labels

    normalised = DataLoader(train.dataset, N, collate_fn=floats)
    with pytest.raises(ValueError, match=r"are torch.float32; augmentation needs uint8"):
        trainer(1).fit(joint_module(), normalised, validation)

    def one_optimizer(self: Any) -> Any:
        self.learner, task, _ = parts(self.network)
        return task

    with pytest.raises(ValueError, match="must return two optimizers"):
        trainer(1).fit(joint_module(configure_optimizers=one_optimizer), train, validation)

    def swapped(self: Any) -> Any:
        self.learner, task, policy = parts(self.network)
        return policy, task

    with pytest.raises(ValueError, match="the task optimizer has the other one's parameters"):
        trainer(1).fit(joint_module(configure_optimizers=swapped), train, validation)
    with pytest.raises(ValueError, match="their loader is empty"):
        trainer(1, limit_val_batches=0).fit(joint_module(policy_dataloader=lambda self: []), train)


@pytest.mark.filterwarnings("ignore:The lr scheduler dict contains the key")
def test_a_scheduler_that_waits_for_validation_is_refused() -> None:
    def plateau(self: Any) -> Any:
        self.learner, task, policy = parts(self.network)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(task)
        return [task, policy], [{"scheduler": scheduler, "monitor": "val_loss"}]

    with pytest.raises(ValueError, match=r"ReduceLROnPlateau needs a validation metric.*in on_validation_epoch_end"):
        trainer(1).fit(joint_module(configure_optimizers=plateau), *loaders())


def test_schedulers_are_stepped_as_often_as_they_say() -> None:
    def rarely(self: Any) -> Any:
        self.learner, task, policy = parts(self.network)
        epoch, step = schedules(task)
        by_step = {"scheduler": step, "interval": "step", "frequency": 3}
        return [task, policy], [{"scheduler": epoch, "frequency": 2}, by_step]

    module = joint_module(configure_optimizers=rarely)
    trainer(5).fit(module, *loaders())
    assert module.optimizers()[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2 * 0.9 ** (5 * STEPS // 3))


def transfer_module(policy: ma.LearnedPolicy) -> Any:
    class Transferred(mixins.Transfer, library("lightning.pytorch").LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.policy = small_network(), policy

        def forward(self, images: Tensor) -> Tensor:
            return self.network(images)

        def prepare(self, images: Tensor) -> Tensor:
            return Normalization(*IMAGENET)(images)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.network.parameters(), 1.0)

    return Transferred()


def test_transfer_in_lightning_is_the_weighted_loss() -> None:
    module = transfer_module(learned())
    before = {name: value.clone() for name, value in theta_and_w(learned()).items()}
    network, (images, labels) = small_network(), next(iter(loaders()[0]))
    step = gradients(network, explicit(learned(), network, images, labels, 0))
    # One batch; the seed is set where the batch is there, because loaders and Lightning draw too.
    module.on_train_batch_start = lambda batch, batch_idx: torch.manual_seed(5)
    trainer(1, limit_train_batches=1).fit(module, loaders()[0])
    for start, moved, gradient in zip(network.parameters(), module.network.parameters(), step, strict=True):
        torch.testing.assert_close(moved.data, start.data - gradient, rtol=0, atol=1e-6)
    assert not any("policy" in name for name in module.state_dict())
    torch.testing.assert_close(theta_and_w(learned()), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"are torch.float32; augmentation needs uint8"):
        module.training_step((images / 255, labels), 0)


def theta_and_w(policy: ma.LearnedPolicy) -> dict[str, Tensor]:
    _, frozen, extractor = policy.parts()
    assert extractor is not None
    return {**frozen.state_dict(), **extractor.state_dict()}


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def hf_model() -> Any:
    torch.manual_seed(1)
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=SIDE, patch_size=8, num_labels=CLASSES, **sizes)
    return transformers.ViTForImageClassification(config)


def hf_network(model: Any) -> Any:
    """The same as a module from images to logits, with the same parameters."""
    network = nn.Module()
    network.add_module("model", model)
    network.forward = lambda images: model(images).logits
    return network


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, n: int = N) -> None:
        self.pixels, self.labels = Normalization(*IMAGENET)(photos(n, seed=1)), torch.arange(n) % CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[i], "labels": self.labels[i]}


def hf_trainer(folder: Path, policy: ma.LearnedPolicy | None = None, arguments: Any = None, **options: Any) -> Any:
    transformers, _ = library("transformers"), library("accelerate")
    kind = type("PolicyTrainer", (TrainerTransfer, transformers.Trainer), {})
    settings = {
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
        "save_strategy": "no", "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant",
        "max_grad_norm": 0, "max_steps": 1, "per_device_train_batch_size": N, **(arguments or {}),
    }  # fmt: skip
    options = {"mean": IMAGENET[0], "std": IMAGENET[1], "train_dataset": Rows(), **options}
    given = transformers.TrainingArguments(str(folder), **settings)
    return kind(hf_model(), given, policy=policy or learned(), **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_hugging_faces_trainer_is_the_weighted_loss(smoothing: float, tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, arguments={"label_smoothing_factor": smoothing})
    batch = default_collate(list(Rows()))
    network = hf_network(hf_model())
    expected = explicit(learned(), network, photos(seed=1), batch["labels"], smoothing)
    trainer.model.train()
    torch.manual_seed(5)
    found, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert outputs["logits"].shape == (N, CLASSES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    ours, theirs = gradients(trainer.model, found), gradients(network, expected)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    trainer.model.eval()  # and evaluation is its own
    plain = F.cross_entropy(network(batch["pixel_values"]), batch["labels"], label_smoothing=smoothing)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), plain)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_step_of_hugging_faces_trainer(accumulated: int, tmp_path: Path) -> None:
    """Accumulated batches count alike, as they do for the Trainer's own loss."""

    class Seeded(ma.LearnedPolicy):
        """Draws the same for each batch."""

        def sample(self, n: int, generator: torch.Generator | None = None) -> ma.Transformation:
            return super().sample(n, torch.Generator().manual_seed(5))

    policy = learned()
    seeded = Seeded(policy.probabilities, policy.source, *copy.deepcopy(policy.modules))
    arguments = {"gradient_accumulation_steps": accumulated}
    trainer = hf_trainer(tmp_path, seeded, arguments, train_dataset=Rows(N * accumulated))
    order = []
    augment = trainer.policy.augment
    trainer.policy.augment = lambda images, labels: order.append(images) or augment(images, labels)
    trainer.train()
    assert len(order) == accumulated
    network, rows = hf_network(hf_model()), Rows(N * accumulated)
    losses = []
    for images in order:  # shuffled: found again by their pixels
        index = [int((rows.pixels == image).all((1, 2, 3)).nonzero()) for image in images]
        inputs, weights = NormalizedPolicy(seeded, *IMAGENET).augment(images)
        losses.append((weights * F.cross_entropy(network(inputs), rows.labels[index], reduction="none")).sum())
    expected = gradients(network, torch.stack(losses).mean())
    for start, moved, gradient in zip(network.parameters(), trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(moved.data, start.data - gradient, rtol=0, atol=1e-6)


def test_mean_and_std_come_from_the_image_processor(tmp_path: Path) -> None:
    transformers, _ = library("transformers"), library("torchvision")
    processor = transformers.ViTImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=list(IMAGENET[0]), image_std=list(IMAGENET[1])
    )
    trainer = hf_trainer(tmp_path, processing_class=processor, mean=None, std=None)
    assert (trainer.policy.normalization.mean, trainer.policy.normalization.std) == IMAGENET
    pixels = processor(list(photos()), return_tensors="pt")["pixel_values"]
    assert torch.equal(trainer.policy.normalization.undo(pixels), photos())


def test_what_is_refused_in_hugging_faces_trainer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mean and std of pixel_values are not known"):
        hf_trainer(tmp_path, mean=None, std=None)
    with pytest.raises(ValueError, match="compute_loss_func returns a single loss"):
        hf_trainer(tmp_path, compute_loss_func=lambda outputs, labels, num_items_in_batch: None)
    trainer, batch = hf_trainer(tmp_path), default_collate(list(Rows()))
    trainer.model.train()
    wrong = [
        ({"labels": batch["labels"]}, "has no 'pixel_values', only labels"),
        (batch | {"labels": F.one_hot(batch["labels"]).float()}, "the policy takes class numbers"),
        (batch | {"pixel_values": photos()}, "are torch.uint8; they must be normalised, in floating point"),
        (batch | {"pixel_values": photos(channels=1) / 255}, "with a mean of 3 channels"),
    ]
    for inputs, message in wrong:
        with pytest.raises(ValueError, match=message):
            trainer.compute_loss(trainer.model, inputs)


# -- several processes ------------------------------------------------------------------------------------------------

WORLD = 2


class Dealt(ma.TransformationSampler):
    """For a learner or a learned policy, which takes its part of what is drawn for the global mini-batch: such that
    this is each `WORLD`-th sample, as Lightning and timm deal them out."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> ma.Transformation:
        world = dist.get_world_size() if dist.is_initialized() else 1
        return super().sample(n, generator)[torch.arange(n).view(-1, world).T.flatten()]


def strided_module(world: int) -> Any:
    """In double precision, so that only the order of sums differs."""

    def configure_optimizers(self: Any) -> Any:
        torch.manual_seed(2)
        policy, generator = ma.PolicyNetwork(6 * 7 * 7).double(), torch.Generator()
        self.learner = ma.Learner(self.network, Dealt(), policy, route="forward", every=2, generator=generator)
        parameters = self.network.parameters(), self.learner.policy_parameters()
        return [torch.optim.SGD(part, 0.1, momentum=0.9) for part in parameters]

    def on_fit_end(self: Any) -> None:
        torch.save(states(self.learner), f"{self.folder}/{self.global_rank}-of-{world}.pt")

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None: ...

    methods = (configure_optimizers, on_fit_end, validation_step)
    return joint_module(**{method.__name__: method for method in methods}).double()


def joint_worker(rank: int, world: int, folder: str, port: int = 0) -> None:
    torch.set_num_threads(1)
    if world > 1:
        numbers = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
        os.environ |= {name: str(number) for name, number in numbers.items()}  # as torchrun sets them
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    module = strided_module(world)
    module.folder = folder
    # Each gets its part in the given order, where Lightning would shuffle.
    train, validation = (
        DataLoader(loader.dataset, N // world, sampler=DistributedSampler(loader.dataset, world, rank, shuffle=False))
        for loader in loaders()
    )
    strategy = {"devices": world, "strategy": "ddp"} if world > 1 else {}
    trainer(2, use_distributed_sampler=False, **strategy).fit(module, train, validation)


@pytest.mark.slow
def test_two_processes_of_lightning_equal_one(tmp_path: Path) -> None:
    library("lightning.pytorch")
    joint_worker(0, 1, str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(joint_worker, args=(WORLD, str(tmp_path), port), nprocs=WORLD)
    expected = torch.load(tmp_path / "0-of-1.pt")
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}-of-{WORLD}.pt")
        torch.testing.assert_close(found, {**expected, "rank": rank}, rtol=1e-9, atol=1e-12)


def half_worker(rank: int, folder: str) -> None:
    """The gradient of this process's half of a mini-batch, by the hook of timm."""
    learned()  # alone: processes that meet learn together
    meet(rank, WORLD, folder)
    network = DistributedDataParallel(small_network())
    torch.manual_seed(5)
    hook_loss(network, slice(rank, None, WORLD)).backward()
    torch.save([parameter.grad for parameter in network.parameters()], f"{folder}/{rank}.pt")
    leave()


def hook_loss(network: nn.Module, part: slice) -> Tensor:
    images, labels, policy = photos()[part], (LABELS)[part], learned()
    policy.sampler, p = Dealt(), policy.probabilities
    policy.sampler.probabilities.copy_(p)
    hook = PolicyMixup(policy, *IMAGENET, num_classes=CLASSES)
    inputs, targets = hook(Normalization(*IMAGENET)(images), labels)
    return -(targets * network(inputs).log_softmax(1)).sum(1).mean()


@pytest.mark.slow
def test_two_processes_of_timm_equal_one(tmp_path: Path) -> None:
    network = small_network()
    expected = gradients(network, explicit(learned(), network, photos(), LABELS, 0.1))
    mp.spawn(half_worker, args=(str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=0, atol=1e-6)


# -- examples ---------------------------------------------------------------------------------------------------------

RUN = """
import runpy, sys
from metaaugment.lab.bench.ops import define_missing_operators
define_missing_operators()
sys.path.insert(0, sys.argv[1])
runpy.run_path(f"{sys.argv[1]}/{sys.argv[2]}", run_name="__main__")
"""


NEEDED = {
    "torchvision": ("torchvision",),
    "timm": ("timm",),
    "lightning": ("lightning.pytorch",),
    "transformers": ("transformers", "accelerate", "torchvision"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_example_runs(name: str) -> None:
    for needed in NEEDED[name]:
        library(needed)
    command = [sys.executable, "-c", RUN, str(EXAMPLES), f"with_{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("test accuracy ")[1].split("%")[0])
    assert accuracy > 40
