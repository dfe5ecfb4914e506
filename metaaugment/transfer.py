"""The learned policy as one file: θ, w and p, frozen, for the training of any other network.

The paper's transfer (its appendix, "Transferability"): the new network trains on images augmented by p, each weighted
by the policy network, which sees them through the network it was learned with; `docs/policy-file.md` has the format.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from metaaugment import sealed
from metaaugment.distributed import bare
from metaaugment.embedding import K, embed
from metaaugment.frozen import Eyes, Judge, check_channels, first_line
from metaaugment.learner import Learner
from metaaugment.networks import NETWORKS
from metaaugment.networks import network as build_network
from metaaugment.ops import PAPER_OPS, SPACES, Space, find_space
from metaaugment.policy import (
    POLICIES,
    WRAPPERS,
    RegressingPolicy,
    UniformPolicy,
    check_features,
    check_sharpness,
    evidence,
    innermost,
    name_of,
    normalize,
    seen_by,
)
from metaaugment.policy import build as build_policy
from metaaugment.sampler import FixedSampler, UniformSampler
from metaaugment.transformation import FLOAT_TYPES, INDEX_TYPES, Transformation, apply

FORMAT = 1
KIND = "policy"
WAY_OUT = "take an intact copy of it, or export the policy again"


@dataclass(frozen=True)
class Source:
    """What a policy was learned with; it decides what the policy's numbers mean."""

    network: str | None  # the extractor: a name of `NETWORKS`, or None for a network of the user's own
    num_classes: int
    channels: int
    space: Space  # what magnitudes mean
    mean: tuple[float, ...]  # of the extractor's inputs, a channel, for pixels in [0, 1]
    std: tuple[float, ...]
    fill: tuple[int, ...]  # what geometric functions uncover, a channel, in 0 … 255
    size: tuple[int, int]  # height and width of the images
    layer: str | None = None  # of the extractor, whose input is the feature; the last linear one if not given

    def __post_init__(self) -> None:
        _check_number("num_classes", self.num_classes, 2)
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels!r}; images have 1 (grey) or 3 (RGB)")
        for name, values in (("mean", self.mean), ("std", self.std), ("fill", self.fill)):
            if len(values) != self.channels:
                raise ValueError(f"{name} is {values}; for {self.channels} channels it has {self.channels} numbers")
        if not all(isinstance(value, float) and math.isfinite(value) for value in (*self.mean, *self.std)):
            raise ValueError(f"mean is {self.mean} and std {self.std}; both must be finite numbers")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std is {self.std}; deviations are above 0")
        for value in self.fill:
            _check_number("fill", value, 0, 255)
        if len(self.size) != 2:
            raise ValueError(f"size is {self.size}; it is a height and a width")
        for value in self.size:
            _check_number("size", value, 1)
        if not isinstance(self.layer, str | None):
            raise ValueError(f"layer is {self.layer!r}; it is a name, or none")


# Fields of a source that stand in a file as they are, and all fields of a file.
PLAIN = ("network", "num_classes", "channels", "mean", "std", "fill", "size", "layer")
FIELDS = ("p", "policy", "theta", "w", *PLAIN, "space", "provenance")


class LearnedPolicy:
    """A policy that is not trained any more: θ, the network w that it sees through, and p.

        policy = LearnedPolicy.load("policy.safetensors")
        images, weights = policy.augment(images)

    The extractor runs in evaluation mode, so that an output depends on no other image of the batch. Passes are in
    float32, or, for the extractor, in what autocast says.

    Args:
        probabilities: p, [14, 14].
        source: what it was learned with.
        policy, extractor: θ and w as modules, which become this object's own; neither for p alone.
        provenance: where it comes from, as JSON values: recipe, data, accuracy, versions.
    """

    def __init__(
        self,
        probabilities: Float[Tensor, "14 14"],
        source: Source,
        policy: nn.Module | None = None,
        extractor: nn.Module | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        if (policy is None) != (extractor is None):
            raise ValueError("a policy needs the extractor that it sees through; give both, or neither for p alone")
        _check_distribution(probabilities)
        self.source = source
        self.provenance = _as_json(provenance or {})
        self.sampler = FixedSampler(probabilities.detach().clone())
        self.judge: Judge | None = None
        self.eyes: Eyes | None = None
        if policy is not None and extractor is not None:
            _check_finite("theta", policy.state_dict())
            if isinstance(policy, RegressingPolicy):
                check_sharpness(float(policy.sharpness))
            _check_finite("w", extractor.state_dict())
            self.judge = Judge(policy)
            self.eyes = _eyes(extractor, source, *_normalization(source.mean, source.std))
            _check_fit(self.eyes, policy)
            self.to(next(extractor.parameters()).device)

    # -- use --------------------------------------------------------------------------------------------------------

    def augment(
        self, images: Tensor, labels: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Float[Tensor, " n"]]:
        """Augmented images, and the weights of their losses, which sum to 1 over the global mini-batch.

        Images are uint8 [n, c, h, w], or floating point in [0, 1], as for `apply`, and of any size that the extractor
        takes; those returned are of the same kind. Labels are for policies that look at them (`needs_labels`).
        """
        self._check_images(images)
        self._check_labels(images, labels)
        transformation = self.sample(len(images), generator).to(images.device)
        images = apply(images, transformation, self.space, self.source.fill)
        return images, self.weights(images, transformation, labels)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        """n transformations: functions by p, magnitudes uniform."""
        return self.sampler.sample(n, generator)

    def weights(
        self, images: Tensor, transformation: Transformation, labels: Tensor | None = None
    ) -> Float[Tensor, " n"]:
        """V = P / ΣP of images that are augmented already, over the global mini-batch."""
        outputs = self.outputs(images, transformation, labels)
        return normalize(outputs) if self.judge is None else self.judge.normalize(outputs)

    @torch.no_grad()
    def outputs(
        self, images: Tensor, transformation: Transformation, labels: Tensor | None = None
    ) -> Float[Tensor, " n"]:
        """P, raw, of images that are augmented already; 1 where there is p alone."""
        self._check_images(images)
        self._check_labels(images, labels)
        if len(images) != len(transformation):
            raise ValueError(f"{len(images)} images but {len(transformation)} transformations; give each image one")
        if self.judge is None or self.eyes is None:
            return torch.ones(len(images), device=images.device, dtype=torch.float32)
        layout = torch.channels_last if images.device.type == "cuda" else torch.contiguous_format
        features, logits = self.eyes.view(_pixels(images).to(memory_format=layout))
        with torch.autocast(images.device.type, enabled=False):
            more = () if labels is None else evidence(self.judge, logits, labels)
            return self.judge(features, embed(transformation.to(images.device)), *more)

    def parts(
        self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> tuple[FixedSampler, nn.Module, nn.Module | None]:
        """Sampler, policy and extractor for a `Learner`, all frozen: copies, which stay in evaluation mode.

            sampler, judge, eyes = policy.parts(mean, std)
            learner = Learner(network, sampler, judge, extractor=eyes, space=policy.space, prepare=…)

        Args:
            mean, std: how that learner's `prepare` normalises pixels in [0, 1], a channel. The extractor then gets its
                inputs turned into its own normalisation. Not given: as here. For a learner without `prepare`, which
                only divides by 255, they are 0 and 1.
        """
        sampler = FixedSampler(self.probabilities.clone())
        if self.judge is None or self.eyes is None:
            return sampler, UniformPolicy(), None
        if (mean is None) != (std is None):
            raise ValueError("parts() got one of mean and std; give both, or neither for the policy's own")
        own = self.source
        given = own.mean if mean is None else _numbers(mean), own.std if std is None else _numbers(std)
        finite = all(map(math.isfinite, (*given[0], *given[1]))) and all(value > 0 for value in given[1])
        if not len(given[0]) == len(given[1]) == own.channels or not finite:
            raise ValueError(
                f"mean is {given[0]} and std {given[1]}; for {own.channels} channels both have {own.channels} finite "
                "numbers, deviations above 0"
            )
        between = (None, None) if given == (own.mean, own.std) else _normalization(own.mean, own.std, *given)
        eyes = _eyes(deepcopy(self.eyes.network), own, *between).to(self.device)
        return sampler, Judge(deepcopy(self.judge.policy)), eyes

    def sampler_only(self) -> "LearnedPolicy":
        """The half of it that looks at no image: p alone, a few KB; all weights are the same."""
        return LearnedPolicy(self.probabilities, self.source, provenance=self.provenance)

    def to(self, device: torch.device | str) -> "LearnedPolicy":
        """Moves it, and returns it."""
        self.sampler.to(device)
        if self.judge is not None and self.eyes is not None:
            self.judge.to(device)
            layout = torch.channels_last if torch.device(device).type == "cuda" else torch.contiguous_format
            self.eyes.to(device, memory_format=layout)  # type: ignore[call-overload]
        return self

    @property
    def probabilities(self) -> Float[Tensor, "14 14"]:
        """p_{j,k}, float64."""
        return self.sampler.probabilities

    @property
    def needs_labels(self) -> bool:
        """Whether it looks at the labels of images."""
        return self.judge is not None and bool(seen_by(self.judge))

    @property
    def space(self) -> Space:
        return self.source.space

    @property
    def device(self) -> torch.device:
        return self.probabilities.device

    def describe(self) -> list[str]:
        """What is in it, for people, a line each."""
        source = self.source
        height, width = source.size
        lines = [f"format       {FORMAT}"]
        if self.judge is None or self.eyes is None:
            lines += ["policy       none: p alone, and all weights are the same"]
        else:
            theta, w = self.judge.policy, self.eyes.network
            lines += [
                f"policy       {policy_name(theta)}, {_count(theta):,} parameters, {_feature_layer(theta).in_features} "
                f"features, {_feature_layer(theta).out_features} hidden units",
                f"extractor    {source.network or 'a network of the user'}, {_count(w):,} parameters, "
                f"{source.num_classes:,} classes, features at {source.layer or 'its last linear layer'}",
            ]
        lines += [
            f"images       {source.channels} channels, {height} × {width} pixels, fill {_listed(source.fill)}",
            f"normalised   mean {_listed(source.mean)}, std {_listed(source.std)}",
            f"space        {self.space.name}, sha256 {space_hash(self.space)}",
        ]
        p = self.probabilities.cpu()
        order = p.flatten().argsort(descending=True, stable=True).tolist()
        names = [op.name for op in PAPER_OPS]
        for title, pairs in (("likeliest", order[:5]), ("least likely", order[-5:])):
            shown = (f"{names[pair // K]} + {names[pair % K]} {p.flatten()[pair]:.3%}" for pair in pairs)
            lines.append(f"{title:12} {', '.join(shown)}")
        lines.append(f"{'function':12} first, second; {1 / K:.2%} each if all were alike")
        lines += [f"{name:12} {p[i].sum():.2%}, {p[:, i].sum():.2%}" for i, name in enumerate(names)]
        return [*lines, "provenance", *(f"  {key}: {_shown(value)}" for key, value in self.provenance.items())]

    def _check_images(self, images: Tensor) -> None:
        if not isinstance(images, Tensor):
            raise ValueError(f"images is a {type(images).__name__}; give a torch tensor")
        if images.dtype != torch.uint8 and images.dtype not in FLOAT_TYPES:
            raise ValueError(f"images has dtype {images.dtype}; use torch.uint8, or floating point in [0, 1]")
        if images.ndim != 4 or len(images) == 0:
            raise ValueError(f"images has shape {tuple(images.shape)}; a batch is [n, channels, height, width], n > 0")
        check_channels(images, self.source.channels)

    def _check_labels(self, images: Tensor, labels: Tensor | None) -> None:
        if not self.needs_labels:
            return
        if not isinstance(labels, Tensor) or labels.shape != (len(images),) or labels.dtype not in INDEX_TYPES:
            is_tensor = isinstance(labels, Tensor)
            found = f"{labels.dtype} {tuple(labels.shape)}" if is_tensor else "none" if labels is None else type(labels)
            raise ValueError(
                f"the policy looks at labels, and got {found} for {len(images)} images; give one whole number each, "
                "policy.augment(images, labels), or use its p alone: policy.sampler_only()"
            )
        if labels.device.type == "cpu" and not ((labels >= 0) & (labels < self.source.num_classes)).all():
            raise ValueError(
                f"a label is {int(labels.max() if labels.min() >= 0 else labels.min())}, but the policy was learned "
                f"with {self.source.num_classes} classes; use it on these, or use its p alone: policy.sampler_only()"
            )

    # -- the file ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_learner(
        cls,
        learner: Learner,
        network_name: str | None,
        num_classes: int,
        channels: int,
        space: str | Space,
        mean: Sequence[float],
        std: Sequence[float],
        fill: int | Sequence[int],
        size: int | Sequence[int],
        provenance: Mapping[str, Any] | None = None,
    ) -> "LearnedPolicy":
        """What a learner has learned, copied: its policy, its p, and the network that the policy sees through.

        Args:
            network_name: of that network, the learner's extractor or else its task network; None for one of your own.
            space, fill: of the transformations, as the learner has them.
            mean, std: of the learner's `prepare`, for pixels in [0, 1].
            size: of the images: a side, or height and width.
        """
        if isinstance(learner.policy, Judge):
            raise ValueError("the learner trains under a policy from a file, and learns none; copy that file")
        seen_through = _plain(learner.network if learner.extractor is None else learner.extractor)
        modules = {id(module): name for name, module in seen_through.named_modules()}
        layers = learner.features.layers
        sides = (size, size) if isinstance(size, int) else size
        source = Source(
            network_name,
            num_classes,
            channels,
            find_space(space),
            _numbers(mean),
            _numbers(std),
            _colors(fill, channels),
            tuple(map(int, sides)),  # type: ignore[arg-type]
            modules[id(layers[0])] if len(layers) == 1 else None,
        )
        if space_hash(source.space) != space_hash(find_space(learner.space)):
            raise ValueError(
                f"space is {source.space.name!r}, but the learner's is {find_space(learner.space).name!r}; "
                "say the one it was learned with"
            )
        if source.fill != _colors(learner.fill, channels):
            raise ValueError(f"fill is {source.fill}, but the learner's is {learner.fill}; say the one it learned with")
        p = _probabilities_of(learner.sampler)
        if isinstance(learner.policy, UniformPolicy):
            return cls(p, source, provenance=provenance)
        theta, w = learner.policy.state_dict(), seen_through.state_dict()
        policy = _fitted(_empty_policy(policy_name(learner.policy), theta, num_classes), theta, "theta")
        empty = _empty_extractor(source, seen_through if network_name is None else None)
        return cls(p, source, policy, _fitted(empty, w, "w"), provenance)

    def digest(self) -> str:
        """SHA-256 of all that it augments and weighs by."""
        modules = [self.judge.policy, self.eyes.network] if self.judge is not None and self.eyes is not None else []
        tensors = [self.probabilities, *(value for module in modules for value in module.state_dict().values())]
        sha = hashlib.sha256(space_hash(self.space).encode())
        for tensor in tensors:
            sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def save(self, file: str | PathLike[str], half: bool = False) -> None:
        """Write it, whole or not at all; with `half`, θ and w in float16.

        Raises:
            OSError: where it cannot be written.
        """
        tree = {
            "format": FORMAT,
            "p": self.probabilities,
            "policy": None,
            "theta": {},
            "w": {},
            **{field: getattr(self.source, field) for field in PLAIN},
            "space": {"name": self.space.name, "sha256": space_hash(self.space)},
            "provenance": self.provenance,
        }
        if self.judge is not None and self.eyes is not None:
            tree["policy"] = policy_name(self.judge.policy)
            tree["theta"] = _stored("theta", self.judge.policy.state_dict(), half)
            tree["w"] = _stored("w", self.eyes.network.state_dict(), half)
        sealed.save(Path(file), KIND, tree)

    @classmethod
    def load(
        cls, file: str | PathLike[str], extractor: nn.Module | None = None, space: Space | None = None
    ) -> "LearnedPolicy":
        """Read a policy, onto the CPU.

        Args:
            file: as `save` wrote it. Nothing in it is executed.
            extractor: where the policy sees through a network of your own, that network; a copy of it gets the
                parameters of the file. Not given: the file names one of ours.
            space: where it was learned with a space of your own, that space.

        Raises:
            ValueError: naming the file, for anything but an intact policy.
        """
        file = Path(file)
        try:
            tree = sealed.load(file, KIND)
        except sealed.Damaged as error:
            raise sealed.Damaged(file, error.reason, WAY_OUT) from None
        except OSError as error:
            raise sealed.Damaged(file, f"cannot be read ({error.strerror or error})", "give a policy file") from None
        except MALFORMED as error:  # under a right SHA-256: written by another program
            raise sealed.Damaged(
                file, f"is no intact policy: its state is malformed ({first_line(error)})", WAY_OUT
            ) from None
        try:
            return _from_tree(tree, extractor, space)
        except Foreign as error:
            raise sealed.Damaged(file, f"cannot be used here: {error}") from None
        except MALFORMED as error:
            raise sealed.Damaged(file, f"is no intact policy: {first_line(error)}", WAY_OUT) from error


# What reading a tree of the wrong form may raise.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class Foreign(ValueError):
    """An intact policy that something is missing for; the message says what would help."""


# -- from and to tensors ----------------------------------------------------------------------------------------------


def space_hash(space: Space) -> str:
    """SHA-256 of what magnitudes mean to the paper's functions; the name is no part of it, nor are other functions."""
    fields = ("slope", "start", "around", "per", "of", "rounding", "signed")
    levels = []
    for op in PAPER_OPS:
        values = [getattr(space.levels[op.name], field) for field in fields] if op.magnitude else []
        levels.append([op.name, *(value if isinstance(value, str) else float(value) for value in values)])
    return hashlib.sha256(json.dumps(levels).encode()).hexdigest()


def policy_name(policy: nn.Module) -> str:
    """The name in `POLICIES` of what a policy is."""
    name = name_of(policy)
    if name is not None:
        return name
    raise ValueError(
        f"a policy of class {type(policy).__name__} has no place in a file; it holds {', '.join(POLICIES)}"
    )


def _from_tree(tree: Mapping[str, Any], extractor: nn.Module | None, space: Space | None) -> LearnedPolicy:
    if not isinstance(tree, dict) or "format" not in tree:
        raise ValueError("it does not say its format")
    if tree["format"] != FORMAT:
        raise Foreign(
            f"it has format {tree['format']!r}, and this version of metaaugment reads {FORMAT}; use the version that "
            "wrote it, or export the policy again"
        )
    if missing := [field for field in FIELDS if field not in tree]:
        raise ValueError(f"the field {missing[0]!r} is missing")
    plain: dict[str, Any] = {name: tuple(tree[name]) if isinstance(tree[name], list) else tree[name] for name in PLAIN}
    source = Source(**plain, space=_space_of(tree["space"], space))
    if tree["policy"] is None:
        if tree["theta"] or tree["w"]:
            raise ValueError("it has tensors of a policy, but no name of one")
        if extractor is not None:
            raise Foreign("it holds p alone, and looks through no network; leave extractor= away")
        return LearnedPolicy(tree["p"], source, provenance=tree["provenance"])
    policy = _fitted(_empty_policy(tree["policy"], tree["theta"], source.num_classes), tree["theta"], "theta")
    network = _empty_extractor(source, extractor)
    try:
        network = _fitted(network, tree["w"], "w")
    except ValueError as error:
        if extractor is None:
            raise
        raise Foreign(f"{error}; hand in the extractor that it was learned with") from None
    return LearnedPolicy(tree["p"], source, policy, network, tree["provenance"])


def _space_of(recorded: Mapping[str, str], given: Space | None) -> Space:
    name, recorded_hash = recorded["name"], recorded["sha256"]
    if given is None and name not in SPACES:
        raise Foreign(f"unknown space {name!r}; hand it in with space=, or take one of {', '.join(SPACES)}")
    space = SPACES[name] if given is None else given
    if space_hash(space) != recorded_hash:
        raise Foreign(
            f"magnitudes meant something else when it was learned: its space {name!r} has the SHA-256 {recorded_hash}, "
            f"and {space.name!r} here has {space_hash(space)}; use the version of metaaugment that wrote it"
        )
    return space


def _empty_policy(name: str, tensors: Mapping[str, Tensor], num_classes: int) -> nn.Module:
    """A policy of the size of these tensors, without memory of its own."""
    if name not in POLICIES:
        raise Foreign(f"unknown policy {name!r}; this version of metaaugment has {', '.join(POLICIES)}")
    wrapped = any(name.startswith(prefix) for prefix in WRAPPERS)
    weight = tensors.get("policy.feature.weight" if wrapped else "feature.weight")
    if weight is None or weight.ndim != 2:
        raise ValueError("the tensor feature.weight of the policy is missing, or no matrix")
    with torch.device("meta"):
        return build_policy(name, weight.shape[1], weight.shape[0], num_classes).float()


def _empty_extractor(source: Source, own: nn.Module | None) -> nn.Module:
    """A copy of the user's own network where one is given, or else one of ours without memory of its own."""
    if own is not None:
        return deepcopy(_plain(own)).float()
    if source.network is None:
        raise Foreign("its extractor is a network of its user's own; hand it in with extractor=")
    if source.network not in NETWORKS:
        raise Foreign(
            f"unknown network {source.network!r}; hand it in with extractor=, or take one of "
            f"{', '.join(sorted(NETWORKS))}"
        )
    with torch.device("meta"):
        return build_network(source.network, source.num_classes, source.channels).float()


def _fitted(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> nn.Module:
    """The module with copies of these tensors, in float32, in the place of its own; they must be the ones it needs."""
    needed = module.state_dict()
    for name, own in needed.items():
        if not isinstance(own, Tensor):
            raise ValueError(f"{what}/{name} of the network is no tensor, and has no place in a file")
        if not isinstance(found := tensors.get(name), Tensor):
            raise ValueError(f"the tensor {what}/{name} is missing")
        if found.shape != own.shape:
            raise ValueError(f"the tensor {what}/{name} is {tuple(found.shape)}; it must be {tuple(own.shape)}")
        if found.dtype != own.dtype and not (found.dtype in FLOAT_TYPES and own.is_floating_point()):
            raise ValueError(f"the tensor {what}/{name} has dtype {found.dtype}; it must be {own.dtype}")
    if unknown := sorted(tensors.keys() - needed.keys()):
        raise ValueError(f"the tensor {what}/{unknown[0]} has no place in the network")
    # Copies: a tensor that was read may be a view of the file, whatever becomes of that.
    copies = {name: tensors[name].detach().to(own.dtype, copy=True) for name, own in needed.items()}
    module.load_state_dict(copies, assign=True)
    return module


def _stored(what: str, state: Mapping[str, Tensor], half: bool) -> dict[str, Tensor]:
    if not half:
        return dict(state)
    stored = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    for name, value in stored.items():
        if not value.isfinite().all():
            raise ValueError(
                f"{what}/{name} holds {state[name].abs().max():g}, too large for half precision; save it without half"
            )
    return stored


def _plain(network: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel and torch.compile."""
    network = bare(network)
    return getattr(network, "_orig_mod", network)


def _probabilities_of(sampler: object) -> Tensor:
    if type(sampler) is UniformSampler and sampler.functions == K:
        return torch.full((K, K), 1 / K**2, dtype=torch.float64)
    p = getattr(sampler, "probabilities", None)
    if not isinstance(p, Tensor):
        raise ValueError(f"the learner's sampler, a {type(sampler).__name__}, has no p of pairs that could be kept")
    return p


def _eyes(network: nn.Module, source: Source, shift: Tensor | None, scale: Tensor | None) -> Eyes:
    return Eyes(network, source.channels, source.size, source.layer, shift, scale)


def _normalization(
    mean: Sequence[float], std: Sequence[float], given_mean: Sequence[float] = (), given_std: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    """Shift and scale to zero mean and unit deviation, of pixels in 0 … 255 or of inputs normalised otherwise."""
    m, s = _column(mean), _column(std)
    if not given_mean:
        return m * 255, 1 / (s * 255)
    given_m, given_s = _column(given_mean), _column(given_std)
    return (m - given_m) / given_s, given_s / s


def _column(values: Sequence[float]) -> Float[Tensor, "c 1 1"]:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def _pixels(images: Tensor) -> Tensor:
    """In 0 … 255, as `apply` sees them."""
    if images.dtype == torch.uint8:
        return images
    # Elsewhere than on the CPU the check would make the host wait; there values are cut off, as in `apply`.
    if images.device.type == "cpu" and not ((images >= 0) & (images <= 1)).all():
        raise ValueError("images holds values outside [0, 1]; give them before they are normalised")
    return (images.float() * 255).round_().nan_to_num_().clamp_(0, 255)


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_distribution(p: Tensor) -> None:
    if not isinstance(p, Tensor) or tuple(p.shape) != (K, K) or p.dtype != torch.float64:
        found = f"{p.dtype} {tuple(p.shape)}" if isinstance(p, Tensor) else type(p).__name__
        raise ValueError(f"p is {found}; it must be torch.float64 {(K, K)}")
    if not (p.isfinite() & (p >= 0)).all() or abs(float(p.sum()) - 1) > 1e-6:
        raise ValueError(f"p is no distribution: from {p.min():g} to {p.max():g}, and {p.sum():.9g} in all, not 1")


def _check_finite(what: str, state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(f"the tensor {what}/{name} holds numbers that are not finite; the policy cannot be used")


def _check_fit(eyes: "Eyes", policy: nn.Module) -> None:
    """Whether the extractor's features are what the policy takes, as far as that shows without a pass."""
    layer = eyes.features.layers[0]
    if len(eyes.features.layers) == 1 and isinstance(layer, nn.Linear):
        check_features(torch.empty(0, layer.in_features), _feature_layer(policy))


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"in {least} to {most}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number {allowed}")


def _as_json(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The same as it comes back from a file."""
    try:
        value = json.loads(json.dumps(provenance, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the provenance is no JSON ({error}); it holds texts, numbers, lists and dictionaries"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("the provenance must be a dictionary")
    return value


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _colors(fill: int | Sequence[int], channels: int) -> tuple[int, ...]:
    return (fill,) * channels if isinstance(fill, int) else tuple(map(int, fill))


# -- words ------------------------------------------------------------------------------------------------------------


def _feature_layer(policy: nn.Module) -> nn.Linear:
    return innermost(policy).feature  # type: ignore[return-value]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
