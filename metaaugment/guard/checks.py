"""What a learner refuses: wrong parts, mini-batches, logits, labels and losses, each with the way out."""

import inspect
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]
STARTS_OVER = "one iterator that starts over at its end: itertools.chain.from_iterable(itertools.repeat(loader))"


def check_kinds(network: object, sampler: object, policy: object) -> None:
    for name, module in (("network", network), ("policy", policy)):
        if not isinstance(module, nn.Module):
            raise ValueError(f"the {name} is a {type(module).__name__}; it must be a torch.nn.Module")
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
