"""A learned policy in place of timm's `mixup_fn`: a sample's weight scales its target."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from metaaugment.distributed import world_size
from metaaugment.integrations.normalization import NormalizedPolicy
from metaaugment.learned.policy import LearnedPolicy


class PolicyMixup:
    """Augments a mini-batch by a learned policy, and weights its targets; called as `timm.data.Mixup` is.

        mixup_fn = PolicyMixup(policy, **{key: data_config[key] for key in ("mean", "std")}, num_classes=1000)
        images, targets = mixup_fn(images, labels)
        loss = SoftTargetCrossEntropy()(model(images), targets)

    Images are normalised, as timm's loader yields them; they are converted back to pixels for the policy.
    Cross-entropy is linear in the target: targets are one-hot, smoothed as in timm, times n·V, so that the mean of
    `SoftTargetCrossEntropy` is Σ V_i L_i. This holds for no other loss of timm; those that take such targets, as its
    `BinaryCrossEntropy` does, are refused. With several processes, whose
    gradients are averaged, n counts the images of all of them.

    timm's own script calls a `mixup_fn` only with --no-prefetcher, and then needs `SoftTargetCrossEntropy` as its loss;
    a loop of your own calls it on what `PrefetchLoader` yields. Random erasing, which comes before, must be off.

    Args:
        policy: the learned policy.
        mean, std: of the loader, as in its data config.
        num_classes, label_smoothing: as for `timm.data.Mixup`.
    """

    def __init__(
        self,
        policy: LearnedPolicy,
        mean: Sequence[float],
        std: Sequence[float],
        num_classes: int,
        label_smoothing: float = 0.1,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing:g}; it must be at least 0 and below 1")
        self.policy = NormalizedPolicy(policy, mean, std)
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self._unseen = WATCHED  # batches whose targets are to see what loss takes them
        self.mixup_enabled = True  # timm's script sets it to False from --mixup-off-epoch on

    def __call__(
        self, images: Float[Tensor, "n c h w"], labels: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n classes"]]:
        targets = one_hot(labels, self.num_classes, self.label_smoothing)
        if not self.mixup_enabled:
            return images, targets
        images, weights = self.policy.augment(images, labels)
        targets = targets * (weights * len(images) * world_size())[:, None]
        self._unseen -= 1
        watched = self._unseen >= 0 and self.policy.policy.extractor is not None  # with p alone, weights are equal
        return images, targets.as_subclass(WeightedTargets) if watched else targets


class WeightedTargets(Tensor):
    """One-hot targets times weights, refused by losses that are not linear in them, under which a weight would not be
    how much its sample counts. What is computed from them is a plain tensor."""

    @classmethod
    @torch.compiler.disable  # a compiled loss takes no subclass; its graph breaks here instead
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NOT_LINEAR or kwargs.get("label_smoothing"):
            raise ValueError(
                "PolicyMixup's targets are scaled by the weights of samples, which only a loss that is linear in them "
                "takes; use timm.loss.SoftTargetCrossEntropy (no --bce-loss, smoothing by label_smoothing= of "
                "PolicyMixup)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result.as_subclass(cls) if func in STILL_TARGETS else result


WATCHED = 8  # batches: long enough to meet the loss of a training
# Losses, and 1 − target, which is in others.
NOT_LINEAR = {
    F.binary_cross_entropy_with_logits, torch.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.mse_loss,
    F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.multilabel_soft_margin_loss, Tensor.__rsub__,
}  # fmt: skip
STILL_TARGETS = {
    Tensor.to, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.clone, Tensor.detach,
    Tensor.contiguous, Tensor.__getitem__, Tensor.gt, Tensor.__gt__, Tensor.ge, Tensor.__ge__,
}  # fmt: skip


def one_hot(labels: Int[Tensor, " n"], num_classes: int, smoothing: float) -> Float[Tensor, "n classes"]:
    """One-hot targets; a share `smoothing` of each is spread over all classes, its own included."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; give class numbers [n], not mixed labels"
        )
    if labels.device.type == "cpu" and len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(f"the labels are {labels.min()} to {labels.max()}; classes are 0 to {num_classes - 1}")
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=labels.device, dtype=torch.float32)
    return targets.scatter_(1, labels.long()[:, None], 1 - smoothing + off)
