"""A fold of Fast AutoAugment: a network, and the images held out of its training, on which it judges policies."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor, nn

from metaaugment.lab.baselines.found import SubPolicies, SubPolicySampler
from metaaugment.lab.data import DataSet
from metaaugment.lab.data.augment import Augmentation
from metaaugment.lab.data.batches import Reader, once
from metaaugment.lab.data.splits import Split, apportion, split
from metaaugment.lab.training.evaluation import evaluating
from metaaugment.transformation import apply


def divide(labels: Int64[Tensor, " n"], held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of D_M and D_A, which are disjoint and cover all images, each with the classes in proportion."""
    sizes = labels.bincount().tolist()
    judged, trained = split(labels, seed % 2**32, apportion(round(held_out * len(labels)), sizes))
    if len(judged) == 0:
        raise ValueError(f"--held-out is {held_out:g}, which holds out none of {len(labels)} images; choose more")
    return trained, judged


@dataclass(frozen=True)
class Fold:
    """A network and the images that it judges policies by.

    `data`: its training images are D_M, its validation images D_A. `precision` makes the context that passes run in.
    """

    number: int
    network: nn.Module
    data: DataSet
    held_out: Split  # D_A again, on the device
    device: torch.device
    prepare: Augmentation
    precision: Callable[[], AbstractContextManager[object]]
    reader: Reader

    @torch.no_grad()
    def objective(self, policy: SubPolicies | None = None, seed: int = 0, draws: int = 1) -> float:
        """−L(θ | T(D_A)), to be maximized; the loss of an image is the least of its draws.

        Without a policy, images are plain.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with evaluating(self.network), self.precision():
            for images, labels in once(self.held_out, self.device, self.reader):
                copies = [images] if policy is None else self._augmented(images, policy, draws, generator)
                outputs = (self.network(self.prepare(copy)).float() for copy in copies)
                losses = [F.cross_entropy(output, labels, reduction="none") for output in outputs]
                total += torch.stack(losses).amin(0).double().sum()
                count += len(labels)
        return -float(total) / max(count, 1)

    def _augmented(
        self, images: Tensor, policy: SubPolicies, draws: int, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """T(D_A), drawn `draws` times, each image under its own transformation."""
        sampler = SubPolicySampler(policy)
        for _ in range(draws):
            yield apply(images, sampler.sample(len(images), generator), policy.space, self.data.fill)
