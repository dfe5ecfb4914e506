"""The learned policy as one file: θ, w and p, frozen, for training any other network.

The paper's transfer (its appendix, "Transferability"): the new network trains on images augmented by p, each weighted
by the policy network, which sees them through the network it was learned with; `docs/policy-file.md` has the format.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from metaaugment.distributed import drawn, plain
from metaaugment.embedding import K, embed
from metaaugment.guard.replay import no_draws
from metaaugment.learned import file as policy_file
from metaaugment.learned.file import copied_extractor, copied_policy, policy_name
from metaaugment.learned.frozen import FrozenExtractor, FrozenPolicy, check_channels
from metaaugment.learned.source import Source, shift_and_scale, space_hash
from metaaugment.learner import Learner
from metaaugment.ops import Space
from metaaugment.policy import (
    RegressingPolicy,
    UniformPolicy,
    check_classes,
    check_features,
    check_sharpness,
    innermost,
)
from metaaugment.sampler import FixedSampler, Sampler, UniformSampler, as_sampler
from metaaugment.transformation import (
    INDEX_TYPES,
    Transformation,
    apply,
    as_pixels,
    check_images,
    check_range,
    check_transformation,
)


class LearnedPolicy:
    """A policy that is no longer trained: θ, the network w that it sees through, and p.

        policy = LearnedPolicy.load("policy.safetensors")
        images, weights = policy.augment(images)

    The extractor runs in evaluation mode, so that an output depends on no other image of the batch. Passes run in
    float32, except that the extractor's follows autocast.

    Args:
        probabilities: p, [14, 14].
        source: what it was learned with.
        policy, extractor: θ and w as modules, which this object takes over; give neither for p alone.
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
        self.sampler = FixedSampler(probabilities.detach())
        self.policy: FrozenPolicy | UniformPolicy = UniformPolicy()
        self.extractor: FrozenExtractor | None = None  # with p alone
        self._in_range = False  # whether floating-point images have been seen, and were
        if policy is not None and extractor is not None:
            _check_finite("theta", policy.state_dict())
            if isinstance(policy, RegressingPolicy):
                check_sharpness(float(policy.sharpness))
            _check_finite("w", extractor.state_dict())
            self.policy = FrozenPolicy(policy)
            self.extractor = FrozenExtractor(extractor, source, *shift_and_scale(source.mean, source.std))
            _check_fit(self.extractor, policy)
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
        self._check_labels(images, labels)  # before anything is drawn
        images, transformation = self.transform(images, generator)
        return images, self.weights(images, transformation, labels)

    def transform(self, images: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Transformation]:
        """Augmented images and their transformations, from which `weights` can be computed later.

        For a loader's workers, because weights need the whole mini-batch: with several processes, the global one.
        """
        self._check_images(images)
        if images.is_floating_point() and not self._in_range:  # once: `as_pixels` clamps what is on a GPU
            check_range(images)
            self._in_range = True
        pixels = as_pixels(images)  # before anything is drawn, because it may refuse them
        transformation = drawn(lambda n: self.sample(n, generator), len(images)).to(images.device)
        pixels = apply(pixels, transformation, self.space, self.source.fill)
        return pixels if images.dtype == torch.uint8 else pixels.to(images.dtype) / 255, transformation

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        """n transformations: functions by p, magnitudes uniform."""
        return self.sampler.sample(n, generator)

    def weights(
        self, images: Tensor, transformation: Transformation, labels: Tensor | None = None
    ) -> Float[Tensor, " n"]:
        """V = P / ΣP of images that are already augmented, over the global mini-batch."""
        return self.policy.normalize(self.outputs(images, transformation, labels))

    @torch.no_grad()
    def outputs(
        self, images: Tensor, transformation: Transformation, labels: Tensor | None = None
    ) -> Float[Tensor, " n"]:
        """The raw outputs P of images that are already augmented; 1 if there is p alone."""
        self._check_images(images)
        self._check_labels(images, labels)
        check_transformation(transformation, len(images))
        if self.extractor is None:
            return torch.ones(len(images), device=images.device, dtype=torch.float32)
        layout = torch.channels_last if images.device.type == "cuda" else torch.contiguous_format
        features, logits = self.extractor.view(as_pixels(images).to(memory_format=layout))
        with torch.autocast(images.device.type, enabled=False):
            more = () if labels is None else self.policy.evidence(logits, labels)
            return self.policy(features, embed(transformation.to(images.device)), *more)

    def parts(
        self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> tuple[FixedSampler, nn.Module, nn.Module | None]:
        """Sampler, policy and extractor for a `Learner`, all frozen: copies, which stay in evaluation mode.

            sampler, frozen, extractor = policy.parts(mean, std)
            learner = Learner(
                network, sampler, frozen, extractor=extractor, space=policy.space, fill=policy.source.fill, prepare=…
            )

        Args:
            mean, std: those by which that learner's `prepare` normalises pixels in [0, 1], per channel; its inputs are
                then converted to the extractor's own normalisation. If not given, `prepare` must use the policy's own.
                For a learner without `prepare`, which only divides by 255, they are 0 and 1.
        """
        sampler, policy = FixedSampler(self.probabilities), deepcopy(self.policy)
        if self.extractor is None:
            return sampler, policy, None
        if (mean is None) != (std is None):
            raise ValueError("parts() got only one of mean and std; give both, or neither for the policy's own")
        given = own = self.source
        if mean is not None and std is not None:
            given = replace(own, mean=tuple(map(float, mean)), std=tuple(map(float, std)))
        between = (None, None) if given == own else _between(given, own)
        return sampler, policy, FrozenExtractor(deepcopy(self.extractor.network), own, *between).to(self.device)

    def sampler_only(self) -> "LearnedPolicy":
        """The part that looks at no image: p alone, a few KB; all weights are the same."""
        return LearnedPolicy(self.probabilities, self.source, provenance=self.provenance)

    def to(self, device: torch.device | str) -> "LearnedPolicy":
        """Move the policy to a device, and return it."""
        self.sampler.to(device)
        self.policy.to(device)
        if self.extractor is not None:
            layout = torch.channels_last if torch.device(device).type == "cuda" else torch.contiguous_format
            self.extractor.to(device, memory_format=layout)  # type: ignore[call-overload]
        return self

    @property
    def probabilities(self) -> Float[Tensor, "14 14"]:
        """p_{j,k}, float64."""
        return self.sampler.probabilities

    @property
    def needs_labels(self) -> bool:
        """Whether it looks at the labels of images."""
        return bool(self.policy.sees)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """θ and w as they were given; none with p alone."""
        return () if self.extractor is None else (self.policy.policy, self.extractor.network)  # type: ignore[return-value]

    @property
    def space(self) -> Space:
        """What magnitudes mean to it."""
        return self.source.space

    @property
    def device(self) -> torch.device:
        return self.probabilities.device

    def _check_images(self, images: Tensor) -> None:
        check_images(images)
        if len(images) == 0:
            raise ValueError(f"images has shape {tuple(images.shape)}; a batch is [n, channels, height, width], n > 0")
        check_channels(images, self.source.channels)

    def _check_labels(self, images: Tensor, labels: Tensor | None) -> None:
        if labels is not None and not isinstance(labels, Tensor):
            raise ValueError(f"labels is a {type(labels).__name__}; give a torch tensor, or pass it as generator=…")
        if not self.needs_labels:
            return
        if labels is None or labels.shape != (len(images),) or labels.dtype not in INDEX_TYPES:
            found = "none" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
            raise ValueError(
                f"the policy looks at labels, but got {found} for {len(images)} images; give one class number each, "
                "policy.augment(images, labels), or use its p alone: policy.sampler_only()"
            )
        check_classes(labels, self.source.num_classes, "the policy")

    # -- the file ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_learner(
        cls,
        learner: Learner,
        network_name: str | None,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        size: int | Sequence[int],
        provenance: Mapping[str, Any] | None = None,
    ) -> "LearnedPolicy":
        """A copy of what a learner has learned: its policy, its p, and the network that the policy sees through.

        Args:
            network_name: of that network (the learner's extractor, or else its task network); None for one of your own.
            mean, std: those of the learner's `prepare`, per channel, for pixels in [0, 1].
            size: of the images: one side, or height and width.
        """
        if not all(isinstance(values, Iterable) for values in (mean, std)):
            raise ValueError(f"mean is {mean!r} and std {std!r}; both need one number per channel")
        if isinstance(learner.policy, FrozenPolicy):
            raise ValueError("the learner trains under a policy from a file and does not learn one; copy that file")
        seen_through = plain(learner.network if learner.extractor is None else learner.extractor)
        modules = {id(module): name for name, module in seen_through.named_modules()}
        layers = learner.features.layers
        channels, fill = len(mean), learner.fill
        source = Source(
            network_name,
            num_classes,
            channels,
            learner.space,
            mean=tuple(map(float, mean)),
            std=tuple(map(float, std)),
            fill=(fill,) * channels if isinstance(fill, int) else tuple(map(int, fill)),
            size=(size, size) if isinstance(size, int) else tuple(map(int, size)),  # type: ignore[arg-type]
            layer=modules[id(layers[0])] if len(layers) == 1 else None,
        )
        p = _probabilities_of(learner.sampler)
        if isinstance(learner.policy, UniformPolicy):
            return cls(p, source, provenance=provenance)
        _check_normalization(learner, source)
        theta, w = plain(learner.policy), seen_through.state_dict()
        policy = copied_policy(policy_name(theta), theta.state_dict(), num_classes)
        try:
            extractor = copied_extractor(source, w, seen_through if network_name is None else None)
        except ValueError as error:
            if network_name is None:
                raise
            raise ValueError(
                f"the learner's network is not {network_name}: {error}; for one of your own, give network_name=None"
            ) from None
        found = cls(p, source, policy, extractor, provenance)
        assert found.extractor is not None
        black = torch.zeros(1, source.channels, *source.size, dtype=torch.uint8, device=found.device)
        features, logits = found.extractor.view(black)
        _check_num_classes(logits, num_classes)
        if not features.isfinite().all():
            raise ValueError(
                "the features of the network that the policy sees through are not finite, even of a black image; the "
                "network has diverged, or its running statistics have not settled"
            )
        return found

    def digest(self) -> str:
        """SHA-256 of everything that determines how it augments and weighs."""
        tensors = [self.probabilities, *(value for module in self.modules for value in module.state_dict().values())]
        about = {name: getattr(self.source, name) for name in policy_file.SOURCE_FIELDS}
        about |= {"policy": policy_name(self.modules[0]) if self.modules else None, "space": space_hash(self.space)}
        sha = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for tensor in tensors:
            sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def save(self, file: str | PathLike[str], half: bool = False) -> None:
        """Write the policy to a file, whole or not at all; with `half`, θ and w in float16.

        Raises:
            OSError: if it cannot be written.
        """
        theta, w = self.modules or (None, None)
        policy_file.write(Path(file), (self.probabilities, self.source, theta, w, self.provenance), half)

    @classmethod
    def load(
        cls, file: str | PathLike[str], extractor: nn.Module | None = None, space: Space | None = None
    ) -> "LearnedPolicy":
        """Read a policy, onto the CPU.

        Args:
            file: as `save` wrote it. Nothing in it is executed.
            extractor: the network that the policy sees through, if it is your own; a copy of it gets the parameters of
                the file. Not needed if the file names one of ours.
            space: the space that the policy was learned with, if it is your own.

        Raises:
            ValueError: naming the file, for anything but an intact policy.
        """
        with policy_file.reading(Path(file)) as tree:
            return cls(*policy_file.content(tree, extractor, space))


# -- parts -----------------------------------------------------------------------------------------------------------


def _probabilities_of(sampler: Sampler) -> Tensor:
    p = FixedSampler().probabilities if type(sampler) is UniformSampler else as_sampler(sampler).probabilities
    if not isinstance(p, Tensor):
        raise ValueError(
            f"the learner's sampler, a {type(sampler).__name__}, has no p of pairs to keep; use one that has, such as "
            "TransformationSampler"
        )
    return p


def _check_normalization(learner: Learner, source: Source) -> None:
    """Refuse a mean and deviation other than those of `prepare`, judged by what it makes of black and white images.

    The median pixel counts, since `prepare` may pad or cut. It may also be one for images in [0, 1].
    """
    levels = torch.tensor([0, 255], dtype=torch.uint8)
    mean, std = torch.tensor([source.mean, source.std], dtype=torch.float64)
    meant = (levels[:, None] / 255 - mean) / std

    def prepared(images: Tensor) -> Tensor | None:
        """None if `prepare` does not take these images: then nothing is known of it."""
        images = images.view(2, 1, 1, 1).expand(2, source.channels, *source.size).to(learner.device)
        try:
            found = learner.prepare(images).flatten(2).double().median(2).values.cpu()
        except Exception:
            return None
        return found if found.shape == meant.shape else None

    with torch.no_grad(), no_draws(learner.device):  # training may go on afterwards, with the same draws
        found, of_floats = prepared(levels), prepared(levels / 255)
    alike = [one for one in (found, of_floats) if one is not None and torch.allclose(one, meant, rtol=0.02, atol=0.02)]
    if found is not None and not alike:
        raise ValueError(
            f"mean is {source.mean} and std {source.std}, which turn black and white into "
            f"{meant.round(decimals=3).tolist()}, but the learner's prepare turns them into "
            f"{found.round(decimals=3).tolist()}; give the mean and std that it normalises by"
        )


def _between(given: Source, own: Source) -> tuple[Tensor, Tensor]:
    """Shift and scale that turn inputs normalised as the given source says into the policy's own."""
    numbers = torch.tensor([own.mean, own.std, given.mean, given.std], dtype=torch.float32)
    m, s, given_m, given_s = numbers[:, :, None, None]
    return (m - given_m) / given_s, given_s / s


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_distribution(p: Tensor) -> None:
    if not isinstance(p, Tensor) or tuple(p.shape) != (K, K) or p.dtype != torch.float64:
        found = f"{p.dtype} {tuple(p.shape)}" if isinstance(p, Tensor) else type(p).__name__
        raise ValueError(f"p is {found}; it must be torch.float64 {(K, K)}")
    if not (p.isfinite() & (p >= 0)).all() or abs(float(p.sum()) - 1) > 1e-6:
        raise ValueError(
            f"p is not a distribution: it ranges from {p.min():g} to {p.max():g} and sums to {p.sum():.9g}; it must be "
            "nowhere negative and sum to 1"
        )


def _check_finite(what: str, state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(f"the tensor {what}/{name} holds numbers that are not finite; the policy cannot be used")


def _check_fit(extractor: FrozenExtractor, policy: nn.Module) -> None:
    """Refuse an extractor whose features the policy does not take, as far as that shows without a pass."""
    layer = extractor.features.layers[0]
    if len(extractor.features.layers) == 1 and isinstance(layer, nn.Linear):
        check_features(torch.empty(0, layer.in_features), innermost(policy).feature)  # type: ignore[arg-type]


def _check_num_classes(logits: Any, num_classes: int) -> None:
    # A policy that does not look at labels may see through a network whose outputs are no scores of classes.
    if isinstance(logits, Tensor) and logits.ndim == 2 and logits.shape[1] not in (1, num_classes):
        raise ValueError(
            f"num_classes is {num_classes}, but the network that the policy sees through has {logits.shape[1]} "
            f"outputs; give num_classes={logits.shape[1]}"
        )


def _as_json(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance as it comes back from a file."""
    try:
        value = json.loads(json.dumps(provenance, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the provenance is not valid JSON ({error}); it may hold strings, numbers, lists and dictionaries"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("the provenance must be a dictionary")
    return value
