"""Frozen parts: a policy that is not learned any more, and the network that it sees through."""

from typing import Self

from jaxtyping import Float
from torch import Tensor, nn

from metaaugment.features import Features, Seen
from metaaugment.guard.faults import first_line, full_memory
from metaaugment.learned.source import Source
from metaaugment.policy import Around


class Frozen(nn.Module):
    """Learns nothing, and stays in evaluation mode even if `train()` is called.

    A learner does not keep its state: it never changes, and is rebuilt from the policy file.
    """

    kept_elsewhere = True

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def _freeze(self) -> None:
        self.requires_grad_(False)
        self.zero_grad()
        self.eval()


class FrozenPolicy(Frozen, Around):
    """A frozen policy, computed in its own precision whatever that of the features."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        self._freeze()

    def forward(
        self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"], *evidence: Tensor
    ) -> Float[Tensor, " n"]:
        dtype = next(self.policy.parameters()).dtype
        return super().forward(features.to(dtype), embedding.to(dtype), *evidence)


class FrozenExtractor(Frozen):
    """The frozen network that a policy sees through; like any extractor, it returns that network's logits.

    Inputs are first mapped to (inputs − shift) · scale, if shift and scale are given.
    """

    def __init__(
        self, network: nn.Module, source: Source, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.source = source
        self.features = Features(network, source.layer)
        self.seen = Seen()
        self.shift: Tensor | None
        self.scale: Tensor | None
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._freeze()

    def forward(self, inputs: Tensor) -> Tensor:
        features, logits = self.view(inputs)
        self.seen(features)
        return logits

    def view(self, inputs: Tensor) -> tuple[Float[Tensor, "n d"], Tensor]:
        """The features of images, and the network's logits."""
        like = next(self.network.parameters())
        check_channels(inputs, self.source.channels)
        if inputs.device != like.device:
            raise ValueError(
                f"the images are on {inputs.device}, but the policy is on {like.device}; "
                f"move it with policy.to({str(inputs.device)!r})"
            )
        if self.shift is not None and self.scale is not None:
            inputs = (inputs - self.shift) * self.scale
        try:
            with self.features.watched():
                logits = self.network(inputs.to(like.dtype))
        except (RuntimeError, AssertionError) as error:
            height, width = inputs.shape[-2:]
            if full_memory(error):
                raise
            learned = self.source.size
            way = f"learned on {learned[0]} by {learned[1]}: resize the images, or use policy.sampler_only()"
            if (height, width) == learned:
                way = "recorded as learned on images of this size: use policy.sampler_only()"
            reason = f"the policy's extractor fails on images of {height} by {width} pixels ({first_line(error)})"
            raise ValueError(f"{reason}; it was {way}") from error
        return self.features.take(), logits


def check_channels(images: Tensor, channels: int) -> None:
    if images.shape[1] != channels:
        raise ValueError(
            f"the images have {images.shape[1]} channels, but the policy was learned on images with {channels}; "
            "convert them, or use its p alone: metaaugment.apply(images, policy.sample(n), policy.space, fill)"
        )
