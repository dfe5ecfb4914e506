"""Which samples seem to help, depending on how far ahead the validation loss is evaluated: α of Eq. 2.

    python benchmarks/look_ahead.py RUN ... [--data DIR] [--batches 8] [--out FILE]

With the network of each run's last checkpoint, the alignment of the same training samples for several α, multiples of
the learning rate at that step, and for the α that the run has learned. For each α: the mean of the alignment, its
correlation with the loss of the sample, and its means in fifths of the samples, from the lowest loss to the highest.
Means are in standard deviations of the alignment.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from torch import Tensor

from metaaugment.data.batches import Batches
from metaaugment.experiments.diagnosis import correlation
from metaaugment.experiments.place import Place
from metaaugment.experiments.run import as_it_was
from metaaugment.training.machine import machine

MULTIPLES = (0, 1, 3, 10)  # with momentum 0.9, a gradient moves w by ten steps in the end


@dataclass
class Settings:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    data: Path | None = None
    device: str | None = None
    batches: int = 8  # mini-batches that the alignment is computed for
    validation: int = 512  # validation images for each of them
    out: Path | None = None


def look(run: Path, settings: Settings) -> dict[str, object]:
    was = as_it_was(run, Place(data=settings.data, device=settings.device), Console())
    learner, train = was.learner, was.train
    # Not lagged, so that the graph of a pass is kept for several α. Only alignments are wanted: nothing is learned.
    learner.lagged, learner.part = False, train.batch
    for part in (learner.policy, learner.extractor):
        if part is not None:
            part.requires_grad_(False)
    learner.alpha.requires_grad_(True)
    validation = Batches(was.validation.split, settings.validation, 0, train.device, train.reader).since(0)
    if (rate := was.rate(learner.steps)) <= 0:
        raise SystemExit(f"{run} is finished, and its learning rate is 0; name a run that is still training")
    alphas = {f"{multiple} × the learning rate": multiple * rate for multiple in MULTIPLES}
    if was.policy_optimizer is not None and was.alpha is None:
        alphas["learned"] = learner.alpha.item()
    losses: list[Tensor] = []
    alignment: dict[str, list[Tensor]] = {name: [] for name in alphas}
    samples = train.since(0)
    for _ in range(settings.batches):
        seen, ahead = learner.observe(*next(samples)), next(validation)
        for name, alpha in alphas.items():
            learner.alpha.data.fill_(alpha)
            learner.policy_backward(seen, *ahead)
            assert seen.alignment is not None
            alignment[name].append(seen.alignment.double().cpu())
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


def main(settings: Settings) -> None:
    found = {}
    for run in settings.runs:
        name = run.name if sum(run.name == other.name for other in settings.runs) == 1 else str(run)
        found[name] = look(run, settings)
        print(name, json.dumps(found[name], indent=1, ensure_ascii=False), flush=True)
    if settings.out:
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        kept = {"machine": machine(device), "validation": settings.validation, "runs": found}
        settings.out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
