"""Joint training, and training under a learned policy, as mixins for a LightningModule.

Nothing is imported from Lightning, so they fit `lightning` and `pytorch_lightning` alike. Strategies that copy the
whole network to each process (DDP) and those for one device work; those that shard it do not.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from metaaugment.distributed import world_size
from metaaugment.guard.checks import Batch
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learner import Learner

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as Module  # type: ignore[import-not-found]
else:
    Module = object

KEY = "metaaugment"  # of the learner's state in a checkpoint


class JointTraining(Module):
    """Makes the training step of a LightningModule one iteration of Algorithm 1.

        class Classifier(JointTraining, LightningModule):
            def __init__(self):
                super().__init__()
                self.network = ma.network("wrn-28-10", 10)

            def configure_optimizers(self):  # the learner is made here, where the network is on its device
                self.learner = ma.Learner(self.network, ma.TransformationSampler(), ma.PolicyNetwork(640))
                task = torch.optim.SGD(self.network.parameters(), 0.1, momentum=0.9)
                return task, torch.optim.Adam(self.learner.policy_parameters(), 1e-3)

    Batches are uint8 images and labels; the learner's `prepare` normalises them. p is updated at the end of an epoch,
    learning rate schedulers are stepped, and the learner's state is part of the checkpoint. The trainer counts the
    steps of the task network only. The policy learns from the trainer's validation batches, over and over, so they are
    no longer held out. Define `policy_dataloader` to give it others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self._learner: Learner | None = None
        self._restored: dict[str, Any] | None = None
        self._policy_batches: Iterator[Batch] = iter(())

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise AttributeError("learner")  # as for any attribute that was not set
        return self._learner

    @learner.setter
    def learner(self, learner: Learner) -> None:
        """Each fit() makes a new learner, which continues from the one before, as the network does."""
        if self._learner is not None and self._restored is None:
            self._restored = self._learner.state_dict()
        self._learner = learner

    def policy_dataloader(self) -> Iterable[Batch]:
        """The batches that the policy learns from; by default those of `val_dataloader`."""
        loaders = self.trainer.val_dataloaders
        if not loaders:
            raise ValueError(
                "the policy learns from validation batches, but the trainer has none; give fit() a validation loader "
                "and the module a validation_step, or define policy_dataloader()"
            )
        return loaders[0] if isinstance(loaders, list | tuple) else loaders

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        learner, (task, policy) = self.learner, self.optimizers()  # type: ignore[misc]
        seen = learner.observe(*checked(batch))
        if learner.due:
            learner.policy_backward(seen, *checked(next(self._policy_batches)))
            # Without Lightning's wrapper, which would divide by the loss scale of float16 and count an extra step.
            policy.optimizer.step()
            policy.optimizer.zero_grad()
        loss = learner.weighted_loss(seen) * world_size()  # a sum over the processes, which Lightning averages
        self.manual_backward(loss)
        task.step()
        task.zero_grad()
        self._schedule("step")
        if self.trainer.is_last_batch:  # before validation, after which Lightning writes its checkpoint
            learner.sampler.update()
            self._schedule("epoch")
        self.log_dict({"train_loss": loss.detach(), "alpha": learner.alpha.detach()})

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._restored is not None:
            self.learner.load_state_dict(self._restored)
            self._restored = None
        optimizers = self.optimizers()
        if not isinstance(optimizers, list) or len(optimizers) != 2:
            raise ValueError(
                "configure_optimizers must return two optimizers: the task network's, and then one for "
                "learner.policy_parameters()"
            )
        self.learner.check_optimizers(*(one.optimizer for one in optimizers))
        # A resumed run continues with the batch that it had come to.
        self._policy_batches = self._endless(self.learner.steps // self.learner.every)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._restored is not None:  # loaded, but not used yet
            checkpoint[KEY] = self._restored
        elif self._learner is not None:  # there is none before the first fit()
            checkpoint[KEY] = self._learner.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._restored = checkpoint.get(KEY)  # there is no learner yet

    def _endless(self, done: int) -> Iterator[Batch]:
        """The policy's batches, over and over, without the first `done`."""
        loader = self.policy_dataloader()
        try:
            start = done % len(loader)  # type: ignore[arg-type]
        except (TypeError, ZeroDivisionError):  # of unknown length, or empty
            start = 0
        while True:
            batch = None
            for batch in itertools.islice(loader, start, None):
                yield self.trainer.strategy.batch_to_device(batch, self.device)
            if batch is None and start == 0:
                raise ValueError("the policy learns from validation batches, but their loader is empty")
            start = 0

    def _schedule(self, interval: str) -> None:
        """Step the learning rate schedulers, which manual optimization leaves to the module."""
        done = self.learner.steps if interval == "step" else self.trainer.current_epoch + 1
        for config in self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                raise ValueError(
                    "ReduceLROnPlateau needs a validation metric, which comes later; leave it out of "
                    "configure_optimizers and step it in on_validation_epoch_end"
                )
            if config.interval == interval and done % config.frequency == 0:
                config.scheduler.step()  # type: ignore[call-arg]


class Transfer(Module):
    """Makes a LightningModule train under a learned policy.

        class Classifier(Transfer, LightningModule):
            def __init__(self, policy):
                super().__init__()
                self.policy = policy
                self.network = ma.network("shake-shake-26-2x96d", 10)

            def forward(self, images): ...
            def configure_optimizers(self): ...

    Batches are uint8 images and labels; define `prepare` and `losses` to replace the defaults.
    """

    policy: LearnedPolicy

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = checked(batch)
        images, weights = self.policy.augment(images, labels)
        losses = self.losses(self(self.prepare(images)), labels)
        loss = (weights * losses).sum() * world_size()  # a sum over the processes, which Lightning averages
        self.log("train_loss", loss.detach())
        return loss

    def prepare(self, images: Tensor) -> Tensor:
        """From uint8 to what the network takes."""
        return images / 255

    def losses(self, logits: Tensor, labels: Tensor) -> Float[Tensor, " n"]:
        """One loss per sample."""
        return F.cross_entropy(logits.float(), labels, reduction="none")

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.policy.to(self.device)


def checked(batch: Batch) -> Batch:
    images, labels = batch
    if images.dtype != torch.uint8:
        raise ValueError(
            f"the images of a batch are {images.dtype}; augmentation needs uint8: leave the normalisation to the "
            "module's or the learner's prepare"
        )
    return images, labels
