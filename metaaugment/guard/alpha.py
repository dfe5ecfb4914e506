"""An inner step size that has gone to zero: the gradient of the policy is proportional to it."""

import warnings

import torch
from torch import Tensor

from metaaugment.distributed import rank
from metaaugment.guard.replay import capturing

LEFT, LEAST = 0.05, 1e-4  # near zero: a twentieth of the first value, or this
LASTING = 100  # steps that it must stay there
SELDOM = 100  # steps between two looks at it on a GPU, where the host waits for the value
THIRD = 1.5  # what lies before the last third of the steps so far lies before that of the whole training


class AlphaWatch:
    """Says once that α has been near zero since long before the end of training.

    In the last third of a training α falls by itself, and how long a loop goes on is not known here.
    """

    def __init__(self, alpha: float, device: torch.device) -> None:
        self.near_zero = max(LEFT * alpha, LEAST)
        self.device = device
        self.since: int | None = None  # the step at which it was first seen there
        self.told = False

    def see(self, alpha: Tensor, steps: int) -> None:
        seldom = self.device.type == "cuda" and steps % SELDOM
        if self.told or seldom or capturing(self.device):
            return
        value = float(alpha)
        if not value <= self.near_zero:
            self.since = None
            return
        self.since = steps if self.since is None else self.since
        if steps < max(THIRD * self.since, self.since + LASTING):
            return
        self.told = True
        if rank() == 0:
            warnings.warn(
                f"alpha, the inner step size, has been near 0 since step {self.since} (now {value:.2g}), and the "
                "policy learns in proportion to it; clip the policy's gradient before its optimizer's step, as in "
                "torch.nn.utils.clip_grad_norm_(learner.policy_parameters(), 1.0), or give that optimizer a lower rate",
                stacklevel=3,
            )


@torch.no_grad()
def at_least_zero(alpha: Tensor) -> None:
    """α is a step size: an optimizer may take it below 0, but no update uses it there."""
    alpha.clamp_(min=0)
