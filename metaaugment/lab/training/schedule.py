"""The learning rate as a function of the step."""

import math
from collections.abc import Callable


def cosine(peak: float, steps: int, warmup: int = 0, start: float = 0.0) -> Callable[[int], float]:
    """Linearly from `start` up to `peak` over the first `warmup` steps, then down to 0 along half a cosine."""

    def rate(step: int) -> float:
        if step < warmup:
            return start + (peak - start) * step / warmup
        return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    return rate
