"""One function per sample in plain PyTorch: the batch is split by function, and each part goes through its kernel."""

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from metaaugment.ops.space import Space
from metaaugment.ops.table import OPS


def apply_functions(
    images: UInt8[Tensor, "n c h w"],
    ops: Int[Tensor, "n k"],
    magnitudes: Float[Tensor, "n k"],
    signs: Shaped[Tensor, "n k"],
    positions: Float[Tensor, "n k 2"],
    space: Space,
    fill: tuple[int, ...],
) -> UInt8[Tensor, "n c h w"]:
    """Apply to each image its k functions in order; `ops` holds their indices in `OPS`."""
    out = images.clone()
    arguments = space.arguments(ops, magnitudes, signs, *images.shape[2:])
    given = {"fill": torch.tensor(fill, dtype=torch.uint8, device=images.device)}
    for slot in range(ops.shape[1]):
        order, end = ops[:, slot].argsort(stable=True), 0
        for op, number in zip(OPS, torch.bincount(ops[:, slot], minlength=len(OPS)).tolist(), strict=True):
            end += number
            if op.name == "Identity" or number == 0:
                continue
            samples = order[end - number : end]
            given["position"] = positions[samples, slot]
            extras = (given[name] for name in op.uses)
            _write(out, samples, op.kernel(out.index_select(0, samples), arguments[samples, slot], *extras))
    return out


def _write(out: Tensor, samples: Tensor, images: Tensor) -> None:
    """out[samples] = images, eight bytes at a time if they divide a sample: torch copies value by value."""
    rows, values = out.view(len(out), -1), images.reshape(len(images), -1)
    if rows.shape[1] % 8 == 0:
        rows, values = rows.view(torch.int64), values.view(torch.int64)
    rows.index_copy_(0, samples, values)
