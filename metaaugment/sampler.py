"""Samplers: which two functions each sample gets."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from metaaugment.algorithm import probabilities
from metaaugment.distributed import add_up
from metaaugment.embedding import K
from metaaugment.guard.checks import check_count
from metaaugment.ops import INDEX
from metaaugment.transformation import Transformation, device_of


class Sampler(ABC):
    """Which transformation each sample gets; a sampler of one's own needs `sample` alone.

    Objects of another class are taken, too, if they have `sample` and `record`: what else they have of it counts, by
    the same names.
    """

    probabilities: Any = None  # p_{j,k}, a tensor [K, K], which the log of a run shows and a policy file keeps
    kept_elsewhere = False  # a learner does not keep its state

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [getattr(cls, name) is not getattr(Sampler, name) for name in ("state_dict", "load_state_dict")]
        if own[0] != own[1]:
            raise TypeError(f"{cls.__name__} has one of state_dict and load_state_dict; to go on, a run needs both")
        if not own[0] and issubclass(cls, nn.Module):
            raise TypeError(f"{cls.__name__} has the state of a Sampler, which is none; write (nn.Module, Sampler)")

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        """Draw n transformations."""

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:  # noqa: B027
        """See the policy's raw outputs P, and the losses, of a mini-batch."""

    def update(self) -> None:  # noqa: B027
        """Learn from what was recorded since the last call."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Numbers by name, for each row of a run's log."""
        return {}

    @property
    def tallies(self) -> Sequence[Tensor]:
        """What each process counts on its own until `update`; a checkpoint holds the sum over processes."""
        return ()

    @property
    def stateful(self) -> bool:
        """Whether it has a state to keep, though it may be empty yet."""
        return type(self).state_dict is not Sampler.state_dict

    def state_dict(self) -> Mapping[str, Tensor]:
        """What a run needs to continue; nothing, of a sampler that does not learn."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        pass


class Adapted(Sampler):
    """An object of another class as a `Sampler`: the one place where it is asked what it has."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.record = sampler.record
        self.update = getattr(sampler, "update", super().update)
        self.state_dict = getattr(sampler, "state_dict", super().state_dict)
        self.load_state_dict = getattr(sampler, "load_state_dict", super().load_state_dict)
        self.kept_elsewhere = getattr(sampler, "kept_elsewhere", False)

    @property
    def stateful(self) -> bool:
        return hasattr(self.sampler, "state_dict")

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        return self.sampler.sample(n, generator)

    @property
    def probabilities(self) -> Any:  # type: ignore[override]
        return getattr(self.sampler, "probabilities", None)

    @property
    def figures(self) -> Mapping[str, float]:
        return getattr(self.sampler, "figures", {})

    @property
    def tallies(self) -> Sequence[Tensor]:
        return getattr(self.sampler, "tallies", ())


def as_sampler(sampler: Any) -> Sampler:
    """A sampler as it is, or an object of another class as one."""
    return sampler if isinstance(sampler, Sampler) else Adapted(sampler)


class TransformationSampler(Sampler):
    """Draws pairs of functions by p_{j,k}, estimated from the policy network's outputs (Eq. 5).

    `record` collects outputs. `update`, called once per epoch in the paper, recomputes p from those of the last
    `window` calls of `update`: 50 or 20 epochs in the paper. Before the first call, p is uniform.
    """

    probabilities: Float[Tensor, "K K"]

    def __init__(self, epsilon: float = 0.1, window: int = 20, functions: int = K) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is {epsilon:g}; the share of uniform sampling must lie in [0, 1]")
        check_count("window", window)
        check_count("functions", functions)
        self.epsilon = epsilon
        self.window = window
        self.probabilities = torch.full((functions, functions), 1 / functions**2, dtype=torch.float64)
        # Sum and number of each pair's outputs: since the last call of update(), and between the calls before it.
        self.present = torch.zeros(2, functions, functions, dtype=torch.float64)
        self.past = torch.zeros(0, 2, functions, functions, dtype=torch.float64)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        """Algorithm 1, line 4."""
        first, second = draw_pairs(self.probabilities, n, generator)
        return Transformation.draw(first, second, generator)

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:
        """Collect the raw outputs P of a mini-batch; those that are not finite are left out."""
        functions = self.probabilities.shape[0]
        self.to(outputs.device)
        pairs = torch.stack([transformation.first, transformation.second]).long().to(outputs.device)
        # Not on a GPU, where the host would have to wait.
        if outputs.device.type == "cpu" and (pairs >= functions).any():
            raise ValueError(
                f"the sampler has no place for function index {int(pairs.max())}; it draws functions 0 to "
                f"{functions - 1}"
            )
        pair = pairs[0] * functions + pairs[1]
        outputs = outputs.detach().double()
        finite = outputs.isfinite()
        sums, counts = self.present.view(2, -1)
        sums.index_add_(0, pair, torch.where(finite, outputs, 0.0))
        counts.index_add_(0, pair, finite.double())

    def update(self) -> None:
        """Algorithm 1, line 11: p from what all processes recorded within the window."""
        add_up([self.present])
        self.past = torch.cat([self.past, self.present[None]])[-self.window :]
        sums, counts = self.past.sum(0)
        seen = counts > 0
        # In place, here and below: a captured step reads and writes this very memory.
        self.present.zero_()
        if seen.any() and sums.sum() > 0:
            average = sums / counts
            # A pair not seen in the window has the mean of the seen ones: neither favoured nor starved (decisions.md).
            v = torch.where(seen, average, average[seen].mean())
            self.probabilities.copy_(self._estimated(v))

    def _estimated(self, v: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        return probabilities(v, self.epsilon)

    @property
    def tallies(self) -> list[Tensor]:
        """What each process counts on its own, until `update` adds it up."""
        return [self.present]

    def to(self, device: torch.device | str) -> "TransformationSampler":
        if self.probabilities.device != torch.device(device):
            for name, value in self._tensors.items():
                setattr(self, name, value.to(device))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """A snapshot: what is recorded later does not change it."""
        return {name: value.clone() for name, value in self._tensors.items()}

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {"probabilities": self.probabilities, "present": self.present, "past": self.past}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads into the existing memory, which a captured step may use."""
        for name in ("probabilities", "present", "past"):
            _check_pairs(name, state[name], self.probabilities)
        self.probabilities.copy_(state["probabilities"])
        self.present.copy_(state["present"])
        self.past = state["past"].to(self.past.device, copy=True)


class SingleSampler(TransformationSampler):
    """Draws one function by p_j, estimated as in Eq. 5: only pairs whose second function is Identity."""

    def __init__(self, epsilon: float = 0.1, window: int = 20) -> None:
        super().__init__(epsilon, window)
        self.probabilities = self._estimated(torch.ones_like(self.probabilities))

    def _estimated(self, v: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        p, alone = torch.zeros_like(v), INDEX["Identity"]
        p[:, alone] = probabilities(v[:, alone], self.epsilon)
        return p


class FixedSampler(Sampler):
    """Draws pairs of functions by a p that does not change, a copy of one learned before."""

    probabilities: Float[Tensor, "K K"]

    def __init__(self, probabilities: Float[Tensor, "K K"] | None = None) -> None:
        p = torch.full((K, K), 1 / K**2, dtype=torch.float64) if probabilities is None else probabilities
        self.probabilities = p.to(torch.float64, copy=True)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        first, second = draw_pairs(self.probabilities, n, generator)
        return Transformation.draw(first, second, generator)

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:
        self.to(outputs.device)

    def to(self, device: torch.device | str) -> "FixedSampler":
        self.probabilities = self.probabilities.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        return {"probabilities": self.probabilities.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads into the existing memory, which a captured step may use."""
        _check_pairs("probabilities", state["probabilities"], self.probabilities)
        self.probabilities.copy_(state["probabilities"])


class UniformSampler(Sampler):
    """Draws pairs of functions uniformly: the paper's RandAugment, and epsilon = 1."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        first, second = torch.randint(0, K, (2, n), generator=generator, device=device)
        return Transformation.draw(first, second, generator)


class IdentitySampler(Sampler):
    """Draws no function at all: the baseline."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        identity = torch.full((n,), INDEX["Identity"], device=device)
        return Transformation.draw(identity, identity, generator)


def draw_pairs(
    probabilities: Float[Tensor, "K K"], n: int, generator: torch.Generator | None = None
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """n pairs (j, k) ~ p, by inverting the cumulative distribution: one uniform number per pair, no host involved."""
    device = generator.device if generator is not None else probabilities.device
    cumulative = probabilities.to(device).flatten().cumsum(0)
    place = torch.rand(n, generator=generator, device=device, dtype=torch.float64) * cumulative[-1]
    pair = torch.searchsorted(cumulative, place, right=True).clamp_(max=cumulative.numel() - 1)
    return pair // probabilities.shape[1], pair % probabilities.shape[1]


def _check_pairs(name: str, found: Tensor, p: Float[Tensor, "K K"]) -> None:
    if found.shape[-2:] != p.shape:
        raise ValueError(
            f"the state's {name} has shape {tuple(found.shape)}, but this sampler has {tuple(p.shape)} pairs; load the "
            "state of a sampler of the same functions"
        )
