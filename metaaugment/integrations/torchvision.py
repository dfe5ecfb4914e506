"""A learned policy as a transform for torchvision's pipelines, or any other that works image by image."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from metaaugment.learned.policy import LearnedPolicy

MODES = ("L", "RGB")  # Pillow's, of grey and of color images


class PolicyTransform(nn.Module):
    """Draws two functions by a policy's p and applies them: the part of a policy that does not look at the image.

        v2.Compose([v2.RandomHorizontalFlip(), PolicyTransform(policy), v2.ToImage(), v2.ToDtype(torch.float32, True)])

    An image is a Pillow image (grey or RGB), or a tensor [c, h, w] in uint8 or floating point in [0, 1], including a
    `tv_tensors.Image`; the result is of the same kind, and bit for bit what `apply` gives. In a batch [n, c, h, w] each
    image has its own draw. Further arguments, such as a label, are returned as they are. Draws are from torch's own
    generator, which a loader seeds in its workers. torchvision itself is not needed.
    """

    def __init__(self, policy: LearnedPolicy) -> None:
        super().__init__()
        self.policy = policy.sampler_only().to("cpu")  # workers have no GPU, and this keeps what is sent to them small

    def forward(self, image: Any, *others: Any) -> Any:
        augmented = self._augment(image)
        return (augmented, *others) if others else augmented

    def extra_repr(self) -> str:
        return f"space={self.policy.space.name}, fill={self.policy.source.fill}"

    def _augment(self, image: Any) -> Any:
        if isinstance(image, Image.Image):
            return _to_pillow(self._augment(_from_pillow(image)))
        if not isinstance(image, Tensor):
            raise ValueError(f"the image is a {type(image).__name__}; give a Pillow image or a torch tensor")
        plain = image.as_subclass(Tensor)
        if plain.is_floating_point() and plain.numel() and not (plain.amin() >= 0 and plain.amax() <= 1):
            raise ValueError(
                f"the image holds values from {plain.amin():g} to {plain.amax():g}; a floating-point image must lie in "
                "[0, 1]: put PolicyTransform before Normalize"
            )
        augmented, _ = self.policy.transform(plain if plain.ndim == 4 else plain[None])
        return (augmented if plain.ndim == 4 else augmented[0]).as_subclass(type(image))


def _from_pillow(image: Image.Image) -> Tensor:
    if image.mode not in MODES:
        raise ValueError(f"the image has mode {image.mode!r}; convert it to one of {', '.join(MODES)}")
    values = torch.from_numpy(np.array(image))
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1)


def _to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy())
