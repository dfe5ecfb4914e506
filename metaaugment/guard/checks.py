"""What a learner refuses: wrong parts, mini-batches, logits, labels and losses, each with the way out."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metaaugment.transformation import check_range

Batch = tuple[Tensor, Tensor]
STARTS_OVER = "one iterator that starts over at its end: itertools.chain.from_iterable(itertools.repeat(loader))"


class Checks:
    """What has been checked: values only once on a GPU, because the host has to wait for them, and some things once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.passed: set[str] = set()

    def values(self, what: str, check: Callable[[], object]) -> None:
        if self.device.type != "cuda":
            check()
        else:
            self.once(what, check)

    def once(self, what: str, check: Callable[[], object]) -> None:
        """A check that returns False could not tell, and is made again."""
        if what not in self.passed and check() is not False:
            self.passed.add(what)

    def range(self, images: Tensor, what: str, way: str) -> None:
        """That floating-point images lie in [0, 1]."""
        if images.is_floating_point():
            found, allowed = f"the {what} images hold", f"they must lie in [0, 1]{way}"
            self.values(f"{what} images", lambda: check_range(images, found, allowed))

    def training(self, images: Tensor) -> None:
        if self.device.type != "cpu":  # there `apply` checks every batch, elsewhere it clamps
            self.range(images, "training", ": bring them there by before=, or in the loader")

    def validation(self, images: Tensor, labels: Tensor) -> None:
        check_batch(images, labels, self.device, "validation")
        way = ", as prepare= gets them: leave normalization to it, or scale or clamp them in the loader"
        self.range(images, "validation", way)


def check_settings(route: str, routes: Iterable[str], counts: Mapping[str, int | None], alpha: float) -> None:
    if route not in routes:
        raise ValueError(f"unknown route {route!r}; choose one of {', '.join(routes)}")
    for name, value in counts.items():
        if value is not None or name != "part":
            check_count(name, value)
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha is {alpha:g}; it must be finite, and 0 or above")


def check_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


def check_kinds(network: object, sampler: object, policy: object) -> None:
    for name, module in (("network", network), ("policy", policy)):
        if not isinstance(module, nn.Module):
            raise ValueError(f"the {name} is a {type(module).__name__}; it must be a torch.nn.Module")
    if getattr(network, "static_graph", False):
        raise ValueError("DistributedDataParallel's static_graph=True allows one backward pass per step; drop it")
    if isinstance(sampler, type) or not hasattr(sampler, "sample"):
        what = f"the class {sampler.__name__}" if isinstance(sampler, type) else f"a {type(sampler).__name__}"
        raise ValueError(f"the sampler is {what}; give an object that draws, such as TransformationSampler()")
    if not hasattr(sampler, "record"):
        raise ValueError(
            f"the sampler, a {type(sampler).__name__}, has no record(); a sampler has sample(), record() and "
            "update(), of which the last two may do nothing"
        )


def check_parts(
    network: Mapping[str, nn.Parameter],
    policy: nn.Module,
    extractor: nn.Module | None,
    loss: object,
    lagged: bool,
    dtype: torch.dtype,
) -> None:
    """Refuse parts that do not fit each other; `dtype` is that of the policy, which follows from the network's."""
    theirs = next((p.dtype for p in policy.parameters() if p.requires_grad), dtype)
    if theirs != dtype:
        ours = next(iter(network.values())).dtype.to_real()
        raise ValueError(
            f"the policy's parameters are {theirs}; for a network of {ours} they must be {dtype}: convert the policy "
            f"with .to({dtype})"
        )
    shared = set() if extractor is None else set(extractor.parameters()) & set(network.values())
    if shared:
        raise ValueError(
            f"the extractor shares {len(shared)} parameters with the task network, which would be learned twice; "
            "leave out extractor= to see through the task network, or give a copy of it"
        )
    own = isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters())
    if own and lagged:
        raise ValueError("the loss has parameters of its own, which get no gradient with lagged=True; use lagged=False")


def check_optimizers(
    task: Optimizer, policy: Optimizer | None, w: Iterable[nn.Parameter], theta: Iterable[nn.Parameter]
) -> None:
    """Refuse optimizers that cannot make a step of ours, and those in the wrong order.

    Parameters of neither side, such as master copies, decide nothing.
    """
    sides = {id(parameter) for parameter in w}, {id(parameter) for parameter in theta}
    for name, optimizer, (mine, others) in (("task", task, sides), ("policy", policy, sides[::-1])):
        groups = getattr(optimizer, "param_groups", ())
        has = {id(parameter) for group in groups for parameter in group["params"]}
        if _wants_closure(optimizer):
            raise ValueError(
                f"the {name} optimizer is {type(optimizer).__name__}, whose step computes losses itself; use one that "
                "follows the gradient that it is given, such as SGD or AdamW"
            )
        if has & others and not has & mine:
            raise ValueError(
                f"the {name} optimizer has the other one's parameters; give the task network's optimizer first, "
                "then the one for learner.policy_parameters()"
            )


def _wants_closure(optimizer: object) -> bool:
    """Whether its step cannot be called without a function that computes the loss anew, as that of LBFGS."""
    # Of its class: a scheduler replaces its own.
    step = getattr(type(optimizer), "step", None)
    closure = inspect.signature(step).parameters.get("closure") if inspect.isfunction(step) else None
    return closure is not None and closure.default is closure.empty


def check_due(due: bool, policy_optimizer: object, validation_batches: object) -> None:
    if due and (policy_optimizer is None or validation_batches is None):
        raise ValueError("this step updates the policy; it needs the policy's optimizer and validation batches")


def next_batch(batches: Iterator[Batch]) -> Batch:
    """The next of the validation batches given to `step`."""
    if not isinstance(batches, Iterator):
        raise ValueError(f"validation_batches is a {type(batches).__name__}; give {STARTS_OVER}")
    try:
        batch = next(batches)
    except StopIteration:
        raise ValueError(f"the validation batches have run out; give {STARTS_OVER}") from None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(f"a validation batch is a {type(batch).__name__}{length}; it must be (images, labels)")
    images, labels = batch
    return images, labels


def check_batch(images: Tensor, labels: Tensor, device: torch.device, what: str) -> None:
    for name, value in (("images", images), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise ValueError(f"the {what} {name} are a {type(value).__name__}; give a torch tensor")
        if value.device != device:
            raise ValueError(
                f"the {what} {name} are on {value.device}, but the network is on {device}; "
                f"move them there with .to({str(device)!r})"
            )
        if value.ndim == 0:
            raise ValueError(f"the {what} {name} are one number; give a mini-batch")
    if len(images) == 0:
        raise ValueError(f"the {what} batch is empty; give at least one image")
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} {what} images but {len(labels)} labels; give each image one")
    if labels.ndim > 2:
        raise ValueError(
            f"the {what} labels have shape {list(labels.shape)}, as masks have; transformations move images, but no "
            f"masks, so a label is one number or one row per image: [{len(labels)}], or [{len(labels)}, classes]; "
            "flatten what is no mask"
        )


def check_pair(logits: Tensor, labels: Tensor, what: str, by_class: bool) -> None:
    """Logits and labels, where these must be classes or may be what a user's own loss takes."""
    check_logits(logits)
    (check_labels if by_class else check_highest)(logits, labels, what)


def check_fresh(alignment: Tensor | None, training: torch.dtype, validation: torch.dtype) -> None:
    """That an observation has not been used yet, and has images of the same kind as the validation images."""
    if alignment is not None:
        raise ValueError(
            "the policy has had its gradient from this observation; observe again, or give policy_backward() all "
            "validation images at once"
        )
    if validation != training:
        raise ValueError(
            f"the validation images are {short(validation)}, but the training images {short(training)}; give both the "
            "same dtype, since both go through prepare="
        )


def check_unmoved(before: int, now: int) -> None:
    """That the version of the network's parameters is the one that a lagged gradient was taken at."""
    if before != now:
        raise ValueError(
            "the network's parameters have changed since observe(), but with lagged=True the gradient is that "
            "at the old ones; call weighted_loss() before they change, or use lagged=False"
        )


def check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the network returns {found}; it must return one tensor of logits [n, classes]: wrap it in a module that "
            "returns only these"
        )


def short(dtype: torch.dtype) -> str:
    """As users write it: float32."""
    return str(dtype).removeprefix("torch.")


def check_highest(logits: Tensor, labels: Tensor, what: str) -> None:
    """For a user's own loss, which may ignore negative labels: int64 labels must be below the number of classes,
    because on a GPU a larger one aborts the process."""
    classes = logits.shape[1]
    if labels.shape == logits.shape[:1] and labels.dtype == torch.int64 and 1 < classes <= int(labels.max()):
        raise ValueError(
            f"a {what} label is {int(labels.max())}, but the network has {classes} classes, 0 to {classes - 1}; "
            "labels that are not class numbers must have a dtype other than int64"
        )


def check_labels(logits: Tensor, labels: Tensor, what: str) -> None:
    """Labels must be class numbers or class probabilities, as cross-entropy takes them."""
    classes = logits.shape[1]
    numbers = labels.shape == logits.shape[:1] + logits.shape[2:] and labels.dtype in (torch.int64, torch.uint8)
    if not numbers and not (labels.shape == logits.shape and labels.is_floating_point()):
        raise ValueError(
            f"the {what} labels are {short(labels.dtype)} {list(labels.shape)}; they must be "
            f"class numbers, int64 [{len(logits)}], or probabilities, floating point [{len(logits)}, {classes}]"
        )
    if not numbers:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"a {what} label is {low if low < 0 else high}, but the network has {classes} classes, 0 to {classes - 1}; "
            "training and validation data must share the network's classes"
        )


def check_losses(losses: Tensor, labels: Tensor, what: str) -> None:
    if losses.shape != labels.shape[:1]:
        way = "reduction='none'"
        if losses.ndim > 1 and len(losses) == len(labels):
            way = "take its .mean(1)" if losses.ndim == 2 else "take its .flatten(1).mean(1)"
        raise ValueError(
            f"the loss has shape {tuple(losses.shape)} for {len(labels)} {what} samples; "
            f"it must give one number per sample ({way})"
        )


def check_outputs(outputs: Tensor) -> None:
    if (outputs < 0).any():
        raise ValueError(
            f"the policy gives {outputs.min().item():.3g} for a sample; outputs must be positive: end the policy with "
            "a sigmoid or an exponential"
        )


@contextmanager
def spent_graphs_named() -> Iterator[None]:
    """Say what to do where the graph of the training pass cannot be used (again)."""
    try:
        yield
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
