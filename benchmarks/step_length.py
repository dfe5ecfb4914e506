"""How far should the route `difference` move w? Its alignments against float64's, in the course of training.

    python benchmarks/step_length.py CIFAR-10/data_batch_1.bin [--network wrn-40-2] [--steps 2000] [--out FILE]

Trains a network with the default learner on 9,000 images, and at the start, midway and at the end computes the
alignment of several mini-batches by differences of several kinds and lengths, in float32, in tf32 (on a
GPU) and under bf16 autocast, against forward mode in float64.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.alignment import Pass, along_logits, difference, forward, move_length, step_length
from metaaugment.guard.gradients import norm
from metaaugment.guard.parameters import moved
from metaaugment.lab.training.machine import commit, machine

LENGTHS = (1e-5, 1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 5e-2)
PRECISIONS = ("float32", "tf32", "bf16") if torch.cuda.is_available() else ("float32", "bf16")


@dataclass
class Settings:
    data: tyro.conf.Positional[Path]
    network: str = "wrn-40-2"
    steps: int = 2000
    batch: int = 128
    moments: int = 4  # mini-batches that the alignment is computed for at each stage
    out: Path | None = None


def one_sided(training: Pass, v: Sequence[Tensor], relative: float) -> Tensor:
    """The one-sided difference of the losses."""
    ahead, h = moved_logits(training, v, relative)
    return (training.losses(ahead) - training.losses(training.logits.detach())) / h


def central(training: Pass, v: Sequence[Tensor], relative: float) -> Tensor:
    """The central difference of the losses."""
    ahead, h = moved_logits(training, v, relative)
    behind, _ = moved_logits(training, v, -relative)
    return (training.losses(ahead) - training.losses(behind)) / (2 * h)


def of_logits(training: Pass, v: Sequence[Tensor], relative: float) -> Tensor:
    """The one-sided difference of the logits only."""
    ahead, h = moved_logits(training, v, relative)
    return along_logits(training, (ahead - training.logits.detach()) / h)


def central_of_logits(training: Pass, v: Sequence[Tensor], relative: float) -> Tensor:
    ahead, h = moved_logits(training, v, relative)
    behind, _ = moved_logits(training, v, -relative)
    return along_logits(training, (ahead - behind) / (2 * h))


def moved_logits(training: Pass, v: Sequence[Tensor], relative: float) -> tuple[Tensor, Tensor]:
    parameters = list(training.w)
    h = relative * step_length(training, v) / move_length(training.precision)
    with torch.no_grad(), moved(parameters, v, h):
        return training.again(), h


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def prepare(images: Tensor) -> Tensor:
    """Centered and scaled, as networks are trained in practice."""
    return (images.float() - 122.0) / 62.0


def training_pass(learner: ma.Learner, batch: Batch, precision: str) -> tuple[Pass, Sequence[Tensor]]:
    """What a route is given for one mini-batch, with the same draws each time."""
    kept: list[tuple[Pass, Sequence[Tensor]]] = []

    def keep(training: Pass, v: Sequence[Tensor]) -> Tensor:
        kept.append((training, v))
        return forward(training, v)

    learner.route, learner.generator = keep, torch.Generator().manual_seed(1)
    learner.prepare = lambda images: prepare(images).to(learner.alpha.dtype)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    images, labels, val_images, val_labels = batch
    with torch.autocast(learner.device.type, torch.bfloat16, enabled=precision == "bf16"):
        seen = learner.observe(images, labels)
    learner.policy_backward(seen, val_images, val_labels)
    return kept[0]


def agreement(network: nn.Module, policy: nn.Module, batches: list[Batch], alpha: float) -> dict[str, dict[str, float]]:
    """Each route against forward mode in float64 at the same w along the same v."""
    exact_network, exact_policy = copy.deepcopy(network).double(), copy.deepcopy(policy).double()
    oracle = ma.Learner(exact_network, ma.UniformSampler(), exact_policy, alpha=alpha)
    learner = ma.Learner(network, ma.UniformSampler(), policy, alpha=alpha)
    kinds = (one_sided, central, of_logits, central_of_logits)
    routes = {f"{kind.__name__} {r:g}": partial(kind, relative=r) for kind in kinds for r in LENGTHS}
    routes |= {"the route difference": difference, "the route forward": forward}
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch in batches:
        exact_pass, _ = training_pass(oracle, batch, "float64")
        for precision in PRECISIONS:
            training, v = training_pass(learner, batch, precision)
            exact = forward(exact_pass, [value.double() for value in v])
            for name, route in routes.items():
                pairs.setdefault(f"{precision} {name}", []).append((route(training, v).double(), exact))
    return {
        name: {
            "lowest correlation": min(torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in both),
            "mean error": float(np.mean([((ours - s).norm() / s.norm()).item() for ours, s in both])),
        }
        for name, both in pairs.items()
    }


def main(settings: Settings) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = torch.from_numpy(np.fromfile(settings.data, np.uint8).reshape(-1, 3073)).to(device)
    labels, images = records[:, 0].long(), records[:, 1:].view(-1, 3, 32, 32)

    def pick(low: int, high: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(low, high, (settings.batch,), device=device)
        return images[chosen], labels[chosen]

    net = ma.network(settings.network, 10).to(device)
    head = net.get_submodule("output")
    assert isinstance(head, nn.Linear)
    policy = ma.PolicyNetwork(head.in_features).to(device)
    learner = ma.Learner(net, ma.TransformationSampler(), policy, lagged=True, every=4, prepare=prepare)
    task = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, fused=device == "cuda")
    outer = torch.optim.SGD(learner.policy_parameters(), 4e-3, momentum=0.9, weight_decay=5e-4, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(task, settings.steps)
    validation = iter(lambda: pick(9_000, 10_000), None)
    stages = {0: "start", settings.steps // 2: "midway", settings.steps: "end"}
    results, code = {}, commit()
    for step in range(settings.steps + 1):
        if step in stages:
            batches = [(*pick(0, 9_000), *pick(9_000, 10_000)) for _ in range(settings.moments)]
            alpha = learner.alpha.item()
            results[stages[step]] = {"norm of w": norm(list(net.parameters())).item(), "alpha": alpha}
            results[stages[step]] |= agreement(net, policy, batches, alpha)
            print(stages[step], *(f"{k}: {v}" for k, v in results[stages[step]].items()), sep="\n  ", flush=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            learner.step(*pick(0, 9_000), task, outer, validation)
        schedule.step()
    if settings.out:
        about = {"machine": machine(device), "commit": code}
        about |= {"settings": {**vars(settings), "data": settings.data.name, "out": None}}
        settings.out.write_text(json.dumps({**about, **results}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Settings))
