"""Images that another library has normalised: converted back to their exact pixels, augmented, and normalised again.

From float32 and float16 the conversion is exact, whatever library normalised them and in whatever order of operations.
bfloat16 has eight significant bits, as many as a pixel: the conversion is exact only if the images were normalised in
float32 and rounded once, and only for some means and deviations; ImageNet's and (0.5, 0.5) are among them, CLIP's are
not. Everything else is refused.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from metaaugment.learned.policy import LearnedPolicy
from metaaugment.transformation import FLOAT_TYPES

# How far, in grey levels, the arithmetic of a type may stray from a pixel; half precision is off by up to 0.18.
TOLERANCE = {torch.float16: 0.25, torch.bfloat16: 0.01, torch.float32: 0.01, torch.float64: 0.01}


class Normalization:
    """From uint8 to (x / 255 − mean) / std, per channel; `undo` inverts it, exactly or not at all.

    Args:
        mean, std: as the library that normalises has them, for pixels in [0, 1], one number per channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        finite = all(map(math.isfinite, (*self.mean, *self.std))) and all(value > 0 for value in self.std)
        if not finite or not len(self.mean) == len(self.std) > 0:
            raise ValueError(
                f"mean is {self.mean} and std {self.std}; both need one finite number per channel, std above 0"
            )
        # In this order of operations float32 is bit for bit what timm's prefetcher gives.
        self.shift = torch.tensor([value * 255 for value in self.mean])[:, None, None]
        self.scale = torch.tensor([value * 255 for value in self.std])[:, None, None]
        self._checked: set[torch.dtype] = set()

    def __call__(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n c h w"]:
        """Computed in float32, then rounded once."""
        self._move(pixels.device)
        return ((pixels - self.shift) / self.scale).to(dtype)

    def undo(self, images: Float[Tensor, "n c h w"]) -> UInt8[Tensor, "n c h w"]:
        """The pixels of normalised images.

        Raises:
            ValueError: if an image holds a value that no pixel is normalised to. On the CPU all images are checked;
                elsewhere only the first batch of a type, because the host has to wait for the check.
        """
        self._check(images)
        self._move(images.device)
        pixels = (images.float() * self.scale + self.shift).round_().nan_to_num_().clamp_(0, 255)
        if images.device.type == "cpu" or images.dtype not in self._checked:
            self._check_origin(images, pixels)
            self._checked.add(images.dtype)
        return pixels.to(torch.uint8)

    def _move(self, device: torch.device) -> None:
        if self.shift.device != device:
            self.shift, self.scale = self.shift.to(device), self.scale.to(device)

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor) or images.dtype not in FLOAT_TYPES:
            kind = images.dtype if isinstance(images, Tensor) else f"a {type(images).__name__}"
            raise ValueError(
                f"the images are {kind}; they must be normalised, in floating point (for uint8 use "
                "LearnedPolicy.augment)"
            )
        if images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ValueError(
                f"the images have shape {tuple(images.shape)}; with a mean of {len(self.mean)} channels a batch is "
                f"[n, {len(self.mean)}, height, width]"
            )

    def _check_origin(self, images: Tensor, pixels: Tensor) -> None:
        """Refuse images that are not these pixels, normalised.

        Rounding to a type keeps the order, so slightly darker and slightly lighter pixels bound the normalised values.
        """
        if images.dtype == torch.bfloat16:
            self._check_distinct(images.dtype)
        slack = TOLERANCE[images.dtype]
        low, high = self(pixels - slack, images.dtype), self(pixels + slack, images.dtype)
        wrong = ~((images >= low) & (images <= high))
        if wrong.any():
            raise ValueError(
                f"the images hold {images[wrong][0].item():.6g}, which is not a uint8 pixel normalised with mean "
                f"{self.mean} and std {self.std}; give the mean and std that they were normalised with, normalise in "
                "float32, and change nothing afterwards (no random erasing, no mixup)"
            )

    def _check_distinct(self, dtype: torch.dtype) -> None:
        normalized = self(torch.arange(256, device=self.shift.device).expand(len(self.mean), 1, 256), dtype)
        if (normalized[..., 1:] <= normalized[..., :-1]).any():
            raise ValueError(
                f"with mean {self.mean} and std {self.std}, different pixels become the same number in {dtype}; pass "
                "float32 images"
            )


class NormalizedPolicy:
    """A learned policy for normalised images; otherwise as `LearnedPolicy.augment`, on the images' device.

    Args:
        policy: the learned one.
        mean, std: of the images, which need not be the policy's own.
    """

    def __init__(self, policy: LearnedPolicy, mean: Sequence[float], std: Sequence[float]) -> None:
        self.policy = policy
        self.normalization = Normalization(mean, std)
        if len(self.normalization.mean) != policy.source.channels:
            raise ValueError(
                f"mean and std are for {len(self.normalization.mean)} channels, but the policy was learned on images "
                f"with {policy.source.channels}; convert your images, or use a policy learned on such images"
            )

    def augment(
        self, images: Float[Tensor, "n c h w"], labels: Tensor | None = None
    ) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, " n"]]:
        """Augmented images in the type of the given ones, and weights, which sum to 1 over the global mini-batch."""
        pixels = self.normalization.undo(images)
        if self.policy.device != images.device:
            self.policy.to(images.device)
        pixels, weights = self.policy.augment(pixels, labels)
        return self.normalization(pixels, images.dtype), weights
