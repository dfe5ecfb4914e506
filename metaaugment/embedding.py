"""e(T): what the policy network is told about a transformation."""

import torch
from jaxtyping import Float
from torch import Tensor

from metaaugment.ops import MAX_MAGNITUDE, PAPER_OPS
from metaaugment.transformation import Transformation

K = len(PAPER_OPS)


def embed(transformation: Transformation) -> Float[Tensor, "n 28"]:
    """The paper's embedding: m1 + 1 at position 2j − 1, m2 + 1 at position 2k (from 1), 0 elsewhere.

    A function without a magnitude counts as one at its strongest: 11. Signs are not part of it.
    """
    t = transformation
    # Outside the paper's functions scatter_ refuses the index, but in words of its own; on CUDA the host must not wait.
    if t.first.device.type == "cpu":
        for index in (t.first, t.second):
            if (index >= K).any():
                raise ValueError(
                    f"function index {int(index.max())} has no place in the embedding; "
                    f"it holds the paper's functions, 0 to {K - 1}"
                )
    magnitudes = t.magnitudes.float()
    takes_one = torch.tensor([op.magnitude for op in PAPER_OPS], device=magnitudes.device)
    indices = torch.stack([t.first, t.second], dim=1).long()
    values = torch.where(takes_one[indices], magnitudes, MAX_MAGNITUDE) + 1
    places = 2 * indices + torch.tensor([0, 1], device=indices.device)
    return torch.zeros(len(t), 2 * K, device=magnitudes.device).scatter_(1, places, values)
