"""e(T): what the policy network is told about a transformation."""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.ops import MAX_MAGNITUDE, PAPER_OPS
from metaaugment.transformation import Transformation

K = len(PAPER_OPS)


def embed(transformation: Transformation) -> Float[Tensor, "n 28"]:
    """The paper's embedding: m1 + 1 at position 2j − 1, m2 + 1 at position 2k (from 1), 0 elsewhere.

    A function without a magnitude counts as one at its strongest: 11. Signs are not part of the embedding.
    """
    t = transformation
    # Not on a GPU, where the host would have to wait; there scatter_'s own assertion catches an index out of range.
    if t.first.device.type == "cpu":
        for index in (t.first, t.second):
            if (index >= K).any():
                raise ValueError(
                    f"the embedding has no place for function index {int(index.max())}; "
                    f"it holds the paper's functions, 0 to {K - 1}"
                )
    magnitudes = t.magnitudes.float()
    takes_one, slot = _constants(magnitudes.device)
    indices = torch.stack([t.first, t.second], dim=1).long()
    values = torch.where(takes_one[indices], magnitudes, MAX_MAGNITUDE) + 1
    return magnitudes.new_zeros(len(t), 2 * K).scatter_(1, 2 * indices + slot, values)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Whether each function takes a magnitude, and the offsets of first and second; copied to a device once."""
    return torch.tensor([op.magnitude for op in PAPER_OPS], device=device), torch.tensor([0, 1], device=device)
