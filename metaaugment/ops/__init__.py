"""Image functions on batches of uint8 images, one for each sample, with Pillow's results bit for bit."""

from metaaugment.ops.space import MAX_MAGNITUDE, SPACES, Level, Space, find_space
from metaaugment.ops.table import INDEX, OPS, PAPER_OPS, Op

__all__ = ["INDEX", "MAX_MAGNITUDE", "OPS", "PAPER_OPS", "SPACES", "Level", "Op", "Space", "find_space"]
