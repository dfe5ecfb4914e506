"""Adversarial AutoAugment: policies that make training harder, found while the network trains."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from metaaugment.distributed import add_up
from metaaugment.lab.baselines.controller import FUNCTIONS, LEVELS, MAX_LEVEL, SUB_POLICIES, Controller, Reinforce
from metaaugment.lab.seeds import ADVERSARY, derived_seed
from metaaugment.ops import INDEX, MAX_MAGNITUDE
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, device_of


class AdversarialSampler(Sampler):
    """Augments each copy of an image by a policy of its own, and has a controller look for policies of higher loss.

    A policy is five sub-policies of two functions with a level each; every sample draws one of them, and both of its
    functions are applied. Sample i belongs to policy i % copies, as the learner repeats images `copies` times each.
    `update` is called once per epoch: the mean loss under each policy, normalized over the policies, is the reward of a
    REINFORCE step, and new policies are drawn. All processes need the same seed, and then have the same policies.
    """

    def __init__(self, copies: int = 8, seed: int = 0) -> None:
        if copies < 2:
            raise ValueError(f"copies is {copies}; policies are compared with each other, so there must be at least 2")
        self.copies = copies
        self.generator = torch.Generator().manual_seed(derived_seed(seed, ADVERSARY))
        self.controller = Controller((len(FUNCTIONS), LEVELS), 2 * SUB_POLICIES, self.generator)
        self.reinforce = Reinforce(self.controller)
        self.decisions = self.controller.sample(copies, self.generator)
        self.functions, self.magnitudes = self._policies()  # [copies, sub-policies, 2], on the device of the draws
        # Sum and number of the losses under each policy since the last call of update().
        self.losses = torch.zeros(2, copies, dtype=torch.float64)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Transformation:
        device = device_of(generator)
        self.functions, self.magnitudes = self.functions.to(device), self.magnitudes.to(device)
        policy = torch.arange(n, device=device) % self.copies
        sub_policy = torch.randint(0, SUB_POLICIES, (n,), generator=generator, device=device)
        functions, magnitudes = self.functions[policy, sub_policy], self.magnitudes[policy, sub_policy]
        return Transformation.draw(functions[:, 0], functions[:, 1], generator, magnitudes)

    def record(self, transformation: Transformation, outputs: Tensor, losses: Tensor | None = None) -> None:
        """Add up the losses of a mini-batch by policy; those that are not finite are left out."""
        if losses is None:
            raise ValueError("the losses that the policies are judged by are missing; pass them to record()")
        self.losses = self.losses.to(losses.device)
        finite = losses.isfinite()
        found = torch.stack([torch.where(finite, losses.double(), 0.0), finite.double()])
        # Summed over rows of `copies`: in a fixed order, which index_add_ does not have on a GPU.
        self.losses += F.pad(found, (0, -len(losses) % self.copies)).view(2, -1, self.copies).sum(1)

    def update(self) -> None:
        """Step the controller towards higher losses, summed over processes, and draw policies for the next epoch."""
        add_up([self.losses])
        self.reinforce.step(self.decisions, rewards(*self.losses.cpu()))
        self.decisions = self.controller.sample(self.copies, self.generator)
        # In place: a captured step reads and writes this very memory.
        self.losses.zero_()
        self._refresh()

    @property
    def tallies(self) -> list[Tensor]:
        """What each process counts for itself, until `update` adds it up."""
        return [self.losses]

    @property
    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """For the log: the controller's entropy, 1 where all policies are equally likely, 0 where it draws but one."""
        entropy = self.controller.entropy(self.decisions).mean()
        return {"controller_entropy": float(entropy) / self.controller.most_entropy}

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.reinforce.state_dict(),
            "generator": self.generator.get_state(),
            "decisions": self.decisions,
            "losses": self.losses.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies into the memory in use, which a captured step may read and write."""
        if state["decisions"].shape != self.decisions.shape:
            raise ValueError(
                f"the state has {len(state['decisions'])} policies, but this sampler has {self.copies} copies; build "
                f"it with copies={len(state['decisions'])}"
            )
        self.reinforce.load_state_dict(state)
        self.generator.set_state(state["generator"].cpu())
        self.decisions = state["decisions"].cpu().clone()
        self.losses.copy_(state["losses"])
        self._refresh()

    def _refresh(self) -> None:
        functions, magnitudes = self._policies()
        self.functions.copy_(functions)
        self.magnitudes.copy_(magnitudes)

    def _policies(self) -> tuple[Tensor, Tensor]:
        """Indices and magnitudes of the functions decided on."""
        functions, levels = self.decisions.view(self.copies, SUB_POLICIES, 2, 2).unbind(-1)
        indices = torch.tensor([INDEX[name] for name in FUNCTIONS])
        return indices[functions], levels.double() * MAX_MAGNITUDE / MAX_LEVEL


def rewards(sums: Float[Tensor, " copies"], counts: Float[Tensor, " copies"]) -> Float[Tensor, " copies"]:
    """Mean losses, normalized to zero mean and unit variance over the policies; 0 for a policy without losses."""
    seen = counts > 0
    means = sums[seen] / counts[seen]
    spread = means.std(correction=0) if seen.any() else 0.0
    found = torch.zeros_like(sums)
    if spread > 0:
        found[seen] = (means - means.mean()) / spread
    return found
