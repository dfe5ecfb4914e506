"""Algorithm 1: task network, sampler, policy and its extractor, put together for any training loop."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from metaaugment.distributed import add_up, agree, bare, drawn, is_compiled, rank, share, total, world_size
from metaaugment.embedding import embed
from metaaugment.features import Features
from metaaugment.guard import checks
from metaaugment.guard.alpha import AlphaWatch
from metaaugment.guard.checks import Batch, check_batch, next_batch, short
from metaaugment.guard.finite import FiniteGuard
from metaaugment.guard.replay import Replay, capturing, copied_buffers, precisions, seeded, undisturbed, unwritten
from metaaugment.hypergradient import (
    ROUTES,
    Pass,
    at_expectation,
    back_through_hooks,
    filled,
    hooked,
    inner,
    moved,
    norm,
    not_compiled,
    outer_loss,
    refuse_cached_weights,
    refuse_reentrant,
    weighted_gradient,
)
from metaaugment.observation import Observation
from metaaugment.ops import Space, find_space
from metaaugment.policy import check_outputs, evidence, is_blind, normalizes, objective_of, weigh
from metaaugment.sampler import Sampler, check_count
from metaaugment.transformation import Transformation, apply, check_range

PARTS = ("policy", "extractor", "sampler")


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

    def __init__(
        self,
        network: nn.Module,
        sampler: Sampler,
        policy: nn.Module,
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
        *,
        space: str | Space = "metaaugment",
        fill: int | Sequence[int] = 0,
        part: int | None = None,
    ) -> None:
        if route not in ROUTES:
            raise ValueError(f"unknown route {route!r}; choose one of {', '.join(ROUTES)}")
        for name, value in {"every": every, "copies": copies, **({} if part is None else {"part": part})}.items():
            check_count(name, value)
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha is {alpha:g}; it must be finite, and 0 or above")
        if getattr(network, "static_graph", False):
            raise ValueError("DistributedDataParallel's static_graph=True allows one backward pass per step; drop it")
        checks.check_kinds(network, sampler, policy)
        self.network = network
        self.w = self._trained()
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
        self.prepare = prepare or self._to_unit_range
        self.generator = generator or self._default_generator()
        self.space = find_space(space)
        self.fill = fill
        self.part = part
        self.features = Features(bare(network) if extractor is None else extractor, features)
        single = torch.promote_types(self.dtype, torch.float32)  # in half precision small steps are rounded away
        self.alpha = nn.Parameter(torch.tensor(alpha, dtype=single, device=self.device))
        self.steps = 0
        self.guard = FiniteGuard(self.device)
        self.alpha_watch = AlphaWatch(alpha, self.device)
        self._checked: set[str] = set()
        self._coarsest = max((w.dtype for w in self.w.values()), key=lambda dtype: torch.finfo(dtype).eps)
        checks.check_parts(self.w, policy, extractor, self.loss, lagged, self.alpha.dtype)
        agree([*self.policy_parameters(), *self.policy.buffers()])

    # -- what a loop calls ------------------------------------------------------------------------------------------

    def observe(self, images: Tensor, labels: Tensor) -> Observation:
        """Algorithm 1, lines 4 and 5: draw transformations, augment, and compute losses and weights."""
        self._clamp_alpha()
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
        before = None if self.generator is None else self.generator.get_state()
        with seeded(self.device, seed), ExitStack() as stack:
            for module in (bare(self.network), *self._judges()):
                stack.enter_context(undisturbed(module))
            if self.generator is not None:
                self.generator.manual_seed(seed)
            try:
                return self._see(images, labels)
            finally:
                if self.generator is not None and before is not None:
                    self.generator.set_state(before)

    def _see(self, images: Tensor, labels: Tensor) -> Observation:
        check_batch(images, labels, self.device, "training")
        self.w = self._trained()
        with torch.no_grad():
            if self.copies > 1:
                images, labels = images.repeat_interleave(self.copies, 0), labels.repeat_interleave(self.copies, 0)
            images = self.before(images) if self.before else images
            if self.device.type != "cpu":  # there `apply` checks every batch, elsewhere it clamps
                self._check_range(images, "training", ": bring them there by before=, or in the loader")
            t = drawn(lambda n: self.sampler.sample(n, self.generator), len(images)).to(images.device)
            images = apply(images, t, self.space, self.fill)
            images = self.after(images) if self.after else images
            inputs = self.prepare(images)
        replay, judging = Replay(self.device), Replay(self.device, "policy")
        buffers, judges = copied_buffers(bare(self.network)), [copied_buffers(judge) for judge in self._judges()]
        refuse_cached_weights()
        with replay.first(), self.features.watched(), self._precision_noted(replay), self._frozen_unwritten():
            before = inputs._version
            logits = self.network(inputs)
            if inputs._version != before:  # a repeated pass would start from other inputs
                raise ValueError("the network changes its input in place; let it work on a copy, as x = x - mean does")
            losses = self._losses(logits, labels, "training")
        with judging.first():
            if self.extractor is None:
                features, more = self._features(len(t)).detach(), evidence(self.policy, logits, labels)
            else:
                features, more = self._extract(self.extractor, inputs, labels)
            outputs, weights = self._judge(features, t, more)
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
            evidence=more,
            version=self._version(),
        )

    @property
    def due(self) -> bool:
        """Whether the step just observed updates the policy."""
        return self.due_at(self.steps)

    def due_at(self, step: int) -> bool:
        """Whether a step, counted from 1, updates the policy: every `every`-th does, if there is something to learn."""
        return step > 0 and step % self.every == 0 and self._learns()

    def _learns(self) -> bool:
        return any(p is not self.alpha for p in self.policy_parameters())

    def watch_alpha(self) -> None:
        """Warn once if α has been near 0 for long, and the policy learns in proportion to it."""
        if self.alpha.requires_grad and self._learns() and objective_of(self.policy) is None:
            self.alpha_watch.see(self.alpha.detach(), self.steps)

    def policy_backward(self, seen: Observation, images: Tensor, labels: Tensor) -> None:
        """Eqs. 2 and 3: add the gradient of the validation loss at ŵ to the `.grad` of θ and α.

        A gradient that is not finite is left out and counted in `skipped`. The network's parameters and buffers stay
        the same bit for bit, even after an exception.
        """
        self._check_validation(images, labels)
        if seen.alignment is not None:
            raise ValueError(
                "the policy has had its gradient from this observation; observe again, or give policy_backward() all "
                "validation images at once"
            )
        if images.dtype != seen.images.dtype:
            theirs, ours = short(images.dtype), short(seen.images.dtype)
            raise ValueError(
                f"the validation images are {theirs}, but the training images {ours}; give both the same dtype, since "
                "both go through prepare="
            )
        own, g = self.inner_gradient(seen, retain_graph=not self.lagged)  # ŵ = w − α g is Eq. 2
        v, along = self.gradient_ahead(seen, g, images, labels)  # ∇ L_val(ŵ), and ⟨g, v⟩
        if "repeatable" not in self._checked and not capturing(self.device):
            self._check_repeatable(seen)
        seen.alignment = self.alignment(seen, v)  # s = J v
        if self.extractor is not None:
            refuse_reentrant(seen.outputs)
        learned = self.policy_parameters()
        with torch.autocast(self.device.type, enabled=False):  # it would round the policy's backward pass
            gradients = filled(torch.autograd.grad(self._outer_loss(seen, along), learned, allow_unused=True), learned)
        add_up(gradients)
        if self.guard.passes(gradients):
            accumulate(learned, gradients)
        if self.lagged:
            # Under DistributedDataParallel, which averages, each process leaves the whole sum; otherwise its own part.
            whole = g if self.network is not bare(self.network) else own
            seen.gradient = [None if part is None else value for part, value in zip(own, whole, strict=True)]

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
        self._clamp_alpha()
        anew = seen.alignment is not None and seen.gradient is None  # θ may have moved since, and is not lagged
        weights = self._judge_again(seen) if anew else seen.weights.detach()
        value = (weights * seen.losses).sum()
        if seen.gradient is not None:
            if seen.version != self._version():
                raise ValueError(
                    "the network's parameters have changed since observe(), but with lagged=True the gradient is that "
                    "at the old ones; call weighted_loss() before they change, or use lagged=False"
                )
            known = [(w, g) for w, g in zip(self.w.values(), seen.gradient, strict=True) if g is not None]
            value = _Given.apply(value.detach(), [g for _, g in known], *(w for w, _ in known))
        elif self.network is not bare(self.network):
            # DistributedDataParallel averages over the processes, but the loss is a sum over them.
            value = value * world_size()
        return value

    def _guarded(self, loss: Tensor) -> Tensor:
        """The loss, whose backward pass leaves no gradient in `.grad` that is not finite."""
        if loss.requires_grad:
            self.guard.watch(loss, list(self.w.values()))
        return loss

    def inner_gradient(self, seen: Observation, retain_graph: bool) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """∇ Σ V_i L_i at w: this process's part, with None for unused parameters, and the sum over all processes, with
        zeros where only other processes may use one."""
        refuse_reentrant(seen.losses)
        try:
            own = weighted_gradient(seen.losses, seen.weights, self.w, retain_graph)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise ValueError(
                    "a backward pass has used up the graph of this observation; call policy_backward() before "
                    "weighted_loss(seen).backward()"
                ) from None
            if "donated buffer" not in str(error):
                raise
            raise ValueError(
                "torch.compile gives up the buffers of a pass after one use, but this pass is needed twice; use "
                "lagged=True, or, before the first pass: import torch._functorch.config; "
                "torch._functorch.config.donated_buffer = False"
            ) from None
        if world_size() == 1:
            return own, own
        g = filled([None if part is None else part.clone() for part in own], list(self.w.values()))
        add_up(g)
        return own, list(g)

    def gradient_ahead(
        self, seen: Observation, g: list[Tensor | None], images: Tensor, labels: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """v = ∇ L_val at ŵ = w − α g, where g is what hooks on w make of it, taken back through them; and ⟨g, v⟩."""
        w = list(self.w.values())
        step = hooked(g, w)
        with moved(w, step, -self.alpha.detach()):
            v = self._validation_gradient(seen.replay, images, labels)
        return back_through_hooks(v, g, w), inner(step, v)

    def validation_gradient(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """∇ L_val at w itself, one tensor per parameter, with batch statistics as in training; leaves no trace."""
        self._check_validation(images, labels)
        return self._validation_gradient(Replay(self.device), images, labels)

    def alignment(self, seen: Observation, v: Sequence[Tensor]) -> Float[Tensor, " n"]:
        """s = J v: how much the loss of each sample falls with a step along −v."""
        return self.route(self._pass(seen), v)

    def step(
        self,
        images: Tensor,
        labels: Tensor,
        task_optimizer: Optimizer,
        policy_optimizer: Optimizer | None = None,
        validation_batches: Iterator[Batch] | None = None,
    ) -> Observation:
        """One whole iteration; if the policy is due, it takes the next validation batch."""
        if "optimizers" not in self._checked:
            self.check_optimizers(task_optimizer, policy_optimizer)
            if policy_optimizer is not None:
                self._checked.add("optimizers")
        due = self.due_at(self.steps + 1)
        if due and (policy_optimizer is None or validation_batches is None):
            raise ValueError("this step updates the policy; it needs the policy's optimizer and validation batches")
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

    def policy_parameters(self) -> list[nn.Parameter]:
        """θ, α, and the learned parameters of an extractor of the policy's own."""
        return [p for p in self._theta() if p.requires_grad]

    def _theta(self) -> list[nn.Parameter]:
        return [*chain.from_iterable(judge.parameters() for judge in self._judges()), self.alpha]

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
        alpha, skipped = self.alpha.detach().clone(), self.guard.count.clone()
        state = {"alpha": alpha, "steps": self.steps, "skipped": skipped, "rank": rank()}
        return state | {name: part.state_dict() for name, part in self._kept().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not {"alpha", "steps", "skipped"} <= state.keys():
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise KeyError(f"this is not the state of a learner (found: {found}); give what its state_dict() returned")
        parts = self._kept()
        for name in PARTS:
            if _kept_elsewhere(getattr(self, name)):
                continue  # older states have it too
            if (name in parts) != (name in state):
                one, other = ("saved state", "learner") if name in state else ("learner", "saved state")
                raise ValueError(
                    f"the {one} has a stateful {name}, but the {other} has none; build the learner with the same parts "
                    "as the saved one"
                )
        before = deepcopy(self.state_dict())
        try:
            self._load(state)
        except Exception:  # one part of the state is refused: nothing changes
            self._load(before)
            raise

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any]) -> None:
        for name, part in self._kept().items():
            part.load_state_dict(state[name])
        if rank() != state.get("rank", 0):
            for tally in getattr(self.sampler, "tallies", ()):  # those are another process's, and count once
                tally.zero_()
        self.alpha.copy_(state["alpha"])
        self.guard.count.copy_(state["skipped"])
        self.steps = int(state["steps"])
        self.alpha_watch.since = None

    def _kept(self) -> dict[str, Any]:
        """The parts whose state is kept."""
        parts = {name: getattr(self, name) for name in PARTS}
        return {name: p for name, p in parts.items() if hasattr(p, "state_dict") and not _kept_elsewhere(p)}

    # -- the parts of a step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _clamp_alpha(self) -> None:
        """α is a step size: an optimizer may take it below 0, but no update uses it there."""
        self.alpha.clamp_(min=0)

    def _outer_loss(self, seen: Observation, along: Tensor) -> Tensor:
        """This process's part of the loss that θ and α are learned by, given the alignment and ⟨g, v⟩."""
        assert seen.alignment is not None
        part = along if rank() == 0 else 0.0  # every process has the whole of it, and their gradients are summed
        objective = objective_of(self.policy)
        if objective is None:
            return outer_loss(self.alpha, seen.weights, seen.alignment, part)
        own = objective(seen.outputs, seen.alignment)
        return outer_loss(self.alpha, seen.weights.detach(), seen.alignment, part) + own

    def _judge(self, features: Tensor, t: Transformation, more: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        """The policy's outputs P and weights V, in the policy's own precision."""
        with torch.autocast(self.device.type, enabled=False):
            embedding = features.new_empty(len(t), 0) if is_blind(self.policy) else embed(t).to(features.dtype)
            outputs = self.policy(features, embedding, *more)
            if outputs.shape != (len(t),):
                raise ValueError(
                    f"the policy gives {tuple(outputs.shape)} for {len(t)} samples; it must give one number each"
                )
            if not normalizes(self.policy) and self._to_check("outputs"):
                check_outputs(outputs)
                self._checked.add("outputs")
            return outputs, weigh(self.policy, outputs)

    @torch.no_grad()
    def _judge_again(self, seen: Observation) -> Tensor:
        """The weights V of the policy as it is now, from the same draws of its layers and its extractor's, and from the
        same buffers."""
        with seen.judging.again(), ExitStack() as stack:
            for judge, buffers in zip(self._judges(), seen.judges, strict=True):
                stack.enter_context(undisturbed(judge, buffers))
            features, more = seen.features, seen.evidence
            if self.extractor is not None:
                features, more = self._extract(self.extractor, seen.inputs, seen.labels)
            return self._judge(features, seen.transformation, more)[1]

    def _judges(self) -> list[nn.Module]:
        """What outputs and weights come from: the policy, and its own extractor if it has one."""
        return [self.policy] if self.extractor is None else [self.policy, self.extractor]

    def _extract(self, extractor: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Features and evidence by an extractor of the policy's own."""
        with self.features.watched():
            logits = extractor(inputs)
        return self._features(len(inputs)), evidence(self.policy, logits, labels)

    def _features(self, n: int) -> Tensor:
        """Those of the pass just watched, in the policy's precision."""
        features = self.features.take()
        if len(features) != n:
            raise ValueError(
                f"the features of {n} images have shape {list(features.shape)}; name a layer with features= whose "
                "input has one row, map or list of tokens for each image, in this order"
            )
        return features.to(self.alpha.dtype)

    def _pass(self, seen: Observation) -> Pass:
        """The training pass of a mini-batch, for the routes, which repeat it at other parameters."""
        network, precision = bare(self.network), seen.replay.rounding(self._coarsest)

        def again() -> Tensor:
            with seen.replay.again(), undisturbed(network, seen.buffers):
                return network(seen.inputs).to(self.alpha.dtype)

        def losses(logits: Tensor) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):
                return self.loss(logits, seen.labels)

        return Pass(network, self.w, seen.logits, again, losses, precision)

    def _validation_gradient(self, replay: Replay, images: Tensor, labels: Tensor) -> list[Tensor]:
        """∇ L_val at the current parameters, with batch statistics as in training; buffers do not change."""
        network, w = bare(self.network), list(self.w.values())
        # Each process has its share of the validation batch; the sum over processes is the mean over the whole batch.
        count = total(torch.full_like(self.alpha.detach(), len(images)))
        v: list[Tensor] = []
        with undisturbed(network), at_expectation(network):  # backward too, where checkpointing repeats the pass
            for part in self._parts(len(images), count):
                some, theirs = images[part], labels[part]
                with torch.autocast(self.device.type, replay.precision, replay.autocast, cache_enabled=False):
                    losses = self._losses(network(self.prepare(some)), theirs, "validation")
                mean = torch.ones_like(losses) / count.to(losses.dtype)
                own = filled(weighted_gradient(losses, mean, self.w, retain_graph=False), w)
                v = list(torch._foreach_add(v, own)) if v else own
        add_up(v)
        return v

    def _parts(self, n: int, count: Tensor) -> list[slice]:
        """The parts of this process's share of a validation batch: each of m parts takes every m-th image of the global
        batch, so that a part and its batch statistics are the same for any number of processes."""
        if self.part is None:
            return [slice(n)]
        whole, begins = (n, 0) if world_size() == 1 else (int(count), share(int(count)).start)
        parts = -(-whole // self.part)
        return [slice((part - begins) % parts, n, parts) for part in range(parts)]

    @contextmanager
    def _frozen_unwritten(self) -> Iterator[None]:
        """In the first pass, see that the network does not write parameters itself."""
        with nullcontext() if "frozen" in self._checked else unwritten(bare(self.network)):
            yield
        self._checked.add("frozen")

    @contextmanager
    def _precision_noted(self, replay: Replay) -> Iterator[None]:
        """In the first pass, note the coarsest precision of the network's layers, unless an autocast around it says so.

        A compiled network cannot be inspected.
        """
        if "precision" in self._checked or replay.autocast or is_compiled(self.network):
            yield
            return
        with precisions(bare(self.network)) as found:
            yield
        self._coarsest = max(found, key=lambda dtype: torch.finfo(dtype).eps)
        self._checked.add("precision")

    def _losses(self, logits: Tensor, labels: Tensor, what: str) -> Tensor:
        if self._to_check(what):
            checks.check_logits(logits)
            (checks.check_labels if self.loss is cross_entropy else checks.check_highest)(logits, labels, what)
            self._checked.add(what)
        losses = self.loss(logits, labels)
        checks.check_losses(losses, labels, what)
        return losses

    def _default_generator(self) -> torch.Generator | None:
        """torch's default generator of the network's device; None stands for the CPU's."""
        return torch.cuda.default_generators[self.device.index or 0] if self.device.type == "cuda" else None

    def _to_unit_range(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            raise ValueError(
                f"the images are {short(images.dtype)}, but without prepare= they are divided by 255; give uint8 "
                "images for training and validation, or a prepare= that turns yours into the network's inputs"
            )
        return images.to(self.dtype) / 255

    def _version(self) -> int:
        """Grows whenever the network's parameters change."""
        return sum(w._version for w in self.w.values())

    def _trained(self) -> dict[str, nn.Parameter]:
        """The network's trained parameters; looked up at each step, as layers may be frozen or weights replaced."""
        parameters = {name: w for name, w in bare(self.network).named_parameters() if w.requires_grad}
        if not parameters:
            raise ValueError("no parameter of the network requires a gradient; there is nothing to train")
        return parameters

    # -- what may go wrong --------------------------------------------------------------------------------------------

    def _to_check(self, what: str) -> bool:
        """Whether these values are still to be checked: on a GPU only once, because the host has to wait for them."""
        return self.device.type != "cuda" or what not in self._checked

    def _check_validation(self, images: Tensor, labels: Tensor) -> None:
        check_batch(images, labels, self.device, "validation")
        way = ", as prepare= gets them: leave normalization to it, or scale or clamp them in the loader"
        self._check_range(images, "validation", way)

    def _check_range(self, images: Tensor, what: str, way: str) -> None:
        if images.is_floating_point() and self._to_check(f"{what} images"):
            check_range(images, f"the {what} images hold", f"they must lie in [0, 1]{way}")
            self._checked.add(f"{what} images")

    def check_optimizers(self, task: Optimizer, policy: Optimizer | None) -> None:
        """Refuse optimizers in the wrong order."""
        checks.check_optimizers(task, policy, bare(self.network).parameters(), self._theta())

    @torch.no_grad()
    def _check_repeatable(self, seen: Observation) -> None:
        """Check once that the pass, repeated at w as the route repeats it, gives the same logits: the derivative of a
        pass with other draws is not that of this one."""
        training, eager = self._pass(seen), self.route is not ROUTES["difference"]
        with not_compiled() if eager else nullcontext():
            again, logits = training.again(), seen.logits.detach()
        if norm([again - logits]) > training.precision**0.5 * norm([logits]):  # far more than rounding
            name = self.route.__name__
            way = ", or use route='difference': run eagerly, compiled dropout draws other numbers" if eager else ""
            if not eager and any(hasattr(module, "_orig_mod") for module in self.network.modules()):
                way = (
                    "; compiled dropout draws from them if, before the first pass, you import torch._inductor.config "
                    "and set torch._inductor.config.fallback_random = True"
                )
            raise ValueError(
                f"repeating the training pass gives different logits, so route={name!r} cannot work; keep the network "
                "in the mode that it had in observe(), and its state in buffers, and draw random numbers from torch's, "
                f"numpy's or Python's own generators{way}"
            )
        if norm([logits]) > 0:  # those of a fresh head may be zero, which any pass repeats
            self._checked.add("repeatable")


def _kept_elsewhere(part: object) -> bool:
    return getattr(part, "kept_elsewhere", False)


def accumulate(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Add to `.grad`, as a backward pass does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # A copy: two parameters that are added to each other have one gradient, which clipping in place scales twice.
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def cross_entropy(logits: Tensor, labels: Tensor) -> Float[Tensor, " n"]:
    return F.cross_entropy(logits, labels, reduction="none")


class _Given(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, None, *torch._foreach_mul(ctx.gradient, outer[0])
