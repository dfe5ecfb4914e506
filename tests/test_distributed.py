"""Two processes with half of the mini-batch each make the step that one process makes with the whole."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import metaaugment as ma

from processes import leave, meet

WORLD = 2


class Sliced(ma.TransformationSampler):
    """Draws for the global mini-batch and keeps the part of this process."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def sample(self, n: int, generator: torch.Generator | None = None) -> ma.Transformation:
        return super().sample(n * self.world, generator)[n * self.rank : n * (self.rank + 1)]


def network() -> nn.Module:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Tanh(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(6, 4)).double()


def steps(rank: int, world: int, lagged: bool, policy: nn.Module) -> dict[str, Tensor]:
    """Three joint steps on this process's part of the data; what is learned."""
    net = network()
    wrapped = DistributedDataParallel(net) if world > 1 else net
    generator = torch.Generator().manual_seed(2)
    learner = ma.Learner(wrapped, Sliced(rank, world), policy, route="forward", lagged=lagged, generator=generator)
    task = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    outer = torch.optim.SGD(learner.policy_parameters(), 1.0, momentum=0.9)
    data = torch.Generator().manual_seed(3)
    for _ in range(3):
        batches = []
        for n in (8, 12):
            images = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=data)
            labels = torch.randint(0, 4, (n,), generator=data)
            part = slice(rank * n // world, (rank + 1) * n // world)
            batches.append((images[part], labels[part]))
        learner.step(*batches[0], task, outer, iter(batches[1:]))
    learner.sampler.update()
    learned = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    return {**net.state_dict(), **learned, "p": learner.sampler.probabilities, "alpha": learner.alpha.detach()}


def policies() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    return {"plain": ma.PolicyNetwork(6).double(), "rejecting": ma.RejectingPolicy(ma.PolicyNetwork(6).double())}


def worker(rank: int, folder: str, lagged: bool, name: str) -> None:
    meet(rank, WORLD, folder)
    policy = policies()[name]
    if rank == 1:  # as where each process seeds for itself: the learner makes them agree
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
    torch.save(steps(rank, WORLD, lagged, policy), f"{folder}/{rank}.pt")
    leave()


@pytest.mark.parametrize(("lagged", "policy"), [(False, "plain"), (True, "plain"), (False, "rejecting")])
def test_two_processes_equal_one(lagged: bool, policy: str, tmp_path: Path) -> None:
    expected = steps(0, 1, lagged, policies()[policy])
    start = network().state_dict()
    mp.spawn(worker, args=(str(tmp_path), lagged, policy), nprocs=WORLD)
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert not torch.equal(expected["2.weight"], start["2.weight"])
