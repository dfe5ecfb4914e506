"""Learn, while an image classifier trains, which data augmentation helps which sample."""

from metaaugment.embedding import embed
from metaaugment.ops import OPS, PAPER_OPS
from metaaugment.transformation import Transformation, apply

__version__ = "0.1.0"

__all__ = ["OPS", "PAPER_OPS", "Transformation", "apply", "embed"]
