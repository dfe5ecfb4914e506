"""Images of more than 8 bits: how many of 256 levels are left of them, by a sample of the files."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ImageFile

from metaaugment.lab.data.entry import Refused
from metaaugment.lab.data.files import CHANNELS, WHITE, ImageFiles, is_deep, is_deep_grey, opened
from metaaugment.lab.words import number_of

HEADERS = 256  # files of a split that are looked at
DECODED = 24  # of those among them that have more than 8 bits


@dataclass(frozen=True)
class Dim:
    """What to say of images of which few levels are left; `white`: the value of white that leaves more, if one does."""

    note: str
    white: int | None = None


def find_dim(parts: Sequence[ImageFiles], white: int) -> Dim | None:
    """What to say if all images of more than 8 bits in a sample are darker than half of white.

    Refuses a white with which one of them cannot be read. Broken files do not count here.
    """
    sample = [part.root / part.names[place] for part in parts for place in _spread(len(part), HEADERS)]
    deep = [file for file in sample if _is_deep(file)]
    grey, color = dict[Path, int](), dict[Path, int]()
    for file in (deep[place] for place in _spread(len(deep), DECODED)):
        with contextlib.suppress(Exception), _opened(file) as picture:
            if is_deep_grey(picture):
                grey[file] = int(np.asarray(picture).max())
            else:
                color[file] = int(np.asarray(picture.convert("RGB")).max())
    brightest = max(grey.values(), default=0)
    if white < brightest <= WHITE:
        file = max(grey, key=lambda file: grey[file])
        raise Refused("white", white, f"{file} has a pixel of {brightest}, so it must be at least that")
    if color and white != WHITE:
        why = f"{next(iter(color))} cannot be read with it: {CHANNELS}, for which it must be {WHITE}"
        raise Refused("white", white, why)
    if 0 < 2 * brightest < white:
        levels = 256 * brightest // (white + 1) + 1
        return Dim(
            f"the brightest pixel in {number_of('grey image', len(grey))} of more than 8 bits is {brightest}, where "
            f"{white} is white: {levels} of 256 levels are left",
            2 ** brightest.bit_length() - 1,
        )
    if 0 < (brightest := max(color.values(), default=0)) < 128:
        return Dim(
            f"of several channels of more than 8 bits the upper 8 are read, at most {brightest} in "
            f"{number_of('image', len(color))}: {brightest + 1} of 256 levels are left; convert these images to 8 bits "
            "a channel"
        )
    return None


def _is_deep(file: Path) -> bool:
    with contextlib.suppress(Exception), _opened(file) as picture:
        return is_deep(picture)
    return False


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[ImageFile.ImageFile]:
    with file.open("rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield opened(stream)


def _spread(n: int, most: int) -> list[int]:
    """The places in a list of n to look at: at most so many, evenly spread."""
    return [n * place // most for place in range(most)] if n > most else list(range(n))
