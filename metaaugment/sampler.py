"""Samplers: which two functions each sample gets, and at which magnitudes.

A sampler has `sample(n, generator)`, which draws a transformation, and `record` and `update`, which may do nothing.
What it may have besides:

- `probabilities`: p_{j,k} [K, K], and `magnitudes`: their distribution for each function [K, bins], which the log of a
  run shows and an exported policy keeps;
- `tallies`: tensors in which each process counts for itself until `update`, so that a checkpoint has the sum of all;
- `state_dict`, `load_state_dict`: what has to be kept for a run to go on.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from metaaugment.distributed import add_up
from metaaugment.embedding import K
from metaaugment.ops import INDEX, MAX_MAGNITUDE
from metaaugment.transformation import Transformation, device_of

MOST_POWER, MOST_BINS = 16, 100


def probabilities(v: Float[Tensor, "..."], epsilon: float) -> Float[Tensor, "..."]:
    """Eq. 5: the estimated distribution mixed with the uniform one."""
    return (1 - epsilon) * v / v.sum() + epsilon / v.numel()


def averages(sums: Float[Tensor, "..."], counts: Float[Tensor, "..."]) -> Float[Tensor, "..."] | None:
    """v: the average output of each cell; of one that was not seen, the mean of the seen ones. None if none was.

    So that what was not seen is neither favoured nor starved (decisions.md).
    """
    seen = counts > 0
    if not (seen.any() and sums.sum() > 0):
        return None
    average = sums / counts
    return torch.where(seen, average, average[seen].mean())


class TransformationSampler:
    """Draws pairs of functions by p_{j,k}, estimated from the policy network's outputs (Eq. 5).

    `record` collects outputs. `update` refreshes p from those of the last `window` calls of `update`: once per epoch in
    the paper, which keeps 50 or 20 epochs. Before the first call, p is uniform.

    Average outputs of pairs are nearly alike, as a pair is only part of what the policy looks at, and p is then nearly
    uniform. With a `power` above the paper's 1 it follows their ratios more sharply. With several `bins` magnitudes are
    drawn as pairs are: by the average outputs of each function in so many equal parts of [0, 10], and not uniformly.
    """

    def __init__(
        self, epsilon: float = 0.1, window: int = 20, functions: int = K, power: float = 1.0, bins: int = 1
    ) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is {epsilon:g}; it is a share of uniform sampling in [0, 1]")
        if window < 1:
            raise ValueError(f"window is {window}; it counts calls of update() and is at least 1")
        if not 0 < power <= MOST_POWER:
            raise ValueError(f"power is {power:g}; it is above 0, and at most {MOST_POWER}")
        if not (isinstance(bins, int) and 1 <= bins <= MOST_BINS):
            raise ValueError(f"bins is {bins}; it counts parts of the magnitudes, 1 to {MOST_BINS}")
        self.epsilon = epsilon
        self.window = window
        self.power = power
        self.probabilities = torch.full((functions, functions), 1 / functions**2, dtype=torch.float64)
        self.magnitudes = torch.full((functions, bins), 1 / bins, dtype=torch.float64)
        # Sum and number of outputs since the last call of update(), and between the calls before. A row is a function:
        # with each second one, and then, where magnitudes are learned, in each of their bins.
        columns = functions + (bins if bins > 1 else 0)
        self.present = torch.zeros(2, functions, columns, dtype=torch.float64)
        self.past = torch.zeros(0, 2, functions, columns, dtype=torch.float64)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        """Algorithm 1, line 4."""
        first, second = draw_pairs(self.probabilities, n, generator)
        magnitudes = draw_magnitudes(self.magnitudes, first, second, generator) if self.learns_magnitudes else None
        return Transformation.draw(first, second, generator, magnitudes)

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:
        """Collect the raw outputs P of a mini-batch; those that are not finite are left out."""
        self.to(outputs.device)
        columns, outputs = self.present.shape[-1], outputs.detach().double()
        first, second = transformation.first.long(), transformation.second.long()
        cells = first * columns + second
        if self.learns_magnitudes:
            functions, bins = self.magnitudes.shape
            parts = (transformation.magnitudes * (bins / MAX_MAGNITUDE)).long().clamp_(max=bins - 1)
            places = torch.stack([first, second]) * columns + functions + parts.T
            cells, outputs = torch.cat([cells, *places]), outputs.repeat(3)
        cells, finite = cells.to(outputs.device), outputs.isfinite()
        sums, counts = self.present.view(2, -1)
        sums.index_add_(0, cells, torch.where(finite, outputs, 0.0))
        counts.index_add_(0, cells, finite.double())

    def update(self) -> None:
        """Algorithm 1, line 11: p from the records of the last `window` calls, of all processes."""
        add_up([self.present])
        self.past = torch.cat([self.past, self.present[None]])[-self.window :]
        sums, counts = self.past.sum(0)
        # In place, here and below: a captured step reads and writes this very memory.
        self.present.zero_()
        functions = len(self.probabilities)
        if (v := averages(sums[:, :functions], counts[:, :functions])) is not None:
            self.probabilities.copy_(self._of_pairs(v))
        if self.learns_magnitudes:
            for p, *seen in zip(self.magnitudes, sums[:, functions:], counts[:, functions:], strict=True):
                if (v := averages(*seen)) is not None:
                    p.copy_(self._estimated(v))

    def _estimated(self, v: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        # By ratios, as powers of small outputs may be too small for numbers; the paper's exactly as it is.
        return probabilities(v if self.power == 1 else (v / v.max()) ** self.power, self.epsilon)

    def _of_pairs(self, v: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        return self._estimated(v)

    @property
    def learns_magnitudes(self) -> bool:
        return self.magnitudes.shape[1] > 1

    @property
    def tallies(self) -> list[Tensor]:
        """What each process counts for itself, until `update` adds it up."""
        return [self.present]

    def to(self, device: torch.device | str) -> "TransformationSampler":
        if self.probabilities.device != torch.device(device):
            for name, value in self.state_dict().items():
                setattr(self, name, value.to(device))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        learned = {"magnitudes": self.magnitudes} if self.learns_magnitudes else {}
        return {"probabilities": self.probabilities, **learned, "present": self.present, "past": self.past}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Into the memory it has, which a captured step may use."""
        own = self.state_dict()
        for name, value in own.items():
            found = tuple(state[name].shape) if name in state else "missing"
            if name not in state or state[name].shape[-2:] != value.shape[-2:]:
                raise ValueError(
                    f"the state's {name} is {found}, for other functions or bins than this sampler's "
                    f"{tuple(value.shape)}"
                )
        for name in own.keys() - {"past"}:
            own[name].copy_(state[name])
        self.past = state["past"].to(self.past.device, copy=True)


class SingleSampler(TransformationSampler):
    """Draws one function by p_j, estimated as in Eq. 5: the pairs whose second is Identity, and no other."""

    def __init__(self, epsilon: float = 0.1, window: int = 20, power: float = 1.0, bins: int = 1) -> None:
        super().__init__(epsilon, window, power=power, bins=bins)
        self.probabilities = self._of_pairs(torch.ones_like(self.probabilities))

    def _of_pairs(self, v: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        p, alone = torch.zeros_like(v), INDEX["Identity"]
        p[:, alone] = self._estimated(v[:, alone])
        return p


class FixedSampler(TransformationSampler):
    """Draws pairs of functions, and magnitudes, by a p that does not change: one learned before."""

    def __init__(
        self, probabilities: Float[Tensor, "K K"] | None = None, magnitudes: Float[Tensor, "K bins"] | None = None
    ) -> None:
        if magnitudes is not None and (magnitudes.ndim != 2 or len(magnitudes) != K):
            raise ValueError(f"magnitudes is {tuple(magnitudes.shape)}; it has a row for each of {K} functions")
        super().__init__(bins=1 if magnitudes is None else magnitudes.shape[1])
        if probabilities is not None:
            self.probabilities = probabilities.detach().to(torch.float64, copy=True)
        if magnitudes is not None:
            self.magnitudes = magnitudes.detach().to(torch.float64, copy=True)

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:
        self.to(outputs.device)

    def update(self) -> None:
        pass


class StillSampler:
    """What samplers that do not learn have in common; each adds its own `sample`."""

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:
        pass

    def update(self) -> None:
        pass


class UniformSampler(StillSampler):
    """Draws pairs of functions uniformly: the paper's RandAugment, and epsilon = 1."""

    def __init__(self, functions: int = K) -> None:
        self.functions = functions

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        first, second = torch.randint(0, self.functions, (2, n), generator=generator, device=device)
        return Transformation.draw(first, second, generator)


class IdentitySampler(StillSampler):
    """Draws no function at all: the baseline."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        identity = torch.full((n,), INDEX["Identity"], device=device)
        return Transformation.draw(identity, identity, generator)


def draw_pairs(
    probabilities: Float[Tensor, "K K"], n: int, generator: torch.Generator | None = None
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """n pairs (j, k) ~ p, by inverting the cumulative distribution: one uniform number per pair, no host in between."""
    device = generator.device if generator is not None else probabilities.device
    cumulative = probabilities.to(device).flatten().cumsum(0)
    place = torch.rand(n, generator=generator, device=device, dtype=torch.float64) * cumulative[-1]
    pair = torch.searchsorted(cumulative, place, right=True).clamp_(max=cumulative.numel() - 1)
    return pair // probabilities.shape[1], pair % probabilities.shape[1]


def draw_magnitudes(
    p: Float[Tensor, "K bins"],
    first: Int[Tensor, " n"],
    second: Int[Tensor, " n"],
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n 2"]:
    """Magnitudes of pairs: in a part of [0, 10] by each function's p, again by inverting it, and uniform within that.

    The place within a part does not depend on p: rounding in p, which differs with the number of processes, must not
    come through to the images.
    """
    bins = p.shape[1]
    cumulative = p.to(first.device)[torch.stack([first, second], 1)].cumsum(2)
    size, device = (len(first), 2), first.device
    place = torch.rand(*size, 1, generator=generator, device=device, dtype=torch.float64) * cumulative[..., -1:]
    part = (place >= cumulative).sum(2).clamp_(max=bins - 1)
    inside = torch.rand(size, generator=generator, device=device, dtype=torch.float32)
    return ((part + inside) * (MAX_MAGNITUDE / bins)).clamp_(max=MAX_MAGNITUDE)
