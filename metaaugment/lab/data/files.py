"""Labeled images in files, decoded on demand."""

import hashlib
import math
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

# What networks trained on ImageNet expect: the published mean and deviation of its training images.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

WHITE = 2**16 - 1
AREA_MIN = 0.08
RATIO = (3 / 4, 4 / 3)
TRIES = 10


# The formats of the file extensions that `folder.py` reads. Others that Pillow knows are more often forged than met,
# and one of them, EPS, is a program, which Pillow has Ghostscript run.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
CHANNELS = "it has several channels of more than 8 bits, of which the upper 8 are read"
MOST_PIXELS = 2**26  # 8,192 × 8,192: what can be decoded, and laid on white, within a gigabyte


class CorruptImage(ValueError):
    """A file without a readable image; `reason` says why in a few words. What to do about it is up to the caller."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(file, reason)
        self.file, self.reason = file, reason

    def __str__(self) -> str:
        return f"{self.file} cannot be read as an image ({self.reason})"


@dataclass(frozen=True, eq=False, repr=False)
class ImageFiles:
    """Image files under a folder, and their labels; a data set for torch's DataLoader, small to hand to its workers.

    `names` are relative to the folder, with slashes. Images are uint8 [3, size, size]. `area_min`: the least share of
    an image's area in a random part; with 1, training and evaluation see the whole image. `white`: the value that
    counts as white in grey of more than 8 bits.
    """

    root: Path
    names: tuple[str, ...]
    labels: Int64[Tensor, " n"]
    size: int = 224
    area_min: float = AREA_MIN
    white: int = WHITE

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.size, self.size

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[UInt8[Tensor, "3 size size"], int]:
        return self.image(i), int(self.labels[i])

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.root / name for name in self.names)

    def image(self, i: int, generator: torch.Generator | None = None) -> UInt8[Tensor, "3 size size"]:
        """The view for evaluation; with a generator one for training.

        Raises `CorruptImage` for a file that is not an image.
        """
        picture = read_image(self.root / self.names[i], self.white)
        if generator is None or self.area_min == 1:
            view = evaluation_view(picture, self.size, self.area_min)
        else:
            view = random_part(picture, self.size, generator, self.area_min)
        return torch.from_numpy(np.array(view)).permute(2, 0, 1).contiguous()

    def take(self, index: Int64[Tensor, " k"]) -> "ImageFiles":
        """The images at these indices, in this order."""
        return replace(self, names=tuple(self.names[i] for i in index.tolist()), labels=self.labels[index])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """ImageNet's published mean and deviation: reading all files for our own would take as long as an epoch."""
        return IMAGENET_MEAN, IMAGENET_STD

    def digest(self) -> bytes:
        """SHA-256 of names, sizes of the files in bytes, and labels; the pixels are not read."""
        sha = hashlib.sha256(f"{len(self)} {self.size}".encode())
        for name, label in zip(self.names, self.labels.tolist(), strict=True):
            sha.update(f"{name}\0{(self.root / name).stat().st_size}\0{label}\n".encode("utf-8", "surrogateescape"))
        return sha.digest()


def evaluation_view(picture: Image.Image, size: int, area_min: float = AREA_MIN) -> Image.Image:
    """What evaluation sees of an image: the middle; or the whole, if `area_min` is 1, and training sees that too."""
    return whole(picture, size) if area_min == 1 else middle(picture, size)


def whole(picture: Image.Image, size: int) -> Image.Image:
    """All of an image, each side scaled to the size: what is not square is squeezed, and nothing is lost."""
    return picture.resize((size, size), Image.Resampling.BILINEAR)


def middle(picture: Image.Image, size: int) -> Image.Image:
    """An image's middle: the shorter side becomes 256 / 224 of the size, and the center is kept."""
    shorter, side = min(picture.size), round(size * 256 / 224)
    width, height = (side * length // shorter for length in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    # Only what is kept is scaled: all of a long strip, scaled to a shorter side of 256 pixels, would take gigabytes.
    across, down = picture.width / width, picture.height / height
    right, bottom = min(picture.width, (left + size) * across), min(picture.height, (top + size) * down)
    # Pillow's bilinear filter widens with the reduction, which is what antialiasing is.
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=(left * across, top * down, right, bottom))


def random_part(picture: Image.Image, size: int, generator: torch.Generator, area_min: float = AREA_MIN) -> Image.Image:
    """The view for training: a part of this share of the area at least, its sides 3:4 to 4:3, scaled to a square.

    The first of ten draws that fits; where none does, the largest part of a permitted shape in the middle.
    """
    width, height = picture.size
    # All ten draws at once: an image takes the same count of random numbers whatever its shape.
    for area, shape, x, y in torch.rand(TRIES, 4, dtype=torch.float64, generator=generator).tolist():
        area = (area_min + area * (1 - area_min)) * width * height
        ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** shape
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            break
    else:
        w, h = max(1, min(width, round(height * RATIO[1]))), max(1, min(height, round(width / RATIO[0])))
        left, top = (width - w) // 2, (height - h) // 2
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))


def read_image(file: Path, white: int = WHITE) -> Image.Image:
    """The image of a file as a viewer shows it, in RGB: turned by its EXIF orientation, on white where transparent.

    Takes the first of several frames, and brings grey of more than 8 bits to 8, of which `white` is the highest value.
    Raises `CorruptImage` for a file that is not an image, or whose pixels are numbers of unknown range, or above white.
    """
    with file.open("rb") as stream, warnings.catch_warnings():
        # A damaged EXIF block, or a photo larger than usual, is no reason for a warning in each epoch.
        warnings.simplefilter("ignore")
        try:
            return _decode(stream, white)
        except Exception as error:  # a broken file makes Pillow raise nearly every exception there is
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's fault, not the image's
            raise CorruptImage(file, _reason(error)) from None


def opened(stream: BinaryIO) -> ImageFile.ImageFile:
    """An image whose pixels are not decoded yet."""
    picture = Image.open(stream, formats=FORMATS)
    if picture.width * picture.height > MOST_PIXELS:
        raise ValueError(f"it has {picture.width:,} × {picture.height:,} pixels, more than {MOST_PIXELS:,}")
    return picture


def is_deep(picture: ImageFile.ImageFile) -> bool:
    """Whether an opened image has more than 8 bits a channel."""
    # Of color, and of grey with transparency, Pillow has no such mode and decodes the upper 8 bits.
    return is_deep_grey(picture) or re.search(";16[BLN]", str(picture.tile)) is not None


def is_deep_grey(picture: Image.Image) -> bool:
    return picture.mode.startswith("I")


def _decode(stream: BinaryIO, white: int) -> Image.Image:
    picture: Image.Image = opened(stream)
    if white != WHITE and is_deep(picture) and not is_deep_grey(picture):
        raise ValueError(f"{CHANNELS}, for which white must be {WHITE}")
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range")
    # At most two or three copies at a time: one of a large photo takes hundreds of megabytes.
    if is_deep_grey(picture):
        values = np.asarray(picture)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535:  # cut off at 16 bits, most such images would be all white or all black
            raise ValueError(f"its pixels are whole numbers of unknown range, from {low} to {high}")
        if high > white:
            raise ValueError(f"it has a pixel of {high}, above the {white} that counts as white")
        scaled = values.astype(np.uint32)
        scaled *= 256
        scaled //= white + 1
        picture = Image.fromarray(scaled.astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def _reason(error: Exception) -> str:
    """Why, in a few words; Pillow's own message for an unknown format names a stream that means nothing to a user."""
    if isinstance(error, UnidentifiedImageError):
        return "not in a format that Pillow knows, or broken at its start"
    return str(error).rstrip(".") or type(error).__name__
