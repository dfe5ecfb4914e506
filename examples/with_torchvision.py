"""A learned policy in torchvision's pipeline: the half of it that does not look at the image, in a loader's workers.

    python examples/with_torchvision.py

First a policy is learned, in too short a run to be of use; `metaaugment train` and `metaaugment export` make good ones.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import metaaugment as ma
from metaaugment.integrations.torchvision import PolicyTransform

SIZE = 16


def digits() -> list[TensorDataset]:
    """Training, validation and test splits: uint8 images and labels."""
    data: Any = ma.dataset("digits", size=SIZE)
    return [TensorDataset(split.images, split.labels) for split in (data.train, data.val, data.test)]


def learn(train: TensorDataset, validation: TensorDataset, steps: int = 20) -> ma.LearnedPolicy:
    """A very short joint training."""
    network = ma.network("small-cnn", 10)
    learner = ma.Learner(network, ma.TransformationSampler(), ma.PolicyNetwork(128), lagged=True)
    task = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    policy = torch.optim.Adam(learner.policy_parameters(), 1e-3)
    held_out = itertools.cycle(DataLoader(validation, 100))
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, 64, shuffle=True)))
    for images, labels in itertools.islice(batches, steps):
        learner.step(images, labels, task, policy, held_out)
    learner.sampler.update()
    return export(learner)


def export(learner: ma.Learner) -> ma.LearnedPolicy:
    """The policy of a learner whose `prepare` only divides by 255: mean 0 and deviation 1."""
    return ma.LearnedPolicy.from_learner(learner, "small-cnn", 10, (0, 0, 0), (1, 1, 1), SIZE)


class Transformed(Dataset[tuple[Tensor, Tensor]]):
    """What torchvision's data sets do with their `transform`."""

    def __init__(self, data: TensorDataset, transform: torch.nn.Module) -> None:
        self.data, self.transform = data, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[i]
        return self.transform(image), label


def main() -> None:
    from torchvision.transforms import v2  # type: ignore[import-not-found]

    torch.set_num_threads(1)  # passes are so small that more threads only wait for each other
    torch.manual_seed(0)
    train, validation, test = digits()
    policy = learn(train, validation)

    transform = v2.Compose([PolicyTransform(policy), v2.ToDtype(torch.float32, scale=True)])
    loader = DataLoader(Transformed(train, transform), 64, shuffle=True, num_workers=1)
    network = ma.network("small-cnn", 10)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for epoch in range(3):
        losses = []
        for images, labels in loader:
            loss = F.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)
    network.eval()
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (network(images / 255).argmax(1) == labels).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
