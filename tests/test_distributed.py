"""Several processes with a part of the mini-batch each make the steps that one process makes with the whole."""

import copy
import itertools
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import metaaugment as ma
from metaaugment.batch_norm import with_global_statistics
from metaaugment.distributed import Parted, drawn, share
from metaaugment.lab.data import augment
from metaaugment.lab.training.interruption import Interrupted, Interruption, heeding
from metaaugment.lab.training.processes import collected, everyone, first, highest, leave_to_first
from metaaugment.learned.source import Source
from metaaugment.networks.shake import ShakeDrop, ShakeShake
from metaaugment.ops import find_space

from processes import together

ITERATIONS = 20
# One after the other, a process with all images draws these as well.
DRAWN = 12


class Case(NamedTuple):
    """A way to train."""

    route: str = "forward"
    statistics: bool = True  # of the mini-batch: batch normalisation, instead of GroupNorm
    copies: int = 1
    every: int = 1
    lagged: bool = False
    policy: str = "plain"
    wrapped: bool = False  # in DistributedDataParallel
    accumulated: int = 1  # mini-batches for a step of the task network


ROUTES = ("difference", "forward", "unrolled")
GRID = [Case(*values) for values in itertools.product(ROUTES, (False, True), (1, 4), (1, 3), (False, True))]
# Of the grid, such that every two values of different columns meet.
FEW = [
    Case("difference", True, 1, 1, False), Case("difference", False, 4, 3, True), Case("difference", True, 4, 1, True),
    Case("forward", True, 4, 3, False), Case("forward", False, 1, 1, True), Case("forward", True, 1, 3, True),
    Case("unrolled", True, 1, 3, True), Case("unrolled", False, 4, 1, False), Case("unrolled", True, 4, 1, True),
    Case("difference", False, 1, 3, False),
]  # fmt: skip
OTHERS = [
    Case(policy="rejecting"), Case(policy="shaken"), Case(policy="own eyes", lagged=True), Case(wrapped=True),
    Case(wrapped=True, statistics=False, lagged=True), Case(accumulated=2),
    Case(accumulated=2, wrapped=True, lagged=True),
]  # fmt: skip


def network(statistics: bool, shaken: bool = False) -> nn.Module:
    torch.manual_seed(1)
    norms = [nn.BatchNorm2d(6), nn.BatchNorm1d(6)] if statistics else [nn.GroupNorm(2, 6), nn.GroupNorm(3, 6)]
    body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norms[0], nn.Tanh(), nn.AdaptiveAvgPool2d(1))
    shake = [Shaken()] if shaken else []
    return nn.Sequential(body, nn.Flatten(), nn.Linear(6, 6), norms[1], *shake, nn.Tanh(), nn.Linear(6, 4)).double()


class Shaken(nn.Module):
    """Two branches that are mixed by chance, as in Shake-Shake networks, and dropped like those of PyramidNet."""

    def __init__(self) -> None:
        super().__init__()
        self.shake, self.drop = ShakeShake(), ShakeDrop(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.shake(x, 2 * x.tanh()))


def steps(rank: int, world: int, case: Case) -> dict[str, Tensor]:
    """Joint steps on this process's part of the data; what is learned."""
    net, policy, eyes = parts(case)
    if rank > 0:  # as where each process seeds for itself: the learner makes them agree
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
    if case.statistics and world > 1:
        net, eyes = with_global_statistics(net), eyes if eyes is None else with_global_statistics(eyes)
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(2)
    learner = ma.Learner(
        DistributedDataParallel(net) if case.wrapped and world > 1 else net, ma.TransformationSampler(), policy,
        extractor=eyes, route=case.route, lagged=case.lagged, every=case.every, copies=case.copies, generator=generator,
        before=augment.in_turn([augment.random_flip(generator), augment.random_crop(2, (0, 0, 0), generator)]),
        after=augment.random_cutout(3, (9, 9, 9), generator),
    )  # fmt: skip
    task = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    # Slowly: the finite differences of one route have five digits, and θ shall agree to six behind the point.
    outer = torch.optim.SGD(learner.policy_parameters(), 0.003, momentum=0.9)
    data = torch.Generator().manual_seed(3)
    for step in range(ITERATIONS):
        (images, labels), validation = (batch(n, data) for n in (8, 10))
        if case.accumulated == 1:
            learner.step(images, labels, task, outer, iter([validation]))
        else:
            seen = learner.observe(images, labels)
            learner.policy_backward(seen, *validation)
            outer.step()
            outer.zero_grad()
            learner.weighted_loss(seen).backward()
            if (step + 1) % case.accumulated == 0:
                learner.add_up_gradients()
                task.step()
                task.zero_grad()
        if step % 5 == 4:
            learner.sampler.update()
    assert learner.skipped == 0
    learned = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    learned |= {f"eyes.{name}": value for name, value in eyes.state_dict().items()} if eyes is not None else {}
    return {**net.state_dict(), **learned, "p": learner.sampler.probabilities, "alpha": learner.alpha.detach()}


def parts(case: Case) -> tuple[nn.Module, nn.Module, nn.Module | None]:
    """Network, policy and its eyes, where these are its own."""
    net = network(case.statistics, case.policy == "shaken")
    torch.manual_seed(4)
    policy = ma.PolicyNetwork(6).double()
    eyes = network(case.statistics) if case.policy == "own eyes" else None
    return net, ma.RejectingPolicy(policy) if case.policy == "rejecting" else policy, eyes


def batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 4, (n,), generator=generator)
    return images[share(n)], labels[share(n)]


def all_steps(rank: int, world: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [steps(rank, world, Case(*case)) for case in cases]


def assert_equal_one(world: int, cases: list[Case], folder: Path) -> None:
    found = together(world, all_steps, folder / str(world), [tuple(case) for case in cases])
    for place, case in enumerate(cases):
        tolerance = 1e-6 if case.route == "difference" else 1e-10
        network, policy, _ = parts(case)
        expected = steps(0, 1, case)
        for start, name in ((network, ""), (policy, "policy.")):
            moved = max((expected[f"{name}{key}"] - w).abs().max() for key, w in start.named_parameters())
            assert moved > 100 * tolerance, "something was learned"
        assert (expected["p"] - 1 / 196).abs().max() > 1e-4
        for rank, (key, value) in itertools.product(range(world), expected.items()):
            torch.testing.assert_close(
                found[rank][place][key], value, rtol=tolerance, atol=tolerance,
                msg=lambda text, at=f"{case}, process {rank}, {key}": f"{at}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_equal_one(world: int, tmp_path: Path) -> None:
    assert_equal_one(world, FEW + OTHERS if world == 2 else FEW[::2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_processes_equal_one_in_every_way(world: int, tmp_path: Path) -> None:
    assert_equal_one(world, GRID + OTHERS, tmp_path)


def clipped(rank: int, world: int) -> list[dict[str, Tensor]]:
    return [clipped_one(world, route, lagged) for route in ROUTES for lagged in (False, True)]


def clipped_one(world: int, route: str, lagged: bool) -> dict[str, Tensor]:
    """The gradients of θ and α in one step, where the norm of what w moves by is clipped."""
    net, policy, _ = parts(Case())
    for w in net.parameters():
        w.register_hook(lambda g: g * (0.01 / g.norm()).clamp(max=1))
    net = with_global_statistics(net) if world > 1 else net
    generator = torch.Generator().manual_seed(2)
    learner = ma.Learner(net, ma.UniformSampler(), policy, route=route, lagged=lagged, generator=generator)
    data = torch.Generator().manual_seed(3)
    learner.policy_backward(learner.observe(*batch(8, data)), *batch(10, data))
    return {str(place): w.grad for place, w in enumerate(learner.policy_parameters()) if w.grad is not None}


def test_alpha_learns_under_clipping_hooks_as_in_one_process(tmp_path: Path) -> None:
    """By each route, exact and lagged."""
    one = clipped(0, 1)
    assert all(gradients[max(gradients, key=int)].abs() > 1e-4 for gradients in one), "α has a gradient"
    for several in together(2, clipped, tmp_path / "together"):
        for found, expected in zip(several, one, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# -- what may go wrong -------------------------------------------------------------------------------------------------


def one_infinite_loss(rank: int, world: int) -> dict[str, Any]:
    """A step in which the last sample of all, which only the last process has, has no finite gradient."""
    net = network(statistics=False)
    before = [parameter.detach().clone() for parameter in net.parameters()]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return ma.learner.cross_entropy(logits, labels) * torch.where(labels == 3, torch.inf, 1.0)

    learner = ma.Learner(net, ma.UniformSampler(), ma.UniformPolicy(), loss=loss)
    images, labels = batch(8, torch.Generator().manual_seed(3))
    labels = (torch.arange(8) // 7 * 3)[share(8)]
    with pytest.warns(UserWarning, match="not finite and has no effect"):
        learner.step(images, labels, torch.optim.SGD(net.parameters(), 0.1))
    same = all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    return {"skipped": learner.skipped, "same": same}


def test_a_gradient_that_is_not_finite_has_no_effect_on_any_process(tmp_path: Path) -> None:
    for found in together(2, one_infinite_loss, tmp_path / "together"):
        assert found == {"skipped": 1, "same": True}


def too_late(rank: int, folder: str) -> None:
    told, ready = Path(folder, "told"), [Path(folder, f"ready-{one}") for one in range(2)]
    ready[rank].touch()
    while not all(file.exists() for file in ready):  # whoever starts later must not be too late for the meeting itself
        time.sleep(0.01)
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=3), world_size=2, rank=rank)
    if rank == 0:
        try:
            highest(1)
        except Parted as error:
            told.write_text(str(error))
    while not told.exists():
        time.sleep(0.05)
    os._exit(0)


def test_who_waits_too_long_says_so_in_one_sentence(tmp_path: Path) -> None:
    mp.spawn(too_late, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "told").read_text() == "another process of this run is gone, or did not answer in time"


def uniform_policy() -> ma.LearnedPolicy:
    """p alone."""
    source = Source(None, 10, 3, find_space("metaaugment"), (0.5,) * 3, (0.5,) * 3, (0,) * 3, (16, 16))
    return ma.LearnedPolicy(torch.full((14, 14), 1 / 196, dtype=torch.float64), source)


def augmented(policy: ma.LearnedPolicy, images: list[Tensor], weighted: bool) -> Tensor:
    """As a loader collates them, in its worker."""
    return (policy.augment if weighted else policy.transform)(torch.stack(images))[0]


def heeded(rank: int, world: int, struck: int | None) -> Any:
    """How many of its batches a process gets, of which the second has one more, and what signal stops it."""
    got, stopped = 0, 0
    with Interruption() as interruption:
        try:
            for _ in heeding(interruption, range(2 + rank)):
                got += 1
                if rank == struck and got == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
        except Interrupted as stop:
            stopped = stop.signum
    return {"got": got, "stopped": stopped}


@pytest.mark.parametrize(("struck", "got"), [(None, [2, 3]), (0, [2, 2]), (1, [2, 2])])
def test_a_signal_to_one_process_ends_the_batches_of_all(struck: int | None, got: list[int], tmp_path: Path) -> None:
    """Also where they have not as many."""
    found = together(2, heeded, tmp_path / "together", struck)
    assert [each["got"] for each in found] == got
    assert [each["stopped"] for each in found] == [0 if struck is None else signal.SIGTERM] * 2


def in_workers(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 has one image more, so that collectives would not even fit."""
    images = torch.randint(0, 256, (8 + 4 * (rank == 0), 3, 16, 16), dtype=torch.uint8)
    found: dict[str, Any] = {}
    for weighted in (False, True):
        loader = DataLoader(
            images, 4, num_workers=1, timeout=60, multiprocessing_context="fork",
            collate_fn=partial(augmented, uniform_policy(), weighted=weighted),
        )  # fmt: skip
        try:
            found[f"{weighted}"] = sum(len(batch) for batch in loader)
        except RuntimeError as error:
            found[f"{weighted}"] = str(error)
    return found


def test_workers_of_a_loader_augment_but_do_not_wait_for_other_processes(tmp_path: Path) -> None:
    """They waited for ever for those of the other process."""
    zero, one = together(2, in_workers, tmp_path / "together")
    assert (zero["False"], one["False"]) == (12, 8)
    for process in (zero, one):
        assert "a data loader's worker cannot reach the other processes" in process["True"]
        assert "policy.transform(images)" in process["True"]


def draws_of_one_seed(rank: int, world: int) -> dict[str, Any]:
    """By a learned policy, whose user seeds all processes alike."""
    generator = torch.Generator().manual_seed(5)
    images = torch.zeros(4 if world == 2 else 8, 3, 16, 16, dtype=torch.uint8)
    return {"first": uniform_policy().transform(images, generator)[1].first}


def test_a_learned_policy_draws_for_the_global_batch(tmp_path: Path) -> None:
    """Each process drew the same."""
    zero, one = together(2, draws_of_one_seed, tmp_path / "together")
    assert torch.equal(torch.cat([zero["first"], one["first"]]), draws_of_one_seed(0, 1)["first"])
    assert not torch.equal(zero["first"], one["first"])


def loaded_within_an_epoch(rank: int, world: int) -> dict[str, Tensor]:
    """The outputs counted for p in an epoch: without a stop, and from the states of each or of the first."""
    learner = ma.Learner(network(True), ma.TransformationSampler(), ma.PolicyNetwork(6).double())
    outputs = torch.full((4 * (rank + 1),), 0.5)
    learner.sampler.record(learner.sampler.sample(len(outputs)), outputs)
    own = copy.deepcopy(learner.state_dict())
    states = {"without a stop": own, "of each": own, "of the first": everyone(own)[0]}
    counts = {}
    for name, state in states.items():
        if name != "without a stop":
            learner.load_state_dict(state)
        learner.sampler.update()
        counts[name] = learner.sampler.past[-1, 1].sum()
    return counts


def test_what_each_process_counted_is_counted_once_when_a_state_is_loaded(tmp_path: Path) -> None:
    """Four outputs of the first process, eight of the second; the state of the first says nothing of the second's."""
    for found in together(2, loaded_within_an_epoch, tmp_path / "together"):
        assert {name: int(count) for name, count in found.items()} == {
            "without a stop": 12, "of each": 12, "of the first": 4,
        }  # fmt: skip


# -- the collectives ---------------------------------------------------------------------------------------------------


def collectives(rank: int, world: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tallies = [torch.full((2,), rank + 1.0), torch.full((), 10.0 * rank)]
    leave_to_first(tallies)
    refused = ""
    try:
        first(lambda: int("no number"))
    except ValueError as error:
        refused = str(error)
    return {
        "drawn": drawn(lambda n: torch.rand(n, 2, generator=generator), DRAWN // world),
        "share": torch.arange(10)[share(10)],
        "collected": collected(torch.tensor([[rank, 5]], dtype=torch.uint8)),
        "highest": highest({1: 15}.get(rank, 0)),
        "everyone": everyone({rank}),
        "first": first(lambda: f"of {rank}"),
        "refused": refused,
        "tallies": [tally.clone() for tally in tallies],
    }


def test_what_processes_tell_each_other(tmp_path: Path) -> None:
    zero, one, two = together(3, collectives, tmp_path / "together")
    whole = torch.rand(DRAWN, 2, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.cat([process["drawn"] for process in (zero, one, two)]), whole)
    assert torch.cat([process["share"] for process in (zero, one, two)]).tolist() == list(range(10))
    for process in (zero, one, two):
        assert process["collected"].tolist() == [[0, 5], [1, 5], [2, 5]]
        assert process["highest"] == 15
        assert process["everyone"] == [{0}, {1}, {2}]
        assert process["first"] == "of 0"
        assert "no number" in process["refused"]
    assert [tally.tolist() for tally in zero["tallies"]] == [[6.0, 6.0], 30.0]
    assert [tally.tolist() for tally in two["tallies"]] == [[0.0, 0.0], 0.0]
