"""Repeating a pass of the network exactly, and without a trace: the same draws of dropout and shake layers, the same
precision, and buffers and generators as they were."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metaaugment.batch_norm import GlobalBatchNorm
from metaaugment.distributed import bare, is_compiled

Buffers = dict[nn.Module, dict[str, Tensor | None]]
KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, GlobalBatchNorm.forward)


def capturing(device: torch.device) -> bool:
    """Whether a step is being captured in a CUDA graph, so that the host must not wait for a value."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def default_generator(device: torch.device) -> torch.Generator | None:
    """torch's default generator of a GPU; None stands for the CPU's."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None


class Replay:
    """What determines a pass besides its inputs, recorded when the pass is first made.

    While a step is captured in a CUDA graph, a generator's state cannot be read. Instead, passes that are to draw the
    same numbers each have one of `states`, in turn: generator states with the same seed.
    """

    def __init__(self, device: torch.device, states: Sequence[torch.Generator] = ()) -> None:
        self.device = device
        self.states = iter(states)
        self.precision = torch.get_autocast_dtype(device.type)
        self.autocast = torch.is_autocast_enabled(device.type)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Make the pass for the first time, as if nothing were recorded."""
        if capturing(self.device):
            with self._next_state():
                yield
            return
        self.cpu_state = torch.get_rng_state()
        self.python_state, self.numpy_state = random.getstate(), np.random.get_state()
        if self.device.type == "cuda":
            self.cuda_state = torch.cuda.get_rng_state(self.device)
        yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Repeat the pass; afterwards the generators go on as if it had not been made."""
        # Without autocast's cache, which would return casts of the parameters from before they were moved.
        with torch.autocast(self.device.type, self.precision, self.autocast, cache_enabled=False):
            if capturing(self.device):
                with self._next_state():
                    yield
                return
            with no_draws(self.device):
                torch.set_rng_state(self.cpu_state)
                random.setstate(self.python_state)
                np.random.set_state(self.numpy_state)
                if self.device.type == "cuda":
                    torch.cuda.set_rng_state(self.cuda_state, self.device)
                yield

    def rounding(self, dtype: torch.dtype) -> float:
        """The relative error of one operation of the pass; `dtype` is the coarsest that the network itself uses."""
        if self.autocast:
            return max(torch.finfo(self.precision).eps, torch.finfo(dtype).eps)
        if dtype == torch.float32 and self.device.type == "cuda" and torch.backends.cudnn.allow_tf32:
            return 2**-10  # tf32
        return torch.finfo(dtype).eps

    @contextmanager
    def _next_state(self) -> Iterator[None]:
        generator = torch.cuda.default_generators[self.device.index or 0]
        main = generator.graphsafe_get_state()
        generator.graphsafe_set_state(next(self.states))
        try:
            yield
        finally:
            generator.graphsafe_set_state(main)


@contextmanager
def no_draws(device: torch.device) -> Iterator[None]:
    """Afterwards the default generators go on as if unused: torch's on the CPU and on the device, and Python's and
    numpy's, from which some layers draw (stochastic depth)."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def seeded(device: torch.device, seed: int, own: torch.Generator | None = None) -> Iterator[None]:
    """Draws inside are those of this seed; afterwards the default generators, and `own`, go on as if unused."""
    before = None if own is None else own.get_state()
    with no_draws(device):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if (default := default_generator(device)) is not None:
            default.manual_seed(seed)
        if own is not None:
            own.manual_seed(seed)
        try:
            yield
        finally:
            if own is not None and before is not None:
                own.set_state(before)


@contextmanager
def undisturbed(*modules: nn.Module, buffers: Sequence[Buffers] | None = None) -> Iterator[None]:
    """Passes inside leave no trace in running statistics, in other buffers, or in tensors that modules keep as plain
    attributes (a balancing loss); they start from `buffers`, of each module, if given.

    Not by restoring them: once a buffer is written, autograd rejects the training pass's retained graph as stale.
    Instead, batch normalisation is told not to track, and other modules work on copies.
    """
    with ExitStack() as stack:
        for module, of_one in zip(modules, buffers or [None] * len(modules), strict=True):
            stack.enter_context(_undisturbed(module, of_one))
        yield


@contextmanager
def _undisturbed(network: nn.Module, buffers: Buffers | None) -> Iterator[None]:
    modules = list(network.modules())
    tracking = [m for m in modules if does_not_read_statistics(m) and m.training and m.track_running_stats]
    now = other_buffers(network)
    kept_as_attributes = [{n: v for n, v in vars(m).items() if isinstance(v, Tensor)} for m in modules]
    try:
        for module in tracking:
            module.track_running_stats = False
        for module, kept in (now if buffers is None else buffers).items():
            module._buffers.update({name: b if b is None else b.clone() for name, b in kept.items()})
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True
        for module, kept in now.items():
            module._buffers.update(kept)
        for module, attributes in zip(modules, kept_as_attributes, strict=True):
            vars(module).update(attributes)


def other_buffers(network: nn.Module) -> Buffers:
    """The buffers of all modules but those of batch normalisation that do not read theirs in training."""
    return {m: dict(m._buffers) for m in network.modules() if m._buffers and not does_not_read_statistics(m)}


def copied_buffers(network: nn.Module) -> Buffers:
    """Copies of the buffers that a pass may read and write; a repeated pass starts from them."""
    kept = other_buffers(network)
    return {m: {n: b if b is None else b.clone() for n, b in buffers.items()} for m, buffers in kept.items()}


@contextmanager
def unwritten(network: nn.Module) -> Iterator[None]:
    """Refuse a network whose pass inside writes parameters: repeated passes would, too, while buffers are kept."""
    frozen = [(n, p, p._version) for n, p in network.named_parameters() if not p.requires_grad and not p.is_inference()]
    yield
    for name, parameter, version in frozen:
        if parameter._version != version:
            raise ValueError(
                f"the network's pass changes parameter {name!r}, which has no gradient; make it a buffer, which "
                "the extra passes leave as it is"
            )


def does_not_read_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether it is batch normalisation that in training only writes its statistics, and only while it tracks them.

    A subclass with a forward of its own (ghost batch normalisation, batch renormalisation) may do otherwise.
    """
    return isinstance(module, _BatchNorm) and type(module).forward in KNOWN_FORWARDS


class FirstPass:
    """What the first pass of a network shows: that it writes no parameters, and the coarsest precision of its layers.

    A network may use autocast in its own `forward`, which does not show from outside. A compiled network cannot be
    inspected, and where autocast is on around the pass, that decides.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.coarsest = _coarsest(w.dtype for w in bare(network).parameters() if w.requires_grad)
        self.unwritten = self.precise = False

    @contextmanager
    def watched(self, replay: Replay) -> Iterator[None]:
        network = bare(self.network)
        look = not (self.precise or replay.autocast or is_compiled(self.network))
        with ExitStack() as stack:
            found = stack.enter_context(precisions(network)) if look else None
            if not self.unwritten:
                stack.enter_context(unwritten(network))
            yield
        self.unwritten = True
        if found is not None:
            self.coarsest, self.precise = _coarsest(found), True


def _coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def precisions(network: nn.Module) -> Iterator[set[torch.dtype]]:
    """The precisions of a network's parameters and, after the passes inside, of its layers' outputs."""
    found = {w.dtype for w in network.parameters() if w.is_floating_point()}

    def note(layer: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            found.add(output.dtype)

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
