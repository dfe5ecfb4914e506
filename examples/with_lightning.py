"""Lightning twice: a policy learned while a network trains, then another network trained under it.

    python examples/with_lightning.py

Both for a few epochs only, which is too short for a policy to be of use.
"""

import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
from torch import Tensor
from torch.utils.data import DataLoader
from with_torchvision import digits, export

import metaaugment as ma
from metaaugment.integrations.lightning import JointTraining, Transfer


class Classifier(LightningModule):
    """What the two have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ma.network("small-cnn", 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images / 255).argmax(1) == labels).float().mean())

    def task_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), 0.05, momentum=0.9)


class Joint(JointTraining, Classifier):
    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        self.learner = ma.Learner(self.network, ma.TransformationSampler(), ma.PolicyNetwork(128), lagged=True)
        return self.task_optimizer(), torch.optim.Adam(self.learner.policy_parameters(), 1e-3)


class Transferred(Transfer, Classifier):
    def __init__(self, policy: ma.LearnedPolicy) -> None:
        super().__init__()
        self.policy = policy

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task_optimizer()


def trainer(epochs: int) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(max_epochs=epochs, enable_checkpointing=False, **quiet)  # type: ignore[arg-type]


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # passes are so small that more threads only wait for each other
    torch.manual_seed(0)
    train, validation, test = (DataLoader(data, 64, shuffle=i == 0) for i, data in enumerate(digits()))

    joint = Joint()
    trainer(1).fit(joint, train, validation)
    print(f"joint training: alpha {joint.learner.alpha.item():.3f} after {joint.learner.steps} steps", flush=True)

    transferred, second = Transferred(export(joint.learner)), trainer(3)
    second.fit(transferred, train, validation)
    (measured,) = second.validate(transferred, test, verbose=False)
    print(f"transfer: test accuracy {measured['accuracy']:.1%}")


if __name__ == "__main__":
    main()
