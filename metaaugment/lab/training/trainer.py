"""The training loop: learners in turn over one network, and all that is needed to continue after a stop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metaaugment.capture import step_of
from metaaugment.distributed import add_up, agree, rank, world_size
from metaaugment.lab.data.batches import Batches, once, own_part
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.checkpoint import Checkpoints
from metaaugment.lab.training.evaluation import evaluate
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.log import LOG, Log, Row
from metaaugment.lab.training.look import Look
from metaaugment.lab.training.machine import commit, commits, continued
from metaaugment.lab.training.processes import collected, everyone, first, highest, leave_to_first
from metaaugment.learner import Learner
from metaaugment.observation import Observation
from metaaugment.policy import as_policy

LONGEST = 80  # most characters of a value in an error message


@dataclass(frozen=True)
class Phase:
    """Epochs under one learner. `begin` makes it, with its policy's optimizer, from the learner before it."""

    epochs: int
    begin: Callable[[Learner | None], tuple[Learner, Optimizer | None]]


class Watcher:
    """Follows the progress of a run; methods that a subclass leaves out do nothing."""

    def began(self, trainer: "Trainer") -> None:
        """Called before the first step of this process."""

    def stepped(self, trainer: "Trainer") -> None:
        """Called after each step."""

    def ended_epoch(self, trainer: "Trainer", row: Row) -> None:
        """Called after each epoch, with its row of the log."""

    def ended(self, trainer: "Trainer") -> None:
        """Called at the end, whatever ended it."""


class Trainer:
    """Trains a network through phases, with a log row per epoch, and checkpoints as often as their cost allows.

    With several processes, each gets a part of every mini-batch, and only the first one writes. All of them hold the
    same parameters and generator states, so any number of processes can continue from its checkpoint.

    Args:
        network: the task network, on its device.
        optimizer: the task network's, the same through all phases.
        phases: what is trained in turn.
        train, validation: mini-batches.
        rate, policy_rate: learning rates as functions of the step, counted from 0 over all epochs; without
            `policy_rate`, the policy's optimizer keeps the rate it was made with.
        folder: where log and checkpoints go.
        identity: what a checkpoint must agree with to be continued here; JSON.
        precision: makes the context that passes run in, such as `torch.autocast`.
        captured: whether steps are replayed as CUDA graphs.
        look: keeps what is seen of a policy after each epoch.
        alpha: the inner step size as a function of the step; the learner's own if not given.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        phases: Sequence[Phase],
        train: Batches,
        validation: Batches,
        rate: Callable[[int], float],
        folder: Path,
        identity: Mapping[str, Any],
        precision: Callable[[], AbstractContextManager[object]],
        captured: bool = False,
        watchers: Sequence[Watcher] = (),
        look: Look | None = None,
        policy_rate: Callable[[int], float] | None = None,
        alpha: Callable[[int], float] | None = None,
    ) -> None:
        self.network, self.optimizer, self.phases = network, optimizer, phases
        self.train, self.validation, self.rate, self.policy_rate = train, validation, rate, policy_rate
        self.folder, self.identity = folder, dict(identity)
        self.precision, self.captured, self.watchers, self.look = precision, captured, watchers, look
        self.alpha = alpha
        self.log = Log(folder / LOG if rank() == 0 else None)
        self.checkpoints = Checkpoints(folder)
        self.epochs = sum(phase.epochs for phase in phases)
        self.epoch = 0  # epochs finished
        self.step = 0  # steps finished in the epoch under way
        self.seconds = 0.0  # spent on the steps of the epoch under way
        self.sums = torch.zeros(3, dtype=torch.float64, device=train.device)
        self._iterates: Learner | None = None  # whose steps `_iterate` makes
        self.commits: list[str] = []  # of the code that trains it, in turn
        self.threads: int | None = None  # with which its last checkpoint was computed
        self.learner, self.policy_optimizer = self._begin(0, None)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, or until a signal asks to stop: then a checkpoint is written and `Interrupted` raised."""
        self.commits = continued(self.commits, commit())
        with Interruption() as interruption:
            self._start_streams()
            self._tell(lambda watcher: watcher.began(self))
            try:
                while self.epoch < self.epochs:
                    sums = self._train_epoch(interruption)
                    self._end_epoch(*(sums / self.train.steps).tolist())
                    self._stop_if_asked(interruption)
                self.checkpoints.wait()
            finally:
                self.checkpoints.settle()
                self._batches.close()
                self._validation_batches.close()
                self._tell(lambda watcher: watcher.ended(self))

    def _stop_if_asked(self, interruption: Interruption) -> None:
        """Stop all processes after the same step, whichever of them was asked to."""
        if signum := highest(interruption.signum or 0):
            # Adding up the tallies within an epoch rounds differently than at its end. So each process's part is kept
            # too: the same number of processes continues from its parts, bit for bit, and any other from the sum.
            parts = [collected(tally[None]) for tally in self.learner.sampler.tallies] if world_size() > 1 else []
            leave_to_first(self.learner.sampler.tallies)
            self._agree_on_statistics()
            self._agree_on_unreadable()
            self.save(tallies=parts)
            self.checkpoints.wait()
            raise Interrupted(signum)

    def _train_epoch(self, interruption: Interruption) -> Tensor:
        started = time.perf_counter() - self.seconds
        while self.step < self.train.steps:
            _set_rate(self.optimizer, self.rate(self.learner.steps))
            if self.policy_optimizer is not None and self.policy_rate is not None:
                _set_rate(self.policy_optimizer, self.policy_rate(self.learner.steps))
            if self.alpha is not None:
                self.learner.alpha.detach().fill_(self.alpha(self.learner.steps))
            with self.precision():
                seen = self._iterate(*next(self._batches), self._validation_batches)
            self._add(seen)
            self.step += 1
            self.seconds = time.perf_counter() - started
            self._tell(lambda watcher: watcher.stepped(self))
            if self.step < self.train.steps:
                self._stop_if_asked(interruption)
                # Several processes would have to agree on when, and their epochs are shorter anyway.
                if world_size() == 1 and self.checkpoints.overdue():
                    self.save()
        sums = self.sums.cpu()  # waits for the device
        self.seconds = time.perf_counter() - started
        return sums

    def _end_epoch(self, train_loss: float, train_accuracy: float, effective: float) -> None:
        """Algorithm 1, line 11, and the epoch's log row and checkpoint."""
        learner = self.learner
        learner.sampler.update()
        self._agree_on_statistics()
        validation = once(own_part(self.validation.split), self.train.device, self.train.reader)
        with self.precision():
            score = evaluate(self.network, validation, learner.prepare)
        self._agree_on_unreadable()
        row = {
            "epoch": self.epoch + 1,
            "train_loss": train_loss,  # weighted, of augmented samples
            "train_accuracy": train_accuracy,
            "val_loss": score.loss,
            "val_accuracy": score.top1,
            "alpha": float(learner.alpha.detach()),
            "lr": self.rate(learner.steps - 1),
            "effective_samples": effective,  # 1 / ΣV², as a share of the mini-batch
            "skipped": learner.skipped,
            "seconds": self.seconds,
            "images_per_second": self.train.steps * self.train.batch * learner.copies / self.seconds,
            **learner.sampler.figures,
        }
        row: Row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        row |= self._looked(self.epoch + 1)
        phase = self._phase(self.epoch)
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        self.sums.zero_()
        if self._phase(self.epoch) is not phase:
            self.learner, self.policy_optimizer = self._begin(self.epoch, learner)
            self._start_streams()
        # The row first: a run killed in between repeats the epoch, and the row with it.
        self.log.append(row)
        if self.checkpoints.due() or self.epoch == self.epochs or self._phase(self.epoch) is not phase:
            self.save()
        self._tell(lambda watcher: watcher.ended_epoch(self, row))

    def _looked(self, epoch: int) -> Row:
        """What the policy does after an epoch: p, and the quantiles of the weights of a mini-batch."""
        learner = self.learner
        if self.look is None or as_policy(learner.policy).equal:
            return {}
        with self.precision():
            row = self.look.take(learner, epoch, self.validation if epoch == self.epochs else None)
        p: Tensor | None = learner.sampler.probabilities
        return row if p is None else {**row, "probabilities": [[round(v, 6) for v in first] for first in p.tolist()]}

    @torch.no_grad()
    def _add(self, seen: Observation) -> None:
        weights, n = seen.weights.detach().double(), len(seen.weights) * world_size()
        correct = (seen.logits.argmax(1) == seen.labels).double().sum()
        found = torch.stack([(weights * seen.losses.detach()).sum(), correct, weights.square().sum()])
        add_up([found])
        loss, correct, squares = found
        self.sums += torch.stack([loss, correct / n, 1 / (squares * n)])

    def _agree_on_statistics(self) -> None:
        """Give all processes the first one's running statistics, where each keeps its own."""
        own = [] if self.learner.extractor is None else self.learner.extractor.buffers()
        agree([*self.network.buffers(), *own])

    def _agree_on_unreadable(self) -> None:
        """Tell all processes which files could not be read: each reads its own part, and the first one saves."""
        known = self.train.reader.unreadable
        known.update(*everyone(known))

    # -- phases -------------------------------------------------------------------------------------------------------

    def _begin(self, epoch: int, before: Learner | None) -> tuple[Learner, Optimizer | None]:
        """The learner of an epoch, which continues the counts of the one before it."""
        self._begun = self._phase(epoch)
        learner, policy_optimizer = self._begun.begin(before)
        learner.steps = epoch * self.train.steps
        learner.guard.count += 0 if before is None else before.skipped
        return learner, policy_optimizer

    def _phase(self, epoch: int) -> Phase:
        for phase in self.phases:
            if epoch < phase.epochs:
                return phase
            epoch -= phase.epochs
        return self.phases[-1]

    def _start_streams(self) -> None:
        """Start the batches from the learner's step on, and its steps."""
        learner = self.learner
        self._batches = self.train.since(learner.steps)
        self._validation_batches = self.validation.since(learner.steps // learner.every)
        if self._iterates is not learner:  # what was captured stays captured
            self._iterate = step_of(learner, self.optimizer, self.policy_optimizer, captured=self.captured)
            self._iterates = learner

    # -- never lose a run ---------------------------------------------------------------------------------------------

    def save(self, **more: Any) -> None:
        if rank() == 0:
            self.checkpoints.save(self.state_dict() | more)

    def resume(self) -> bool:
        """Continue from the folder's checkpoint; False if it has none yet, and the run starts over."""
        state = first(lambda: checkpoint.load(self.folder))
        with checkpoint.understood(self.folder):
            if state is not None:
                check_identity(self.folder / checkpoint.LAST, state["identity"], self.identity)
                self.load_state_dict(state)
            self.log.restore([] if state is None else state["log"])
        return state is not None

    def take_up(self, folder: Path, epochs: int) -> None:
        """Turn to another run of the same identity, which has a checkpoint in its folder, and train it up to an epoch.

        Everything is loaded into the memory that is there, so steps that were captured stay captured.
        """
        self.folder, self.epochs, self.checkpoints.folder = folder, epochs, folder
        self.log = Log(folder / LOG if rank() == 0 else None)
        if not self.resume():
            raise ValueError(f"{folder} has no {checkpoint.LAST}, so there is nothing to continue; begin again")

    def state_dict(self) -> dict[str, Any]:
        generators = {"cpu": torch.get_rng_state()}
        if self.train.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.train.device)
        if self.learner.generator is not None:
            generators["learner"] = self.learner.generator.get_state()
        optimizers = {"task": self.optimizer, "policy": self.policy_optimizer}
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "identity": self.identity,
            "commit": self.commits,
            "threads": torch.get_num_threads(),
            "log": self.log.rows,
            "sums": self.sums,
            "network": self.network.state_dict(),
            "learner": self.learner.state_dict(),
            # Without parameter groups: learning rates are functions of the step, so these hold nothing to keep.
            "optimizers": {name: o.state_dict()["state"] for name, o in optimizers.items() if o is not None},
            "generators": generators,
            "look": {} if self.look is None else self.look.state_dict(),
            "unreadable": self.train.unreadable,
        }

    def load_learned(self, state: Mapping[str, Any]) -> None:
        """Restore the network and the learner, on any device; enough to look at them."""
        self.epoch, self.step, self.seconds = state["epoch"], state["step"], state["seconds"]
        self.network.load_state_dict(state["network"])
        if self._phase(self.epoch) is not self._begun:
            self.learner, self.policy_optimizer = self._begin(self.epoch, None)
        self.learner.load_state_dict(state["learner"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_learned(state)
        tallies = self.learner.sampler.tallies
        parts = state.get("tallies") or [()] * len(tallies)
        # Of no tallies, there are no parts; older checkpoints have some, all zero, of a p that does not change.
        for tally, of_each in zip(tallies, parts if tallies else (), strict=True):
            if len(of_each) == world_size() > 1:
                tally.copy_(of_each[rank()])  # else the first process has the sum, and the others begin anew
        self.sums.copy_(state["sums"])
        self.commits = commits(state.get("commit"))  # which older checkpoints do not say
        self.threads = state.get("threads")  # nor this
        if self.look is not None:
            self.look.load_state_dict(state.get("look", {}))
        self.train.leave_out(state.get("unreadable", []))  # which older checkpoints do not say
        for name, optimizer in (("task", self.optimizer), ("policy", self.policy_optimizer)):
            if optimizer is not None:
                _restore(optimizer, {int(place): kept for place, kept in state["optimizers"][name].items()})
        torch.set_rng_state(state["generators"]["cpu"])
        if self.train.device.type == "cuda" and "cuda" in state["generators"]:
            torch.cuda.set_rng_state(state["generators"]["cuda"], self.train.device)
        if self.learner.generator is not None:
            self.learner.generator.set_state(state["generators"]["learner"])

    def _tell(self, news: Callable[[Watcher], None]) -> None:
        for watcher in self.watchers:
            news(watcher)


def cosine(peak: float, steps: int, warmup: int = 0, start: float = 0.0) -> Callable[[int], float]:
    """Linearly from `start` up to `peak` over the first `warmup` steps, then down to 0 along half a cosine."""

    def rate(step: int) -> float:
        if step < warmup:
            return start + (peak - start) * step / warmup
        return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    return rate


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _restore(optimizer: Optimizer, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Load what an optimizer keeps of each parameter, by its place; in place if it keeps some already.

    A captured step uses the memory that is there, in which zeros mean the same as nothing kept yet.
    """
    if not optimizer.state:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
        _lay_out(optimizer)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(parameters):
        kept, new = optimizer.state[parameter], entries.get(place, {})
        if foreign := new.keys() - kept.keys():
            raise ValueError(
                f"the checkpoint has {min(foreign)!r} of a parameter, for which this optimizer has no room"
            )
        for name, value in kept.items():
            if isinstance(value, Tensor):
                value.copy_(new.get(name, torch.zeros_like(value)))


def _lay_out(optimizer: Optimizer) -> None:
    """Give an optimizer's state the strides of its parameters: a fused step refuses others.

    A checkpoint keeps values only, so what was channels_last comes back contiguous.
    """
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def check_identity(file: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to continue what was begun under other settings or on other data.

    A key that only one side has is a setting of another version of this program, which the other has at its default.
    The file of a policy may have moved: if the checkpoint has its SHA-256, the policy is compared by that instead.
    """
    moved = {"policy"} if found.get("policy_sha256") is not None else set[str]()
    both = (found.keys() & wanted.keys()) - moved
    for key in sorted(both, key=lambda key: (key != "data", key)):  # what else is known of other data differs, too
        if found[key] == wanted[key]:
            continue
        if key == "data":
            raise ValueError(
                f"{file} belongs to a run on other data: images were added, removed or changed since; "
                "put them back, or begin another run with --out"
            )
        raise ValueError(
            f"{file} belongs to another run: its {key} is {_said(found[key])}, not {_said(wanted[key])}; "
            "continue it with the settings it began with, or begin another run with --out"
        )


def _said(value: object) -> str:
    """A value on one line, cut short: what another program wrote may be of any length."""
    words = " ".join(repr(value).split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} …"
