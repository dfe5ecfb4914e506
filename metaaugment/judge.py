"""What the policy makes of a mini-batch, through the task network's features or an extractor's of its own."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metaaugment.algorithm import outer_loss
from metaaugment.distributed import rank
from metaaugment.embedding import embed
from metaaugment.features import Features
from metaaugment.guard.checks import Checks, check_outputs
from metaaugment.guard.replay import undisturbed
from metaaugment.observation import Observation
from metaaugment.policy import Policy, as_policy
from metaaugment.transformation import Transformation


class Judgement(NamedTuple):
    features: Tensor
    evidence: tuple[Tensor, ...]
    outputs: Tensor  # P
    weights: Tensor  # V


@dataclass(frozen=True)
class Judge:
    """A policy and the network that it sees through."""

    module: nn.Module
    extractor: nn.Module | None  # without one, it sees through the task network
    features: Features
    dtype: torch.dtype  # of the policy
    checks: Checks

    @cached_property
    def policy(self) -> Policy:
        return as_policy(self.module)

    @property
    def modules(self) -> list[nn.Module]:
        """What outputs and weights come from: the policy, and its own extractor if it has one."""
        return [self.module] if self.extractor is None else [self.module, self.extractor]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def weigh(self, inputs: Tensor, logits: Tensor, labels: Tensor, t: Transformation) -> Judgement:
        """Features, outputs and weights of samples that the task network has just seen."""
        if self.extractor is None:
            features, evidence = self._taken(len(t)).detach(), self.policy.evidence(logits, labels)
        else:
            features, evidence = self._extracted(self.extractor, inputs, labels)
        return Judgement(features, evidence, *self._outputs(features, t, evidence))

    @torch.no_grad()
    def weigh_again(self, seen: Observation) -> Tensor:
        """The weights V of the policy as it is now, from the same draws of its layers and its extractor's, and from the
        same buffers."""
        with seen.judging.again(), undisturbed(*self.modules, buffers=seen.judges):
            features, evidence = seen.features, seen.evidence
            if self.extractor is not None:
                features, evidence = self._extracted(self.extractor, seen.inputs, seen.labels)
            return self._outputs(features, seen.transformation, evidence)[1]

    def outer_loss(self, alpha: Tensor, seen: Observation, along: Tensor) -> Tensor:
        """Eq. 3, or the policy's own objective for θ: this process's part, given the alignment and ⟨g, v⟩."""
        assert seen.alignment is not None
        part = along if rank() == 0 else 0.0  # every process has the whole of it, and their gradients are summed
        if not self.policy.has_own("objective"):
            return outer_loss(alpha, seen.weights, seen.alignment, part)
        of_alpha = outer_loss(alpha, seen.weights.detach(), seen.alignment, part)
        return of_alpha + self.policy.objective(seen.outputs, seen.alignment)

    def _outputs(self, features: Tensor, t: Transformation, evidence: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The policy's outputs P and weights V, in the policy's own precision."""
        with torch.autocast(features.device.type, enabled=False):
            embedding = features.new_empty(len(t), 0) if self.policy.blind else embed(t).to(features.dtype)
            P = self.policy(features, embedding, *evidence)
            if P.shape != (len(t),):
                raise ValueError(
                    f"the policy gives {tuple(P.shape)} for {len(t)} samples; it must give one number each"
                )
            if not self.policy.has_own("normalize"):
                self.checks.values("outputs", lambda: check_outputs(P))
            return P, self.policy.normalize(P)

    def _extracted(self, extractor: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Features and evidence by an extractor of the policy's own."""
        with self.features.watched():
            logits = extractor(inputs)
        return self._taken(len(inputs)), self.policy.evidence(logits, labels)

    def _taken(self, n: int) -> Tensor:
        """The features of the pass just watched, in the policy's precision."""
        features = self.features.take()
        if len(features) != n:
            raise ValueError(
                f"the features of {n} images have shape {list(features.shape)}; name a layer with features= whose "
                "input has one row, map or list of tokens for each image, in this order"
            )
        return features.to(self.dtype)
