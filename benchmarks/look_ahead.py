"""Which samples seem to help, depending on how far ahead the validation loss is evaluated: α of Eq. 2.

    python benchmarks/look_ahead.py RUN ... [--data DIR] [--batches 8] [--out FILE]

With the network of each run's last checkpoint, the alignment of the same training samples for several α, multiples of
the learning rate at that step, and for the α that the run has learned. For each α: the mean of the alignment, its
correlation with the loss of the sample, and its means in fifths of the samples, from the lowest loss to the highest.
Means are in standard deviations of the alignment.
"""

from dataclasses import dataclass

import torch
import tyro
from over_runs import Runs
from torch import Tensor

from metaaugment.lab.data.batches import Batches
from metaaugment.lab.experiments.prediction import correlation
from metaaugment.lab.training.trainer import Trainer

MULTIPLES = (0, 1, 3, 10)  # with momentum 0.9, a gradient moves w by ten steps in the end


@dataclass
class Settings(Runs):
    batches: int = 8  # mini-batches that the alignment is computed for
    validation: int = 512  # validation images for each of them


def look(was: Trainer, settings: Settings) -> dict[str, object]:
    learner, train = was.learner, was.train
    learner.part = train.batch
    split = was.validation.split
    validation = Batches(split, settings.validation, 0, train.device, train.reader, middles=True).since(0)
    if (rate := was.rate(learner.steps)) <= 0:
        raise SystemExit("the run is finished, and its learning rate is 0; name one that is still training")
    alphas = {f"{multiple} × the learning rate": multiple * rate for multiple in MULTIPLES}
    if was.policy_optimizer is not None and was.alpha is None:
        alphas["learned"] = learner.alpha.item()
    losses: list[Tensor] = []
    alignment: dict[str, list[Tensor]] = {name: [] for name in alphas}
    samples = train.since(0)
    for _ in range(settings.batches):
        seen, ahead = learner.observe(*next(samples)), next(validation)
        _, g = learner.inner_gradient(seen, retain_graph=False)
        for name, alpha in alphas.items():
            learner.alpha.data.fill_(alpha)
            v, _ = learner.gradient_ahead(seen, g, *ahead)
            alignment[name].append(learner.alignment(seen, v).double().cpu())
        losses.append(seen.losses.detach().double().cpu())
    loss = torch.cat(losses)
    return {
        "epoch": was.epoch,
        "learning rate": rate,
        "samples": len(loss),
        "look ahead": {
            name: {"alpha": alpha, **summary(torch.cat(alignment[name]), loss)} for name, alpha in alphas.items()
        },
    }


def summary(s: Tensor, loss: Tensor) -> dict[str, object]:
    s = s / s.std()
    fifths = [s[part].mean().item() for part in loss.argsort().chunk(5)]
    return {"mean": s.mean().item(), "correlation with the loss": correlation(s, loss), "fifths": fifths}


if __name__ == "__main__":
    settings = tyro.cli(Settings)
    settings.each(lambda was: look(was, settings), validation=settings.validation)
