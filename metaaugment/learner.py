"""Algorithm 1: task network, sampler, policy and its extractor, put together for any training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metaaugment import state
from metaaugment._deprecated import positional_until
from metaaugment.algorithm import Ahead, augmented, look_ahead, outer_gradient, task_loss
from metaaugment.alignment import ROUTES, check_repeatable
from metaaugment.distributed import add_up, agree, bare, world_size
from metaaugment.features import Features
from metaaugment.guard import checks
from metaaugment.guard.alpha import AlphaWatch, at_least_zero
from metaaugment.guard.checks import Batch, Checks, check_batch, next_batch
from metaaugment.guard.finite import FiniteGuard
from metaaugment.guard.gradients import accumulate, refuse_reentrant, with_gradient
from metaaugment.guard.parameters import trained, version
from metaaugment.guard.replay import (
    FirstPass,
    Replay,
    capturing,
    copied_buffers,
    default_generator,
    seeded,
    undisturbed,
)
from metaaugment.judge import Judge
from metaaugment.observation import Observation
from metaaugment.ops import Space, find_space
from metaaugment.passes import Passes, cross_entropy
from metaaugment.sampler import Sampler
from metaaugment.transformation import apply, in_unit_range


class Learner:
    """Learns a policy while a network trains, inside the user's own training loop.

        seen = learner.observe(images, labels)
        if learner.due:
            learner.policy_backward(seen, *next(validation_batches))
            policy_optimizer.step(); policy_optimizer.zero_grad()
        learner.weighted_loss(seen).backward()
        task_optimizer.step(); task_optimizer.zero_grad()

    plus `learner.sampler.update()` once per epoch. `step` does one iteration of this.

    Args:
        network: the task network, from images to logits; any module.
        sampler: which transformations are drawn.
        policy: from features and embeddings to outputs; `UniformPolicy()` learns nothing.
        extractor: a network of the policy's own, whose features the policy sees; if not given, it sees those of the
            task network. Its parameters that require a gradient are learned with the policy.
        features: name of the layer whose input is the feature; the last linear layer if not given.
        route: how the alignment is computed: "difference", "forward" or "unrolled". "difference" relies on the backward
            pass being the derivative of the forward pass; where it is not (straight-through rounding), use "forward".
        lagged: update w with the gradient of Eq. 2, taken under the policy before its update, which saves a backward
            pass. The graph of the training pass is spent by then: what you add to `weighted_loss` needs a pass of its
            own. A GradScaler cannot scale that gradient: under float16 autocast leave this False, or use bfloat16.
        every: the policy is updated on every `every`-th step.
        copies: transformations drawn for each image of a mini-batch.
        alpha: initial value of the learned inner step size.
        loss: from logits and labels to one loss per sample, which depends on that sample's logits alone; cross-entropy
            if not given.
        before: uint8 to uint8, on training images before the transformation (flip).
        after: the same, after the transformation (Cutout).
        prepare: uint8 to the network's inputs, for training and validation; division by 255 if not given.
        generator: draws the transformations; torch's default one if not given.
        space, fill: of the transformations, as in `apply`.
        part: process larger validation batches in parts of at most this many images, whose gradients are averaged:
            their size then costs time but no memory.
    """

    @positional_until("generator")
    def __init__(
        self,
        network: nn.Module,
        sampler: Sampler,
        policy: nn.Module,
        *,
        extractor: nn.Module | None = None,
        features: str | None = None,
        route: str = "difference",
        lagged: bool = False,
        every: int = 1,
        copies: int = 1,
        alpha: float = 0.1,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        before: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        generator: torch.Generator | None = None,
        space: str | Space = "metaaugment",
        fill: int | Sequence[int] = 0,
        part: int | None = None,
    ) -> None:
        checks.check_settings(route, ROUTES, {"every": every, "copies": copies, "part": part}, alpha)
        checks.check_kinds(network, sampler, policy)
        self.network = network
        self.w = trained(bare(self.network))
        like = next(iter(self.w.values()))
        self.device, self.dtype = like.device, like.dtype.to_real()
        self.sampler = sampler
        self.policy = policy
        self.extractor = extractor
        self.route = ROUTES[route]
        self.lagged = lagged
        self.every = every
        self.copies = copies
        self.loss = loss or cross_entropy
        self.before = before
        self.after = after
        self.prepare = prepare or partial(in_unit_range, dtype=self.dtype)
        self.generator = generator or default_generator(self.device)
        self.space = find_space(space)
        self.fill = fill
        self.part = part
        self.features = Features(bare(network) if extractor is None else extractor, features)
        single = torch.promote_types(self.dtype, torch.float32)  # in half precision small steps are rounded away
        self.alpha = nn.Parameter(torch.tensor(alpha, dtype=single, device=self.device))
        self.steps = 0
        self.guard = FiniteGuard(self.device)
        self.alpha_watch = AlphaWatch(alpha, self.device)
        self.checks = Checks(self.device)
        self._judge = Judge(policy, extractor, self.features, self.alpha.dtype, self.checks)
        self.first_pass = FirstPass(network)
        self.states: dict[str, list[torch.Generator]] = {}  # of a step that is being captured; see Replay
        checks.check_parts(self.w, policy, extractor, self.loss, lagged, self.alpha.dtype)
        agree([*self.policy_parameters(), *self.policy.buffers()])

    # -- what a loop calls ------------------------------------------------------------------------------------------

    def observe(self, images: Tensor, labels: Tensor) -> Observation:
        """Algorithm 1, lines 4 and 5: draw transformations, augment, and compute losses and weights."""
        at_least_zero(self.alpha)
        self.watch_alpha()
        self.guard.begin()
        seen = self._see(images, labels)
        self.sampler.record(seen.transformation, seen.outputs.detach(), seen.losses.detach())
        self.steps += 1
        return seen

    @torch.no_grad()
    def look(self, images: Tensor, labels: Tensor, seed: int) -> Observation:
        """What `observe` would see with draws from this seed, without a trace: nothing is recorded, no statistics
        change, and no generator advances."""
        with seeded(self.device, seed, self.generator), undisturbed(bare(self.network), *self.judge.modules):
            return self._see(images, labels)

    def _see(self, images: Tensor, labels: Tensor) -> Observation:
        check_batch(images, labels, self.device, "training")
        self.w = trained(bare(self.network))
        with torch.no_grad():
            if self.copies > 1:
                images, labels = images.repeat_interleave(self.copies, 0), labels.repeat_interleave(self.copies, 0)
            images = self.before(images) if self.before else images
            self.checks.training(images)
            images, t = augmented(
                images,
                lambda n: self.sampler.sample(n, self.generator),
                lambda x, t: apply(x, t, self.space, self.fill),
            )
            images = self.after(images) if self.after else images
            inputs = self.prepare(images)
        replay, judging = (Replay(self.device, self.states.get(series, ())) for series in ("network", "policy"))
        judges = [copied_buffers(module) for module in self.judge.modules]
        with self.features.watched():
            logits, losses, buffers = self.passes.train(inputs, labels, replay)
        with judging.first():
            features, evidence, outputs, weights = self.judge.weigh(inputs, logits, labels, t)
        return Observation(
            images=images,
            labels=labels,
            transformation=t,
            features=features,
            outputs=outputs,
            weights=weights,
            losses=losses,
            logits=logits,
            inputs=inputs,
            replay=replay,
            buffers=buffers,
            judging=judging,
            judges=judges,
            evidence=evidence,
            version=version(self.w),
        )

    @property
    def due(self) -> bool:
        """Whether the step just observed updates the policy."""
        return self.due_at(self.steps)

    def due_at(self, step: int) -> bool:
        """Whether a step, counted from 1, updates the policy: every `every`-th does, if there is something to learn."""
        return step > 0 and step % self.every == 0 and self.learns

    @property
    def learns(self) -> bool:
        """Whether there is something to learn, besides α."""
        return any(p is not self.alpha for p in self.policy_parameters())

    def policy_backward(self, seen: Observation, images: Tensor, labels: Tensor) -> None:
        """Eqs. 2 and 3: add the gradient of the validation loss at ŵ to the `.grad` of θ and α.

        A gradient that is not finite is left out and counted in `skipped`. The network's parameters and buffers stay
        the same bit for bit, even after an exception.
        """
        self.checks.validation(images, labels)
        checks.check_fresh(seen.alignment, seen.images.dtype, images.dtype)
        own, g, v, along = self.look_ahead(seen, images, labels)  # ŵ = w − α g, v = ∇ L_val(ŵ)
        training = self.passes.again(seen)
        if not capturing(self.device):
            self.checks.once("repeatable", lambda: check_repeatable(training, self.route))
        seen.alignment = self.route(training, v)  # s = J v
        if self.extractor is not None:
            refuse_reentrant(seen.outputs)
        learned = self.policy_parameters()
        with torch.autocast(self.device.type, enabled=False):  # it would round the policy's backward pass
            gradients = outer_gradient(self.judge.outer_loss(self.alpha, seen, along), learned)
        if self.guard.passes(gradients):
            accumulate(learned, gradients)
        if self.lagged:
            # Under DistributedDataParallel, which averages, each process leaves the whole sum; otherwise its own part.
            whole = g if self.network is not bare(self.network) else own
            seen.gradient = [None if part is None else value for part, value in zip(own, whole, strict=True)]

    def look_ahead(self, seen: Observation, images: Tensor, labels: Tensor) -> Ahead:
        """Eq. 2: the gradient g of the weighted training loss, and the validation gradient at ŵ = w − α g."""
        refuse_reentrant(seen.losses)
        w, v = list(self.w.values()), partial(self.passes.validation_gradient, images, labels, seen.replay)
        with checks.spent_graphs_named():
            return look_ahead(seen.weights, seen.losses, w, self.alpha, v, retain_graph=not self.lagged)

    def weighted_loss(self, seen: Observation) -> Tensor:
        """Eq. 4: Σ V_i L_i with the weights of the policy as it is now; its backward pass trains the task network.

        If the gradient that backward leaves in `.grad` is not finite, all of `.grad` becomes zero, and the step is
        counted in `skipped`. An optimizer of your own loop then still applies momentum and weight decay; `step` leaves
        w as it is.
        """
        loss = self._weighted(seen)
        # Under float16, torch's GradScaler skips non-finite steps itself, and must see them to lower its scale.
        scaled = seen.replay.autocast and seen.replay.precision == torch.float16
        return loss if scaled else self._guarded(loss)

    def _weighted(self, seen: Observation) -> Tensor:
        at_least_zero(self.alpha)
        anew = seen.alignment is not None and seen.gradient is None  # θ may have moved since, and is not lagged
        weights = self.judge.weigh_again(seen) if anew else seen.weights.detach()
        loss = task_loss(weights, seen.losses)
        if seen.gradient is not None:
            checks.check_unmoved(seen.version, version(self.w))
            return with_gradient(loss, seen.gradient, list(self.w.values()))
        # DistributedDataParallel averages over the processes, but the loss is a sum over them.
        return loss if self.network is bare(self.network) else loss * world_size()

    def _guarded(self, loss: Tensor) -> Tensor:
        """The loss, whose backward pass leaves no gradient in `.grad` that is not finite."""
        if loss.requires_grad:
            self.guard.watch(loss, list(self.w.values()))
        return loss

    def step(
        self,
        images: Tensor,
        labels: Tensor,
        task_optimizer: Optimizer,
        policy_optimizer: Optimizer | None = None,
        validation_batches: Iterator[Batch] | None = None,
    ) -> Observation:
        """One whole iteration; if the policy is due, it takes the next validation batch."""
        self.checks.once("optimizers", lambda: self.check_optimizers(task_optimizer, policy_optimizer))
        due = self.due_at(self.steps + 1)
        checks.check_due(due, policy_optimizer, validation_batches)
        seen = self.observe(images, labels)  # Algorithm 1, lines 4 and 5
        if due and policy_optimizer is not None and validation_batches is not None:
            self.policy_backward(seen, *next_batch(validation_batches))  # lines 6 and 7
            self.guard.step(policy_optimizer)  # line 8
        self._guarded(self._weighted(seen)).backward()  # line 9, which no GradScaler scales
        self.add_up_gradients()
        self.guard.step(task_optimizer)
        return seen

    def add_up_gradients(self) -> None:
        """Sum the accumulated `.grad` of w over all processes; call it once, before the optimizer's step.

        For loops with several processes but without DistributedDataParallel, which does this itself.
        """
        if world_size() > 1 and self.network is bare(self.network):
            add_up([w.grad for w in self.w.values() if w.grad is not None])

    def validation_gradient(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """∇ L_val at w itself, one tensor per parameter, with batch statistics as in training; leaves no trace."""
        self.checks.validation(images, labels)
        return self.passes.validation_gradient(images, labels, Replay(self.device))

    def alignment(self, seen: Observation, v: Sequence[Tensor]) -> Tensor:
        """s = J v: how much the loss of each sample falls with a step along −v."""
        return self.route(self.passes.again(seen), v)

    def policy_parameters(self) -> list[nn.Parameter]:
        """θ, α, and the learned parameters of an extractor of the policy's own."""
        return [p for p in (*self.judge.parameters(), self.alpha) if p.requires_grad]

    @property
    def skipped(self) -> int:
        """How many gradients were not finite and had no effect."""
        return int(self.guard.count)

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs; the task network, optimizers and generators have states of their own.

        A part with `kept_elsewhere = True`, such as one from a policy file, is left out: build the learner with it.
        With several processes, save after `sampler.update()`: until then each one counts outputs of its own. As always
        in torch, the policy's tensors are those that training changes: copy the state to keep it in memory.
        """
        return state.state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state.load(self, state_dict)

    # -- the parts of a step ----------------------------------------------------------------------------------------

    @property
    def passes(self) -> Passes:
        """Passes of the network as it is now."""
        of = self.network, self.w, self.loss, self.prepare, self.part, self.alpha.dtype
        return Passes(*of, self.first_pass, self.checks)

    @property
    def judge(self) -> Judge:
        """The policy as it is now, with what it sees through."""
        if (self._judge.module, self._judge.extractor) != (self.policy, self.extractor):
            self._judge = Judge(self.policy, self.extractor, self.features, self.alpha.dtype, self.checks)
        return self._judge

    def watch_alpha(self) -> None:
        """Warn once if α has been near 0 for long, and the policy learns in proportion to it."""
        if self.alpha.requires_grad and self.learns and not self.judge.policy.has_own("objective"):
            self.alpha_watch.see(self.alpha.detach(), self.steps)

    def check_optimizers(self, task: Optimizer, policy: Optimizer | None) -> bool:
        """Refuse optimizers in the wrong order; returns whether both were there to look at."""
        checks.check_optimizers(task, policy, bare(self.network).parameters(), [*self.judge.parameters(), self.alpha])
        return policy is not None
