"""From a recipe to its experiment: data, network, learners for each phase, and the trainer of them all."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from metaaugment.batch_norm import with_global_statistics
from metaaugment.distributed import world_size
from metaaugment.features import feature_dim
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import FoundPolicy
from metaaugment.lab.baselines.rand_augment import further
from metaaugment.lab.data import DATASETS, DataSet, augment, dataset
from metaaugment.lab.data.batches import Batches, Reader, on_device
from metaaugment.lab.data.entry import Refused
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.flags import flag
from metaaugment.lab.experiments.methods import METHODS, copies
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.seeds import DRAWS, INITIAL, LOOKS, ORDER, VALIDATION_ORDER, derived_seed
from metaaugment.lab.training.launch import own_device
from metaaugment.lab.training.look import Look
from metaaugment.lab.training.machine import choose_device
from metaaugment.lab.training.trainer import Phase, Trainer, Watcher, cosine
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learner import Learner
from metaaugment.networks import network
from metaaugment.ops import Space
from metaaugment.policy import UniformPolicy
from metaaugment.sampler import FixedSampler, Sampler, SingleSampler, UniformSampler

# Validation images that are processed at once: four mini-batches, but at least the first and at most the second of
# these numbers, unless a single mini-batch is larger. On an H200 WRN-40-2 trains on 42,600 images/s in mini-batches of
# 512, and on 28,900 in mini-batches of 128.
PART = 256, 512


@dataclass(frozen=True)
class Experiment:
    """A recipe's parts, ready to be trained."""

    recipe: Recipe
    data: DataSet
    network: nn.Module
    device: torch.device
    generator: torch.Generator  # of all random augmentation
    layout: torch.memory_format
    policy: LearnedPolicy | None = None  # to train under, where the recipe names one
    found: FoundPolicy | None = None  # what a compared system found, for methods that augment by it
    policy_name: str | None = None  # of either of the two: a file, or a published policy
    dtype: torch.dtype = torch.float32  # of the networks

    def phases(self) -> list[Phase]:
        """What is trained in turn: mostly one phase; on ImageNet a random, a joint and a frozen one."""
        recipe = self.recipe
        if not recipe.learns:
            return [Phase(recipe.epochs, self._joint if self.policy is None else self._transferred)]
        phases = (
            Phase(recipe.random_epochs, self._random),
            Phase(recipe.joint_epochs, self._joint),
            Phase(recipe.frozen_epochs, self._frozen),
        )
        return [phase for phase in phases if phase.epochs]

    def _joint(self, before: Learner | None) -> tuple[Learner, Optimizer | None]:
        recipe, method = self.recipe, METHODS[self.recipe.method]
        sampler, policy = method.sampler(recipe, self.found), self.fresh_policy()
        learns = any(parameter.requires_grad for parameter in policy.parameters())
        eyes = self.fresh_network() if learns and recipe.extractor == "own" else None
        learner = self.learner(sampler, policy, eyes, method.space if self.found is None else self.found.space)
        learner.alpha.requires_grad_(recipe.learn_alpha and not recipe.real_alpha)
        if not learns:
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
        singles = self.recipe.transformations == "singles"
        sampler = FixedSampler(SingleSampler().probabilities) if singles else UniformSampler()
        return self.learner(sampler, UniformPolicy()), None

    def _frozen(self, before: Learner | None) -> tuple[Learner, None]:
        """Under the policy of the learner before it, which from then on sees through a frozen copy of its network."""
        seen_through = self.network if before is None or before.extractor is None else before.extractor
        eyes = deepcopy(seen_through).eval().requires_grad_(False)
        policy = self.fresh_policy()
        sampler = FixedSampler()
        if before is not None:
            policy.load_state_dict(before.policy.state_dict())
            sampler.probabilities.copy_(before.sampler.probabilities)  # type: ignore[attr-defined]
        return self.learner(sampler, policy.requires_grad_(False), eyes), None

    def _transferred(self, before: Learner | None) -> tuple[Learner, None]:
        """Under a policy from a file, frozen with the network that it sees through."""
        assert self.policy is not None
        return self.learner(*self.policy.parts(self.data.mean, self.data.std), space=self.policy.space), None

    def learner(
        self, sampler: Sampler, policy: nn.Module, extractor: nn.Module | None = None, space: str | Space | None = None
    ) -> Learner:
        """A learner of these parts, with everything else as the recipe says."""
        recipe = self.recipe
        policy = policy.to(self.device, self.dtype)
        extractor = None if extractor is None else extractor.to(self.device, self.dtype)
        return Learner(
            self.network, sampler, policy,
            extractor=extractor, route=recipe.route, lagged=recipe.lagged, alpha=recipe.alpha, **self.handling(space),
        )  # fmt: skip

    def handling(self, space: str | Space | None = None) -> dict[str, Any]:
        """What a learner takes from the recipe whatever its sampler and policy are."""
        recipe, data, generator = self.recipe, self.data, self.generator
        method = METHODS[recipe.method]
        padding, cutout = getattr(recipe, method.crop), 0 if method.plain else recipe.cutout
        before = [augment.random_flip(generator)] if recipe.flip else []
        before += [augment.random_crop(padding, data.fill, generator)] if padding else []
        if recipe.magnitude is not None and recipe.num_ops is not None:
            before += further(recipe.magnitude, recipe.num_ops - 2, recipe.space, data.fill, generator)
        after = [augment.random_cutout(cutout, data.fill, generator)] if cutout else []
        least, most = PART
        at_once = max(recipe.batch, least, min(most, 4 * recipe.batch))
        return {
            "every": recipe.every,
            "part": at_once if recipe.policy_batch > at_once else None,
            "copies": copies(recipe),
            "loss": partial(F.cross_entropy, reduction="none", label_smoothing=recipe.label_smoothing),
            "before": augment.in_turn(before),
            "after": augment.in_turn(after),
            "prepare": self.normalization(),
            "generator": generator,
            "space": space or recipe.space,
            "fill": data.fill,
        }

    def policy_digest(self) -> str | None:
        """Digest of the policy to train under, so that a run is not continued under another one of the same name."""
        policy = self.policy if self.found is None else self.found
        return None if policy is None else policy_digest(policy)

    def fresh_policy(self) -> nn.Module:
        """The policy before anything is learned, with weights from torch's default generator."""
        recipe = self.recipe
        return METHODS[recipe.method].policy(recipe, feature_dim(self.network), self.data.num_classes)

    def fresh_network(self) -> nn.Module:
        """A new network of the task network's kind, with weights from torch's default generator."""
        data = self.data
        net = network(self.recipe.network, data.num_classes, data.channels)
        return placed(net, self.recipe, self.device, self.dtype, self.layout)

    def normalization(self) -> augment.Augmentation:
        return augment.normalization(self.data.mean, self.data.std, self.device, self.layout, self.dtype)


def trainer(
    experiment: Experiment,
    place: Place,
    out: Path,
    reader: Reader,
    watchers: Sequence[Watcher],
    phases: Sequence[Phase] | None = None,
) -> Trainer:
    """The trainer of an experiment, through the phases of its method unless others are given."""
    recipe, data, device = experiment.recipe, experiment.data, experiment.device
    beside = recipe.policy_batch / recipe.every  # validation images per step
    reader, for_policy = reader.shared_out(beside / (beside + recipe.batch)) if recipe.learns else (reader, reader)
    batches = Batches(on_device(data.train, device), recipe.batch, derived_seed(recipe.seed, ORDER), device, reader)
    validation = Batches(
        on_device(data.val, device), min(recipe.policy_batch, len(data.val)),
        derived_seed(recipe.seed, VALIDATION_ORDER), device, for_policy, middles=True,
    )  # fmt: skip
    looked_at = Batches(batches.split, recipe.batch, derived_seed(recipe.seed, LOOKS), device, Reader(0, reader.skip))
    digits = place.precision or ("bf16" if device.type == "cuda" else "float32")
    assert (digits == "float64") == (experiment.dtype == torch.float64)
    half = partial(torch.autocast, device.type, torch.bfloat16)
    precision = half if digits == "bf16" else contextlib.nullcontext
    optimizer = SGD(
        experiment.network.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov, fused=device.type == "cuda",
    )  # fmt: skip
    optimizer = clipped(optimizer, recipe.clip)
    steps = recipe.epochs * batches.steps
    rate = cosine(recipe.lr, steps, recipe.warmup_epochs * batches.steps, recipe.warmup_lr)
    policy_rate = cosine(recipe.policy_lr, steps) if recipe.policy_schedule == "cosine" else None
    identity = {
        **recipe.to_json(),
        "device": device.type,
        "precision": digits,
        "data": data.fingerprint(),
        "policy_sha256": experiment.policy_digest(),
        # What an exported policy or network has to know about the data, in types that survive JSON.
        "classes": list(data.classes),
        "num_classes": data.num_classes,
        "channels": data.channels,
        "mean": list(data.mean),
        "std": list(data.std),
        "fill": list(data.fill),
        "sides": list(data.val.sides),
    }
    phases = phases or experiment.phases()
    # Captured steps were never tried with collectives inside, nor with deterministic algorithms.
    captured = place.capture and device.type == "cuda" and world_size() == 1 and not place.deterministic
    return Trainer(
        experiment.network, optimizer, phases, batches, validation, rate, out, identity, precision,
        captured=captured, watchers=watchers, look=Look(looked_at, data.classes), policy_rate=policy_rate,
        alpha=rate if recipe.real_alpha else None,
    )  # fmt: skip


def policy_digest(policy: LearnedPolicy | FoundPolicy) -> str:
    """The digest by which a run and its result know a policy, whatever file it is in."""
    if isinstance(policy, FoundPolicy):
        return hashlib.sha256(json.dumps(published.encode(policy)).encode()).hexdigest()[:16]
    return policy.digest()[:16]


def prepare(recipe: Recipe, place: Place, console: Console, fresh: bool = True) -> Experiment:
    """Data, network and generator of a recipe; nothing is written yet. `fresh`: as in `assemble`."""
    validity.check(recipe)
    place.check()
    device = own_device(choose_device(place.device))
    dtype = torch.float64 if place.precision == "float64" else torch.float32
    policy = found = None
    name = None if recipe.policy is None else str(recipe.policy)
    if METHODS[recipe.method].found:
        name = name or published.fitting(recipe.method, recipe.dataset)
        found = published.find(name)
        if found.system != recipe.method:
            raise ValueError(f"--policy {recipe.policy} is a policy of {found.system}; use --method {found.system}")
    elif recipe.policy is not None:
        if system := published.system_of(recipe.policy):
            raise ValueError(f"--policy {recipe.policy} is a policy of {system}; use --method {system}")
        policy = LearnedPolicy.load(recipe.policy).to(device)
    data = data_of(recipe, place, console)
    if policy is not None:
        _check_fits(recipe, policy, data)
    if recipe.policy is not None:
        origin = published.search_of(recipe.policy) if policy is None else policy.provenance
        _check_unseen(recipe, origin.get("recipe"))
        users = DATASETS[recipe.dataset].locate is None  # images of a user's own, which may be any
        if users and origin.get("data") not in (None, data.fingerprint()):
            console.print(
                f"--policy {recipe.policy} was learned on other images than those of this run; if it has seen some of "
                "the test images, the test accuracy is too high",
                soft_wrap=True,
            )
    return replace(assemble(recipe, data, device, console, dtype, fresh), policy=policy, found=found, policy_name=name)


def data_of(recipe: Recipe, place: Place, console: Console) -> DataSet:
    """The images that a recipe trains on and is judged by."""
    status = console.status(f"reading {recipe.dataset}")

    def tell(what: str, done: int, total: int | None) -> None:
        status.update(f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}")

    share, of = recipe.held_back, recipe.held_back_from
    try:
        with status:
            data = dataset(
                recipe.dataset, place.data, seed=recipe.split_seed, size=recipe.size, per_class=recipe.per_class,
                area_min=recipe.area_min, white=recipe.white, progress=tell,
            )  # fmt: skip
            return data.rehearsal(share, recipe.split_seed, of) if share else data
    except Refused as error:
        if error.name == "root":  # the flag that is missing has another name, and no value
            raise ValueError(f"{error.allowed} with --data") from None
        raise ValueError(f"{flag(error.name)} is {error.value}; {error.allowed}") from None


def _check_unseen(recipe: Recipe, learned: object) -> None:
    """Refuse a policy that has learned from images that it would be judged by. `learned`: the recipe it comes from."""
    if not isinstance(learned, dict) or learned.get("dataset") != recipe.dataset:
        return
    share, of = recipe.held_back, recipe.held_back_from
    found = learned.get("held_back", 0.0), learned.get("split_seed", 0), learned.get("held_back_from", "validation")
    # Which training images are held back depends on how many there are.
    other = of == "training" and learned.get("per_class") != recipe.per_class
    if share and (other or found != (share, recipe.split_seed, of)):
        raise ValueError(
            f"--held-back is {share:g} of the {of} images, but --policy {recipe.policy} was learned on "
            f"{recipe.dataset} with {found[0]:g} of the {found[2]} images held back, and has seen some that are held "
            f"back now; use one that was learned with --held-back {share:g} --held-back-from {of} --split-seed "
            f"{recipe.split_seed}" + (f" and --per-class {recipe.per_class}" if other else "")
        )
    if found[1] != recipe.split_seed and not DATASETS[recipe.dataset].fixed_test:
        raise ValueError(
            f"--split-seed is {recipe.split_seed}, but --policy {recipe.policy} was learned on {recipe.dataset} with "
            f"{found[1]}, and has seen images that are test images now; use --split-seed {found[1]}"
        )


def _check_fits(recipe: Recipe, policy: LearnedPolicy, data: DataSet) -> None:
    source = policy.source
    if source.channels != data.channels:
        raise ValueError(
            f"--policy {recipe.policy} was learned on images of {source.channels} channels, "
            f"but {data.name} has {data.channels}; use another policy"
        )
    if policy.needs_labels and source.num_classes != data.num_classes:
        raise ValueError(
            f"--policy {recipe.policy} looks at labels and was learned with {source.num_classes} classes, but "
            f"{data.name} has {data.num_classes}; export it with --sampler-only, or use another"
        )


def assemble(
    recipe: Recipe,
    data: DataSet,
    device: torch.device,
    console: Console,
    dtype: torch.dtype = torch.float32,
    fresh: bool = True,
) -> Experiment:
    """An experiment, with its network and generator, on data that are already loaded.

    This seeds torch's default generator, from which come the initial weights of this network and, as they are made
    later, those of `fresh_policy` and `fresh_network`. A network that is not `fresh` gets its weights from a checkpoint
    later, so it is given no pretrained ones.
    """
    _check_shares(recipe, data)
    if fresh:  # of a run that has begun, the checkpoint tells whether these are its data
        check_sizes(recipe, data)
    torch.manual_seed(derived_seed(recipe.seed, INITIAL))
    net = network(recipe.network, data.num_classes, data.channels)
    if fresh and recipe.pretrained is not None and not load_pretrained(net, recipe.pretrained):
        console.print(f"{recipe.pretrained}: its last layer is for other classes; ours starts from random weights.")
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    net = placed(net, recipe, device, dtype, layout)
    generator = torch.Generator(device).manual_seed(derived_seed(recipe.seed, DRAWS))
    return Experiment(recipe, data, net, device, generator, layout, dtype=dtype)


def load_pretrained(net: nn.Module, file: Path) -> bool:
    """Start from a user's weights; False if their last layer is for other classes, in which case ours stays fresh."""
    with file.open("rb"):  # its OSError names the file and the reason; that of safetensors does not
        pass
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"--pretrained {file} is not a safetensors file ({error}); load the weights with torch.load, and write "
            "them with safetensors.torch.save_file"
        ) from None
    own = net.state_dict()
    head = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    fresh = [f"{head}.{part}" for part in ("weight", "bias")]
    if all(name in weights and weights[name].shape != own[name].shape for name in fresh):
        weights = {name: value for name, value in weights.items() if name not in fresh}
    else:
        fresh = []
    for name, value in own.items():
        if name in fresh or (name.endswith("num_batches_tracked") and name not in weights):
            continue
        if name not in weights or weights[name].shape != value.shape:
            found = f"{tuple(weights[name].shape)} in the file" if name in weights else "missing in the file"
            raise ValueError(
                f"--pretrained {file} does not fit: {name} is {tuple(value.shape)} in the network and {found}; "
                "name the network that the file was made with by --network"
            )
    if unknown := sorted(weights.keys() - own.keys()):
        raise ValueError(f"--pretrained {file} has {unknown[0]}, which the network lacks; choose another --network")
    net.load_state_dict(weights, strict=False)
    return not fresh


def placed(
    net: nn.Module, recipe: Recipe, device: torch.device, dtype: torch.dtype, layout: torch.memory_format
) -> nn.Module:
    """A network on its device; with several processes, batch statistics are global unless --local-statistics is set."""
    net = net.to(device, dtype, memory_format=layout)  # type: ignore[call-overload]
    return net if world_size() == 1 or recipe.local_statistics else with_global_statistics(net)


def _check_shares(recipe: Recipe, data: DataSet) -> None:
    """Whether each process gets its share of a mini-batch."""
    processes = world_size()
    if recipe.batch % processes:
        raise ValueError(
            f"--batch is {recipe.batch}, which {processes} processes cannot share evenly; choose a multiple of "
            f"{processes}, or start another number of processes"
        )
    if min(recipe.policy_batch, len(data.val)) < processes:
        raise ValueError(
            f"--policy-batch is {recipe.policy_batch} of {len(data.val)} validation images, less than one for each of "
            f"{processes} processes; choose a larger one, or start fewer processes"
        )


def check_sizes(recipe: Recipe, data: DataSet) -> None:
    """Refuse data that do not fill a mini-batch, or of which a policy would see more images than the network."""
    n = len(data.train)
    less = ", or hold back less" if recipe.held_back and recipe.held_back_from == "training" else ""
    if n < recipe.batch:
        raise ValueError(f"--batch is {recipe.batch}, but there are only {n} training images; choose at most {n}{less}")
    if recipe.learns and len(data.val) > n:
        raise ValueError(
            f"the validation split has {len(data.val)} images and the training split only {n}; to learn a policy, "
            f"train on more, with a larger --per-class or more images{less}"
        )


def clipped(optimizer: Optimizer, norm: float | None) -> Optimizer:
    """The same optimizer, which first clips the gradient to this norm."""
    if norm is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def shorten(*_: object) -> None:
            nn.utils.clip_grad_norm_(parameters, norm)

        optimizer.register_step_pre_hook(shorten)
    return optimizer
