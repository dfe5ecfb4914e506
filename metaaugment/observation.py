"""What a mini-batch must be, and what is observed on it."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.replay import Buffers, Replay
from metaaugment.transformation import Transformation


@dataclass
class Observation:
    """What was observed on a mini-batch: everything that the two updates of a step need."""

    images: Tensor  # augmented; uint8, or floating point in [0, 1] if `prepare` takes such images
    labels: Tensor
    transformation: Transformation
    features: Float[Tensor, "n d"]
    outputs: Float[Tensor, " n"]  # P, raw
    weights: Float[Tensor, " n"]  # V = P / ΣP
    losses: Float[Tensor, " n"]
    logits: Float[Tensor, "n classes"] = field(repr=False)
    inputs: Tensor = field(repr=False)  # the images as the network gets them
    replay: Replay = field(repr=False)
    buffers: Buffers = field(repr=False)  # of the network, from before its pass
    judging: Replay = field(repr=False)  # of the policy, and of its own extractor
    evidence: tuple[Tensor, ...] = field(repr=False)  # what else the policy sees
    version: int = field(repr=False)  # of the network's parameters
    alignment: Float[Tensor, " n"] | None = None  # s, on steps that update the policy
    gradient: list[Tensor | None] | None = field(default=None, repr=False)  # Eq. 2's, where it stands in for Eq. 4's


def check_batch(images: Tensor, labels: Tensor, device: torch.device, what: str) -> None:
    for name, value in (("images", images), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise ValueError(f"the {what} {name} are a {type(value).__name__}; give a torch tensor")
        if value.device != device:
            raise ValueError(
                f"the {what} {name} are on {value.device}, but the network is on {device}; "
                f"move them there with .to({str(device)!r})"
            )
        if value.ndim == 0:
            raise ValueError(f"the {what} {name} are one number; give a mini-batch")
    if len(images) == 0:
        raise ValueError(f"the {what} batch is empty; give at least one image")
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} {what} images but {len(labels)} labels; give each image one")


def check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the network returns {found}; it must return one tensor of logits [n, classes]: wrap it in a module that "
            "returns only these"
        )


def short(dtype: torch.dtype) -> str:
    """As users write it: float32."""
    return str(dtype).removeprefix("torch.")


def check_highest(logits: Tensor, labels: Tensor, what: str) -> None:
    """For a user's own loss, which may ignore negative labels: int64 labels must be below the number of classes,
    because on a GPU a larger one aborts the process."""
    classes = logits.shape[1]
    if labels.shape == logits.shape[:1] and labels.dtype == torch.int64 and 1 < classes <= int(labels.max()):
        raise ValueError(
            f"a {what} label is {int(labels.max())}, but the network has {classes} classes, 0 to {classes - 1}; "
            "labels that are not class numbers must have a dtype other than int64"
        )


def check_labels(logits: Tensor, labels: Tensor, what: str) -> None:
    """Labels must be class numbers or class probabilities, as cross-entropy takes them."""
    classes = logits.shape[1]
    numbers = labels.shape == logits.shape[:1] + logits.shape[2:] and labels.dtype in (torch.int64, torch.uint8)
    if not numbers and not (labels.shape == logits.shape and labels.is_floating_point()):
        raise ValueError(
            f"the {what} labels are {short(labels.dtype)} {list(labels.shape)}; they must be "
            f"class numbers, int64 [{len(logits)}], or probabilities, floating point [{len(logits)}, {classes}]"
        )
    if not numbers:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"a {what} label is {low if low < 0 else high}, but the network has {classes} classes, 0 to {classes - 1}; "
            "training and validation data must share the network's classes"
        )


def check_losses(losses: Tensor, labels: Tensor, what: str) -> None:
    if losses.shape != labels.shape[:1]:
        raise ValueError(
            f"the loss has shape {tuple(losses.shape)} for {len(labels)} {what} samples; "
            "it must give one number per sample (reduction='none')"
        )
