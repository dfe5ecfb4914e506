"""A look at what the policy does: training samples after each epoch, augmented and weighted as in training.

The run keeps it in its checkpoint; `look.safetensors` is an excerpt for others to read. A look depends on the seed, the
epoch and the network alone, and leaves no trace: a run is the same with and without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from metaaugment.distributed import world_size
from metaaugment.lab.data.batches import Batches, once
from metaaugment.lab.seeds import derived_seed
from metaaugment.lab.training.evaluation import evaluating
from metaaugment.lab.training.processes import collected
from metaaugment.learner import Learner
from metaaugment.observation import Observation

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
SAMPLES = {"small": 4096, "large": 512}  # kept at most, of images with sides up to 64 pixels and of larger ones
EXTREMES, CONTRASTS = 16, 8  # shown at each end of the weights, and of each kind of weight that goes against the loss
THUMBNAIL = 96  # pixels of the longer side of an image that is shown, at most


class Look:
    """What the policy did lately: one mini-batch after each epoch, and many after the last epoch.

    Args:
        batches: of the training split, in an order of their own.
        classes: names of the classes, by label.
    """

    def __init__(self, batches: Batches, classes: Sequence[str]) -> None:
        self.batches, self.classes = batches, list(classes)
        self.seen: dict[str, Any] = {}

    def take(self, learner: Learner, epoch: int, validation: Batches | None = None) -> dict[str, Any]:
        """Look after an epoch, and return what the log keeps of it.

        With validation images, which are given after the last epoch, look at many samples, and for each one shown find
        the validation image of another class that is most like it."""
        count = 1 if validation is None else self._many(learner.copies)
        looks = self._looks(learner, epoch, count)
        samples = {name: torch.cat([look[name] for look in looks]) for name in looks[0]}
        if not samples["weight"].isfinite().all():
            return {"weights": None}
        weights = samples["weight"][: learner.copies * self.batches.batch]  # of a mini-batch
        quantiles = torch.quantile(weights, torch.tensor(QUANTILES, dtype=weights.dtype))
        samples = {name: value[-self._limit() :] for name, value in samples.items()}
        images, originals = samples.pop("images"), samples.pop("originals")
        rows = chosen(samples["weight"], samples["loss"])
        images, originals = images[rows], originals[rows]
        before = {} if not self.seen else self.seen["samples"]
        kept = {
            name: torch.cat([before[name], new])[-self._limit() :] if before else new for name, new in samples.items()
        }
        shift = len(kept["weight"]) - len(samples["weight"])
        self.seen = {
            "epoch": epoch,
            "space": learner.space.name,
            "classes": self.classes,
            "samples": kept,
            "shown": {"sample": rows.cpu() + shift, "images": _small(images), "originals": _small(originals)},
        }
        if validation is not None:
            self.seen["negatives"] = negatives(learner, images, samples["label"][rows.cpu()], validation)
        return {"weights": [round(value, 5) for value in quantiles.tolist()]}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = dict(state)

    def _looks(self, learner: Learner, epoch: int, count: int) -> list[dict[str, Tensor]]:
        """Mini-batches of all processes as the learner sees them, with the images after and before augmentation."""
        steps, copies = self.batches.steps, learner.copies
        start = epoch * steps
        stream = self.batches.since(start)
        looks = []
        for step in range(start, start + count):
            images, labels = next(stream)
            place = self.batches.places(step)
            look = learner.look(images, labels, derived_seed(self.batches.seed, epoch, step))
            seen = _samples(look, epoch, place.repeat_interleave(copies, 0))
            seen |= {"images": look.images, "originals": images.repeat_interleave(copies, 0)}
            looks.append({name: collected(value) for name, value in seen.items()})
        return looks

    def _limit(self) -> int:
        return SAMPLES["small" if max(self.batches.split.sides) <= 64 else "large"]

    def _many(self, copies: int) -> int:
        """The number of mini-batches that fill what is kept, but no more than a quarter of an epoch."""
        return max(1, min(self._limit() // (self.batches.batch * copies), self.batches.steps // 4))


def chosen(weight: Float[Tensor, " n"], loss: Float[Tensor, " n"]) -> Int64[Tensor, " m"]:
    """Which samples to show: the highest weights, the lowest, and those whose weight goes against their loss.

    The latter are the highest losses among the lowest tenth of the weights, and the lowest among the highest tenth. Of
    few samples, no more than half count as high, and half as low.
    """
    order = weight.argsort(stable=True)
    extremes, contrasts = (max(1, min(number, len(order) // 2)) for number in (EXTREMES, CONTRASTS))
    tenth = max(contrasts, len(order) // 10)
    low, high = order[:tenth], order[-tenth:]
    hard = low[loss[low].argsort(descending=True, stable=True)[:contrasts]]
    easy = high[loss[high].argsort(stable=True)[:contrasts]]
    return torch.cat([order.flip(0)[:extremes], order[:extremes], hard, easy])


@torch.no_grad()
def negatives(learner: Learner, images: Tensor, labels: Tensor, validation: Batches) -> dict[str, Tensor]:
    """For each image the validation image of another class whose feature is most like its own, by the cosine."""
    own = _features(learner, images)
    best = torch.full((len(own),), -torch.inf, device=own.device)
    pictures, names = images.clone(), labels.to(own.device)
    wrong = names.clone()
    for others, theirs in once(validation.split, validation.device, validation.reader):
        likeness = own @ _features(learner, others).T
        likeness[names[:, None] == theirs[None, :]] = -torch.inf
        value, place = likeness.max(1)
        better = value > best
        best, wrong = torch.where(better, value, best), torch.where(better, theirs[place], wrong)
        pictures[better] = others[place[better]]
    return {"images": _small(pictures), "label": wrong.cpu(), "similarity": best.float().cpu()}


def _features(learner: Learner, images: Tensor) -> Float[Tensor, "n d"]:
    """Features of length one, in evaluation mode."""
    network = learner.network if learner.extractor is None else learner.extractor
    with evaluating(network), learner.features.watched():
        network(learner.prepare(images))
    return F.normalize(learner.features.take().float())


def _samples(look: Observation, epoch: int, place: Tensor) -> dict[str, Tensor]:
    """What is kept of each sample; weights are scaled to a mean of 1."""
    t, n = look.transformation, len(look.labels)
    values = {
        "epoch": torch.full((n,), epoch),
        "place": place,
        "label": look.labels,
        "first": t.first,
        "second": t.second,
        "magnitudes": t.magnitudes,
        "signs": t.signs,
        "weight": n * world_size() * look.weights.float(),
        "output": look.outputs.float(),
        "loss": look.losses.float(),
    }
    return {name: value.cpu() for name, value in values.items()}


def _small(images: Tensor) -> Tensor:
    """Images on the CPU, no larger than they are shown."""
    side = max(images.shape[2:])
    if side > THUMBNAIL:
        images = F.interpolate(images.float(), scale_factor=THUMBNAIL / side, mode="area").round().to(torch.uint8)
    return images.cpu()
