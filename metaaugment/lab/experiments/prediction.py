"""How well the alignment of training samples can be predicted from what a policy may see of them."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from metaaugment.guard.replay import seeded
from metaaugment.lab.experiments.alignment import Samples
from metaaugment.ops import OPS

FIT, STOP = 0.6, 0.2  # shares of the samples to fit a prediction to and to stop fitting by; the rest judge it
HIDDEN, BATCH, RATE, DECAY = 100, 128, 3e-3, 1e-4  # of the network that predicts
LEAST, MOST, FITTED = 8, 30, 150_000  # fewest and most passes over the samples, and about how many samples in all


class Predictor(nn.Module):
    """Each input through a layer and ReLU, then all to one number: what a policy network of this form can express."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                name: nn.Linear(value.shape[1], HIDDEN)
                if value.is_floating_point()
                else nn.Embedding(int(value.max()) + 1, HIDDEN)
                for name, value in inputs.items()
            }
        )
        self.output = nn.Linear(HIDDEN * len(inputs), 1)

    def forward(self, inputs: dict[str, Tensor]) -> Float[Tensor, " n"]:
        parts = [layer(inputs[name]).relu() for name, layer in self.layers.items()]
        return self.output(torch.cat(parts, dim=1)).squeeze(1)


def predictability(samples: Samples, names: Sequence[str], one: Tensor, other: Tensor, seed: int) -> float:
    """How well s can be predicted from these inputs: the correlation of a prediction with s.

    The prediction is fitted to s by one half of the validation images, and compared with s by the other half on samples
    of images that it was not fitted to."""
    generator = torch.Generator().manual_seed(seed)
    fit, stop, judge = by_image(samples.place, generator)
    s = standardized(one, fit).float()
    if tuple(names) == ("pair",):
        return correlation(pair_means(samples.known["pair"], s, fit)[judge], other[judge])
    inputs = {name: standardized(samples.known[name], fit) for name in names}
    with seeded(torch.device("cpu"), seed):
        predictor = Predictor(inputs)
    optimizer = torch.optim.Adam(predictor.parameters(), RATE, weight_decay=DECAY)
    best, found = -math.inf, 0.0
    for _ in range(max(LEAST, min(MOST, FITTED // len(fit)))):
        for part in fit[torch.randperm(len(fit), generator=generator)].split(BATCH):
            error = (predictor({name: value[part] for name, value in inputs.items()}) - s[part]).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
        with torch.no_grad():
            said = predictor(inputs)
        if (score := correlation(said[stop], s[stop])) > best:
            best, found = score, correlation(said[judge], other[judge])
    return found


def by_image(place: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Samples to fit to, to stop by and to judge by; all samples of an image are in the same part."""
    images, which = place.unique(return_inverse=True)
    turn = torch.randperm(len(images), generator=generator)[which] / len(images)
    parts = (turn < FIT, (turn >= FIT) & (turn < FIT + STOP), turn >= FIT + STOP)
    fit, stop, judge = (part.nonzero().squeeze(1) for part in parts)
    return fit, stop, judge


def pair_means(pair: Tensor, s: Tensor, fit: Tensor) -> Tensor:
    """For each sample the mean s of its pair over the fitted samples; for pairs not among these, the mean of all."""
    pairs = len(OPS) ** 2
    count = torch.zeros(pairs).index_add_(0, pair[fit], torch.ones(len(fit)))
    total = torch.zeros(pairs).index_add_(0, pair[fit], s[fit])
    return torch.where(count > 0, total / count.clamp(min=1), s[fit].mean())[pair]


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; 0 if one of the two does not vary."""
    a, b = (value.double() - value.double().mean() for value in (a, b))
    scale = a.norm() * b.norm()
    return float((a * b).sum() / scale) if scale > 0 else 0.0


def standardized(values: Tensor, fit: Tensor) -> Tensor:
    """Standardised by mean and deviation of the fitted samples; integers are names and stay as they are."""
    if not values.is_floating_point():
        return values
    deviation = values[fit].std(0)
    return (values - values[fit].mean(0)) / torch.where(deviation > 0, deviation, 1)
