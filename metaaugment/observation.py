"""What is observed on a mini-batch."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from metaaugment.guard.replay import Buffers, Replay
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
    judges: list[Buffers] = field(repr=False)  # their buffers, from before their pass
    evidence: tuple[Tensor, ...] = field(repr=False)  # what else the policy sees
    version: int = field(repr=False)  # of the network's parameters
    alignment: Float[Tensor, " n"] | None = None  # s, on steps that update the policy
    gradient: list[Tensor | None] | None = field(default=None, repr=False)  # Eq. 2's, where it stands in for Eq. 4's
