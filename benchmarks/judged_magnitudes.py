"""How the policy of a run judges magnitudes, which the paper's sampler draws uniformly all the same.

    python benchmarks/judged_magnitudes.py RUN ... [--data DIR] [--batches 120] [--out FILE]

With the network of a run's last checkpoint, over training samples as the run draws them: for each function, in quarters
of [0, 10], the average output of the policy and the average loss, both relative to the average over all samples. Each
sample counts for both of its functions. If outputs merely followed losses, they would say no more than that hard
samples are hard.
"""

from dataclasses import dataclass

import torch
import tyro
from over_runs import Runs
from torch import Tensor

from metaaugment.lab.experiments.prediction import correlation
from metaaugment.lab.seeds import SAMPLES, derived_seed
from metaaugment.lab.training.trainer import Trainer
from metaaugment.ops import MAX_MAGNITUDE, PAPER_OPS

QUARTERS = 4


@dataclass
class Settings(Runs):
    batches: int = 120


@torch.no_grad()
def look(was: Trainer, settings: Settings) -> dict[str, object]:
    learner, samples = was.learner, was.train.since(0)
    rows: list[Tensor] = []
    for step in range(settings.batches):
        seen = learner.look(*next(samples), derived_seed(0, SAMPLES, step))
        t = seen.transformation
        quarter = (t.magnitudes * (QUARTERS / MAX_MAGNITUDE)).long().clamp(max=QUARTERS - 1)
        cells = torch.stack([t.first, t.second], 1).long() * QUARTERS + quarter
        judged = torch.stack([seen.outputs, seen.losses], 1)
        rows.append(torch.cat([cells.double(), judged.double()], 1).cpu())
    first, second, outputs, losses = torch.cat(rows).T
    cells = torch.cat([first, second]).long()
    return {
        "epoch": was.epoch,
        "samples": len(outputs),
        "correlation of outputs and losses": correlation(outputs, losses),
        "outputs": by_function(cells, outputs),
        "losses": by_function(cells, losses),
    }


def by_function(cells: Tensor, values: Tensor) -> dict[str, list[float]]:
    table = torch.zeros(2, len(PAPER_OPS) * QUARTERS, dtype=torch.float64)
    table[0].index_add_(0, cells, (values / values.mean()).repeat(2))
    table[1].index_add_(0, cells, torch.ones(len(cells), dtype=torch.float64))
    means = (table[0] / table[1]).view(-1, QUARTERS).tolist()
    return {op.name: row for op, row in zip(PAPER_OPS, means, strict=True) if op.magnitude}


if __name__ == "__main__":
    settings = tyro.cli(Settings)
    settings.each(lambda was: look(was, settings))
