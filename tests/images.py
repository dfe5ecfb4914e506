"""Test images of every kind that has tripped an implementation, and Pillow as the judge."""

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

CONTENTS = ("photo", "noise", "constant", "two values", "one hot pixel", "narrow range", "grey")


def make(content: str, height: int, width: int, channels: int = 3) -> Tensor:
    """One image, uint8 [channels, height, width]."""
    generator = torch.Generator().manual_seed(height * 1000 + width)
    shape = (3, height, width)
    match content:
        case "photo":
            photo = Image.fromarray(load_sample_image("flower.jpg")).resize((width, height))
            image = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
        case "noise":
            image = torch.randint(0, 256, shape, generator=generator)
        case "constant":
            image = torch.tensor([200, 3, 117])[:, None, None].expand(shape)
        case "two values":
            image = torch.where(torch.rand(shape, generator=generator) < 0.3, 40, 190)
        case "one hot pixel":
            image = torch.zeros(shape)
            image[:, height // 2, width // 2] = 255
        case "narrow range":
            image = torch.randint(64, 81, shape, generator=generator)
        case "grey":
            image = torch.randint(0, 256, (1, height, width), generator=generator).expand(shape)
        case _:
            raise ValueError(content)
    return image[:channels].to(torch.uint8).contiguous()


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image: Image.Image) -> Tensor:
    values = torch.from_numpy(np.array(image))
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1)
