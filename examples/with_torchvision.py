"""A learned policy in torchvision's pipeline: the half of it that looks at no image, in the workers of a loader.

    python examples/with_torchvision.py
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import metaaugment as ma
from metaaugment.data import Images
from metaaugment.integrations.torchvision import PolicyTransform

SIZE = 16


def digits() -> tuple[Images, Images, Images]:
    """For training, validation and test."""
    data = ma.dataset("digits", size=SIZE)
    assert isinstance(data.train, Images)
    assert isinstance(data.val, Images)
    assert isinstance(data.test, Images)
    return data.train, data.val, data.test


def learn(train: Images, validation: Images, steps: int = 20) -> ma.LearnedPolicy:
    """A policy of a very short joint run; `metaaugment train` and `metaaugment export` make a better one."""
    network = ma.network("small-cnn", 10)
    learner = ma.Learner(network, ma.TransformationSampler(), ma.PolicyNetwork(128), lagged=True)
    task = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    policy = torch.optim.Adam(learner.policy_parameters(), 1e-3)
    held_out = itertools.cycle(DataLoader(validation, 100))
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, 64, shuffle=True)))
    for images, labels in itertools.islice(batches, steps):
        learner.step(images, labels, task, policy, held_out)
    learner.sampler.update()
    # The learner only divided by 255: mean 0 and deviation 1.
    return ma.LearnedPolicy.from_learner(learner, "small-cnn", 10, 3, "metaaugment", (0, 0, 0), (1, 1, 1), 0, SIZE)


class Transformed(Dataset[tuple[Tensor, int]]):
    """What torchvision's data sets do with their `transform`."""

    def __init__(self, images: Images, transform: torch.nn.Module) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, label = self.images[i]
        return self.transform(image), label


def main() -> None:
    from torchvision.transforms import v2  # type: ignore[import-not-found]

    torch.set_num_threads(1)  # passes are so small that more threads only wait for each other
    torch.manual_seed(0)
    train, validation, test = digits()
    policy = learn(train, validation)

    transform = v2.Compose([v2.ToPILImage(), PolicyTransform(policy), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    loader = DataLoader(Transformed(train, transform), 64, shuffle=True, num_workers=1)
    network = ma.network("small-cnn", 10)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for epoch in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss of the last batch {loss:.3f}", flush=True)
    network.eval()
    with torch.no_grad():
        correct = network(test.images / 255).argmax(1) == test.labels
    print(f"test accuracy {correct.float().mean():.1%}")


if __name__ == "__main__":
    main()
