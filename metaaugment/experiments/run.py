"""From a recipe to a run: the parts put together, trained, and looked at once on the test set."""

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from metaaugment.data import DataSet, augment, dataset
from metaaugment.data.batches import Batches, Reader, derived_seed, on_device, once
from metaaugment.experiments.methods import METHODS
from metaaugment.experiments.paper import RECIPES
from metaaugment.experiments.recipe import Recipe
from metaaugment.features import feature_dim
from metaaugment.learner import Learner, Sampler
from metaaugment.networks import network
from metaaugment.ops import Space
from metaaugment.policy import UniformPolicy
from metaaugment.sampler import FixedSampler, UniformSampler
from metaaugment.training import folder as run_folder
from metaaugment.training.evaluation import Score, evaluate
from metaaugment.training.interruption import Interrupted
from metaaugment.training.machine import choose_device, commit, machine
from metaaugment.training.progress import Bar, Lines, TensorBoard, duration
from metaaugment.training.schedule import cosine
from metaaugment.training.trainer import Phase, Trainer, Watcher
from metaaugment.transfer import LearnedPolicy

# What a seed is used for; each use has random numbers of its own.
INITIAL, ORDER, VALIDATION_ORDER, DRAWS = range(4)


@dataclass(frozen=True)
class Place:
    """Where a run happens and what it leaves; nothing that is part of the experiment."""

    data: Path | None = None
    """Folder of the data; $METAAUGMENT_DATA or ~/.cache/metaaugment if not given."""
    out: Path | None = None
    """Folder of the run, which must be new; runs/RECIPE-METHOD-seedN if not given."""
    resume: Path | None = None
    """Folder of a run to go on with, under the settings it began with."""
    device: str | None = None
    """cpu or cuda; cuda where there is one if not given."""
    precision: Literal["bf16", "float32"] | None = None
    """Of passes through the networks; bf16 on GPUs, float32 elsewhere if not given."""
    capture: bool = True
    """Whether steps on a GPU are replayed as CUDA graphs."""
    workers: int = 4
    """Processes that read image files."""
    corrupt: Literal["error", "skip"] = "error"
    """What happens to image files that cannot be read; those skipped are counted."""
    tensorboard: bool = False
    """Also write the log for TensorBoard, into the folder of the run."""


@dataclass(frozen=True)
class Experiment:
    """A recipe's parts, ready to be trained."""

    recipe: Recipe
    data: DataSet
    network: nn.Module
    device: torch.device
    generator: torch.Generator  # of all draws that augment
    layout: torch.memory_format

    def phases(self) -> list[Phase]:
        """What is trained in turn: mostly one thing; on ImageNet random, joint and frozen."""
        recipe = self.recipe
        if recipe.method == "metaaugment" and recipe.policy is not None:
            return [Phase(recipe.epochs, self._transferred)]
        if recipe.method != "metaaugment" or not (recipe.random_epochs or recipe.frozen_epochs):
            return [Phase(recipe.epochs, self._joint)]
        joint = recipe.epochs - recipe.random_epochs - recipe.frozen_epochs
        phases = (
            Phase(recipe.random_epochs, self._random),
            Phase(joint, self._joint),
            Phase(recipe.frozen_epochs, self._frozen),
        )
        return [phase for phase in phases if phase.epochs]

    def _joint(self, before: Learner | None) -> tuple[Learner, Optimizer | None]:
        recipe, method = self.recipe, METHODS[self.recipe.method]
        sampler, policy = method.sampler(recipe.epsilon, recipe.window), method.policy(feature_dim(self.network))
        learner = self._learner(sampler, policy, space=method.space or recipe.space)
        if not any(parameter.requires_grad for parameter in policy.parameters()):
            return learner, None
        learned, fused = learner.policy_parameters(), self.device.type == "cuda"
        if recipe.policy_optimizer == "adam":
            optimizer = Adam(
                learned, recipe.policy_lr, weight_decay=recipe.policy_weight_decay, fused=fused, capturable=fused
            )
        else:
            optimizer = SGD(
                learned, recipe.policy_lr, recipe.policy_momentum, weight_decay=recipe.policy_weight_decay, fused=fused
            )
        return learner, clipped(optimizer, recipe.policy_clip)

    def _random(self, before: Learner | None) -> tuple[Learner, None]:
        return self._learner(UniformSampler(), UniformPolicy()), None

    def _frozen(self, before: Learner | None) -> tuple[Learner, None]:
        """Under the policy of the learner before it, which goes on seeing through the network as it is then."""
        eyes = deepcopy(self.network).eval().requires_grad_(False)
        policy = METHODS[self.recipe.method].policy(feature_dim(self.network))
        sampler = FixedSampler()
        if before is not None:
            policy.load_state_dict(before.policy.state_dict())
            sampler.probabilities.copy_(before.sampler.probabilities)  # type: ignore[attr-defined]
        return self._learner(sampler, policy.requires_grad_(False), eyes), None

    def _transferred(self, before: Learner | None) -> tuple[Learner, None]:
        """Under a policy from a file, frozen with the network that it sees through."""
        assert self.recipe.policy is not None
        policy = LearnedPolicy.load(self.recipe.policy).to(self.device)
        if policy.source.channels != self.data.channels:
            raise ValueError(
                f"--policy {self.recipe.policy} was learned on images of {policy.source.channels} channels, "
                f"but {self.data.name} has {self.data.channels}"
            )
        return self._learner(*policy.parts(self.data.mean, self.data.std), space=policy.space), None

    def _learner(
        self, sampler: Sampler, policy: nn.Module, extractor: nn.Module | None = None, space: str | Space | None = None
    ) -> Learner:
        recipe, data, generator = self.recipe, self.data, self.generator
        plain = recipe.method == "baseline"
        padding, cutout = (recipe.baseline_crop, 0) if plain else (recipe.crop, recipe.cutout)
        before = [augment.random_flip(generator)] if recipe.flip else []
        before += [augment.random_crop(padding, data.fill, generator)] if padding else []
        after = [augment.random_cutout(cutout, data.fill, generator)] if cutout else []
        return Learner(
            self.network, sampler, policy.to(self.device), extractor,
            route=recipe.route, lagged=recipe.lagged, every=recipe.every, copies=recipe.copies, alpha=recipe.alpha,
            loss=partial(F.cross_entropy, reduction="none", label_smoothing=recipe.label_smoothing),
            before=augment.in_turn(before), after=augment.in_turn(after), prepare=self.prepare(), generator=generator,
            space=space or recipe.space, fill=data.fill,
        )  # fmt: skip

    def prepare(self) -> augment.Augmentation:
        return augment.normalization(self.data.mean, self.data.std, self.device, self.layout)


def train(recipe: Recipe, place: Place, console: Console) -> dict[str, Any]:
    """Train to the end and write `result.json`; returns what it holds."""
    recipe, resumed = _recorded(recipe, place)
    experiment = prepare(recipe, place, console)
    out = place.resume or place.out or Path("runs") / f"{recipe.name}-{recipe.method}-seed{recipe.seed}"
    watchers: list[Watcher] = [Bar(console) if console.is_terminal else Lines(console)]
    watchers += [TensorBoard(out)] if place.tensorboard else []
    if not resumed:
        run_folder.new(out)
    with run_folder.locked(out):
        if resumed and (out / run_folder.RESULT).exists():
            console.print(f"{out} is finished already.", highlight=False)
            return run_folder.read_json(out / run_folder.RESULT)
        run_folder.write_json(out / run_folder.RECIPE, recipe.to_json())
        reader = Reader(place.workers, place.corrupt == "skip")
        training = trainer(experiment, place, out, reader, watchers)
        began = training.resume() if resumed else False
        introduce(experiment, training, out, began, console)
        try:
            training.run()
        except Interrupted:
            console.print(
                f"stopped after epoch {training.epoch}, step {training.step}; nothing is lost, go on with: "
                f"metaaugment train {recipe.name} --resume {out}",
                highlight=False,
            )
            raise
        test = once(on_device(experiment.data.test, experiment.device), experiment.device, reader)
        with training.precision():
            score = evaluate(experiment.network, test, experiment.prepare())
        result = _result(experiment, training, score, reader)
        run_folder.write_json(out / run_folder.RESULT, result)
    conclude(result, out, console)
    return result


def prepare(recipe: Recipe, place: Place, console: Console) -> Experiment:
    """Data, network and generator of a recipe; nothing is written yet."""
    recipe.check()
    device = torch.device(choose_device(place.device))
    if recipe.policy is not None:
        LearnedPolicy.load(recipe.policy)  # refuses what is none before anything is read or written
    with console.status(f"reading {recipe.dataset}"):
        data = dataset(recipe.dataset, place.data, seed=recipe.split_seed, size=recipe.size, per_class=recipe.per_class)
    _check_sizes(recipe, data)
    torch.manual_seed(derived_seed(recipe.seed, INITIAL))
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    net = network(recipe.network, data.num_classes, data.channels)
    if recipe.pretrained is not None:
        load_pretrained(net, recipe.pretrained, console)
    net = net.to(device, memory_format=layout)  # type: ignore[call-overload]
    generator = torch.Generator(device).manual_seed(derived_seed(recipe.seed, DRAWS))
    return Experiment(recipe, data, net, device, generator, layout)


def trainer(experiment: Experiment, place: Place, out: Path, reader: Reader, watchers: Sequence[Watcher]) -> Trainer:
    recipe, data, device = experiment.recipe, experiment.data, experiment.device
    batches = Batches(on_device(data.train, device), recipe.batch, derived_seed(recipe.seed, ORDER), device, reader)
    validation = Batches(
        on_device(data.val, device), min(recipe.policy_batch, len(data.val)),
        derived_seed(recipe.seed, VALIDATION_ORDER), device, reader,
    )  # fmt: skip
    half = place.precision == "bf16" or (place.precision is None and device.type == "cuda")
    precision = partial(torch.autocast, device.type, torch.bfloat16) if half else contextlib.nullcontext
    optimizer = SGD(
        experiment.network.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov, fused=device.type == "cuda",
    )  # fmt: skip
    optimizer = clipped(optimizer, recipe.clip)
    rate = cosine(recipe.lr, recipe.epochs * batches.steps, recipe.warmup_epochs * batches.steps, recipe.warmup_lr)
    identity = {**recipe.to_json(), "device": device.type, "data": data.fingerprint(), **_about(data)}
    return Trainer(
        experiment.network, optimizer, experiment.phases(), batches, validation, rate, out, identity, precision,
        captured=place.capture and device.type == "cuda", watchers=watchers,
    )  # fmt: skip


def _about(data: DataSet) -> dict[str, Any]:
    """What an exported policy has to know of the data, as JSON gives it back."""
    image, _ = data.val[0]
    return {
        "num_classes": data.num_classes,
        "channels": data.channels,
        "mean": list(data.mean),
        "std": list(data.std),
        "fill": list(data.fill),
        "sides": list(image.shape[1:]),
    }


def clipped(optimizer: Optimizer, norm: float | None) -> Optimizer:
    """The same optimizer, which first shortens a longer gradient to this norm."""
    if norm is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: _shorten(parameters, norm))
    return optimizer


def _shorten(parameters: Sequence[Tensor], norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters, norm)


def load_pretrained(net: nn.Module, file: Path, console: Console) -> None:
    """Start from a user's weights; a last layer for other classes stays fresh."""
    with file.open("rb"):
        pass
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"--pretrained {file} is no safetensors file ({error})") from None
    own = net.state_dict()
    head = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    fresh = [f"{head}.{part}" for part in ("weight", "bias")]
    if all(name in weights and weights[name].shape != own[name].shape for name in fresh):
        console.print(f"{file}: its last layer has other classes than the data; ours starts fresh.", highlight=False)
        weights = {name: value for name, value in weights.items() if name not in fresh}
    else:
        fresh = []
    for name, value in own.items():
        if name in fresh or name.endswith("num_batches_tracked"):
            continue
        if name not in weights or weights[name].shape != value.shape:
            found = f"{tuple(weights[name].shape)} there" if name in weights else "missing there"
            raise ValueError(
                f"--pretrained {file} does not fit the network: {name} is {tuple(value.shape)} here and {found}; "
                "name the network that it was made with by --network"
            )
    if unknown := sorted(weights.keys() - own.keys()):
        raise ValueError(f"--pretrained {file} has {unknown[0]}, which the network has not; choose another --network")
    net.load_state_dict(weights, strict=False)


def _recorded(recipe: Recipe, place: Place) -> tuple[Recipe, bool]:
    """The recipe of a run to be resumed; what was asked for besides must agree with it."""
    if place.resume is None:
        return recipe, False
    if place.out is not None and place.out != place.resume:
        raise ValueError(f"--out is {place.out}, but --resume goes on in {place.resume}; leave --out away")
    file = place.resume / run_folder.RECIPE
    if not file.exists():
        raise ValueError(
            f"{place.resume} is no run: it has no {run_folder.RECIPE}; begin one with --out {place.resume}"
        )
    recorded = Recipe.from_json(run_folder.read_json(file))
    if recorded.name != recipe.name:
        raise ValueError(f"{place.resume} is a run of {recorded.name}, not of {recipe.name}; name that recipe")
    default = RECIPES[recipe.name]()
    for field in fields(Recipe):
        asked, found = getattr(recipe, field.name), getattr(recorded, field.name)
        if asked != getattr(default, field.name) and asked != found:
            raise ValueError(
                f"--{field.name.replace('_', '-')} is {asked!r}, but {place.resume} was begun with {found!r}; "
                "leave the flag away, or begin another run with --out"
            )
    return recorded, True


def _check_sizes(recipe: Recipe, data: DataSet) -> None:
    n = len(data.train)
    if n < recipe.batch:
        raise ValueError(f"--batch is {recipe.batch}, but there are only {n} training images; choose at most {n}")
    if len(data.val) > n:
        raise ValueError(
            f"the validation split has {len(data.val)} images and the training split only {n}; "
            "train on more, with a larger --per-class or more images"
        )


def introduce(experiment: Experiment, trainer: Trainer, out: Path, resumed: bool, console: Console) -> None:
    """What is about to be trained, on what, and what an epoch costs."""
    recipe, data, learner = experiment.recipe, experiment.data, trainer.learner
    device = torch.cuda.get_device_name(experiment.device) if experiment.device.type == "cuda" else "the CPU"
    parameters = sum(parameter.numel() for parameter in experiment.network.parameters())
    updates = trainer.train.steps // recipe.every if recipe.method == "metaaugment" else 0
    # Over a plain step, measured by `metaaugment bench step` on an H200: a lagged policy update 1.5, an exact one 2.1.
    cost = 1 + (1.5 if recipe.lagged else 2.1) * updates / trainer.train.steps
    console.print(
        f"{recipe.name}: {recipe.method} on {device}; {recipe.dataset}, "
        f"{len(data.train):,} / {len(data.val):,} / {len(data.test):,} images in {data.num_classes:,} classes; "
        f"{recipe.network}, {parameters / 1e6:.1f} M parameters; an epoch is {trainer.train.steps:,} steps of "
        f"{recipe.batch * learner.copies} images"
        + (f" and {updates:,} policy updates, about {cost:.1f} × plain training" if updates else "")
        + f"; into {out}",
        highlight=False,
        soft_wrap=True,
    )
    if data.note:
        console.print(data.note, highlight=False, soft_wrap=True)
    if resumed:
        console.print(f"going on after epoch {trainer.epoch}, step {trainer.step}", highlight=False)


def _result(experiment: Experiment, trainer: Trainer, score: Score, reader: Reader) -> dict[str, Any]:
    rows, recipe = trainer.log.rows(), experiment.recipe
    seconds = sum(row["seconds"] for row in rows)
    cuda = experiment.device.type == "cuda"
    return {
        "name": recipe.name,
        "method": recipe.method,
        "seed": recipe.seed,
        "test_accuracy": score.top1,
        "test_top5": score.top5,
        "test_loss": score.loss,
        "val_accuracy": rows[-1]["val_accuracy"],
        "epochs": len(rows),
        "seconds": seconds,
        "images_per_second": sum(row["images_per_second"] * row["seconds"] for row in rows) / seconds,
        "peak_memory_mib": torch.cuda.max_memory_allocated(experiment.device) / 2**20 if cuda else None,
        "unreadable_files": len(reader.unreadable),
        "data": {
            "fingerprint": trainer.identity["data"],
            "train": len(experiment.data.train),
            "val": len(experiment.data.val),
            "test": len(experiment.data.test),
        },
        "recipe": recipe.to_json(),
        "machine": machine(experiment.device.type),
        "commit": commit(),
    }


def conclude(result: dict[str, Any], out: Path, console: Console) -> None:
    if result["unreadable_files"]:
        console.print(f"{result['unreadable_files']} image files could not be read and were skipped", highlight=False)
    top5 = f", top-5 {result['test_top5']:.2%}" if result["recipe"]["dataset"] == "imagenet" else ""
    console.print(
        f"test accuracy {result['test_accuracy']:.2%}{top5} after {result['epochs']} epochs in "
        f"{duration(result['seconds'])}; {out / run_folder.RESULT}",
        highlight=False,
        soft_wrap=True,
    )
