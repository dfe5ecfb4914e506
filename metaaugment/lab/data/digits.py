"""The digits that come with scikit-learn: 1,797 images of 8×8 pixels, at hand without a download."""

from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image

from metaaugment.lab.data.entry import Entry, Reduced, black
from metaaugment.lab.data.images import Images
from metaaugment.lab.data.splits import Splits, apportion, split

VAL, TEST = 100, 597
SIZE = 32


def read(seed: int, size: int) -> Splits:
    """All digits, uint8 [n, 3, size, size], bright on black; 1,100 for training.

    Enlarged bicubically: Lanczos, the choice for Omniglot's reduction, rings around strokes one pixel wide.
    """
    pixels, labels = _datasets().load_digits(return_X_y=True)
    # Values are 0 to 16.
    grey = np.floor(pixels.reshape(-1, 8, 8) * (255 / 16) + 0.5).astype(np.uint8)
    enlarged = (Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC) for image in grey)
    large = np.stack([np.asarray(image) for image in enlarged])
    images = torch.from_numpy(large)[:, None].repeat(1, 3, 1, 1)
    everything = Images(images, torch.from_numpy(labels.astype(np.int64)))
    sizes = everything.labels.bincount().tolist()
    parts = val, test, train = split(everything.labels, seed, apportion(VAL, sizes), apportion(TEST, sizes))
    note = f"1,797 digits of scikit-learn, split by seed {seed}: {len(train):,} / {len(val)} / {len(test)}"
    return Splits.cut(everything, parts, tuple("0123456789"), note)


def locate(root: Path) -> Path:
    """The folder of scikit-learn that holds them, wherever other data are."""
    return Path(str(_datasets().__file__)).parent / "data"


def _datasets() -> ModuleType:
    try:
        import sklearn.datasets
    except ImportError:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed; install it with: pip install 'metaaugment[lab]'"
        ) from None
    return sklearn.datasets


ENTRY = Entry(
    "digits",
    read=lambda ask: read(ask.seed, ask.size),
    locate=locate,
    size=SIZE,
    sizes=range(8, 65),
    how="nothing to do: it comes with scikit-learn",
    fill=black,
    embedded=True,
    like="svhn",
    searched={"autoaugment": Reduced(20)},
)
