"""A step as one replayed CUDA graph: sampling, augmentation, all passes and both updates, without the host.

At the paper's batch of 128, small networks wait for kernel launches; replayed, joint training can be faster than
uncaptured training without a policy.
"""

import gc
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from metaaugment.guard.checks import Batch, check_due, next_batch, short
from metaaugment.learner import Learner
from metaaugment.observation import Observation

# Steps of each kind that first run uncaptured: optimizers create their state, cuDNN and Triton choose and compile.
WARM_UP = 3
# Passes of one step that draw the same numbers: the training pass and the alignment's, or the policy's two passes.
ALIKE = 2


class CapturedStep:
    """`learner.step` as a CUDA graph, with the same results from the same draws: one graph for steps that update the
    policy, and one for the others.

    Mini-batches must keep their size. Both optimizers must be capturable: build them with fused=True.
    Their learning rates may change from step to step, by a scheduler or by hand. What a call returns is overwritten by
    the next call.
    """

    def __init__(self, learner: Learner, task_optimizer: Optimizer, policy_optimizer: Optimizer | None = None) -> None:
        if learner.device.type != "cuda":
            raise ValueError(f"the network is on {learner.device}; a step can be captured on a CUDA device only")
        if learner.generator is None or learner.generator.device.type != "cuda":
            raise ValueError("the learner draws on the CPU; give it a generator on the network's device, or none")
        self.learner = learner
        self.task_optimizer, self.policy_optimizer = task_optimizer, policy_optimizer
        optimizers = [o for o in (task_optimizer, policy_optimizer) if o is not None]
        groups = list(chain.from_iterable(optimizer.param_groups for optimizer in optimizers))
        if not all(group.get("fused") for group in groups):
            raise ValueError("an optimizer is not fused, which a captured step needs; build it with fused=True")
        self.rates = [(group, torch.tensor(float(group["lr"]), device=learner.device)) for group in groups]
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Observation]] = {}
        self.calls = {True: 0, False: 0}
        self.stream = torch.cuda.Stream(learner.device)

    def __call__(
        self, images: Tensor, labels: Tensor, validation_batches: Iterator[Batch] | None = None
    ) -> Observation:
        due = self.learner.due_at(self.learner.steps + 1)
        check_due(due, self.policy_optimizer, validation_batches)
        batch = (images, labels, *(next_batch(validation_batches) if due and validation_batches is not None else ()))
        self._set_rates()
        self.calls[due] += 1
        if self.calls[due] <= WARM_UP:
            return self._warm_up(batch)
        if due not in self.graphs:
            self.graphs[due] = self._capture(batch)
        graph, static, seen = self.graphs[due]
        for kept, new in zip(static, batch, strict=True):
            if (kept.dtype, kept.shape) != (new.dtype, new.shape):
                raise ValueError(
                    f"a batch is {short(new.dtype)} {list(new.shape)}, but the captured step was made for "
                    f"{short(kept.dtype)} {list(kept.shape)}; drop the last, smaller batch, or use learner.step for it"
                )
            kept.copy_(new)
        graph.replay()
        self.learner.steps += 1
        self.learner.watch_alpha()
        return seen

    def _warm_up(self, batch: tuple[Tensor, ...]) -> Observation:
        """An uncaptured step, on the stream that is captured later: autograd remembers streams."""
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            seen = self._step(*batch)
        main.wait_stream(self.stream)
        return seen

    def _capture(self, batch: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Observation]:
        learner = self.learner
        static = tuple(value.clone() for value in batch)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[learner.device.index or 0]
        for series in ("network", "policy"):
            seed = int(torch.randint(0, 2**62, ()))
            alike = [generator.clone_state() for _ in range(ALIKE)]
            for state in alike:
                state.manual_seed(seed)
                graph.register_generator_state(state)
            learner.states[series] = alike
        if learner.generator is not generator:
            graph.register_generator_state(learner.generator)
        steps = learner.steps
        collects = gc.isenabled()
        gc.disable()  # freeing an object during the capture, such as another graph, would break it
        try:
            # Other threads keep using the device: a DataLoader's pins memory, which would otherwise break the capture.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                seen = self._step(*static)
        finally:
            if collects:
                gc.enable()
            learner.states.clear()
            learner.steps, learner.guard.found = steps, None
        return graph, static, seen

    def _step(self, images: Tensor, labels: Tensor, *validation: Tensor) -> Observation:
        validation_batches = iter([(validation[0], validation[1])]) if validation else None
        return self.learner.step(images, labels, self.task_optimizer, self.policy_optimizer, validation_batches)

    def _set_rates(self) -> None:
        """Keep learning rates on the device; a number that a scheduler or user has set is copied there."""
        for group, rate in self.rates:
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate


def step_of(
    learner: Learner, task_optimizer: Optimizer, policy_optimizer: Optimizer | None = None, *, captured: bool
) -> Callable[..., Observation]:
    """`learner.step` with these optimizers, captured or eager, as a function of a batch and the validation batches."""
    if captured:
        return CapturedStep(learner, task_optimizer, policy_optimizer)

    def eager(images: Tensor, labels: Tensor, validation_batches: Iterator[Batch] | None = None) -> Observation:
        return learner.step(images, labels, task_optimizer, policy_optimizer, validation_batches)

    return eager
