"""The file of a learned policy: a sealed tree of θ, w, p and their source; `docs/policy-file.md` has the format."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metaaugment.distributed import plain
from metaaugment.files import sealed
from metaaugment.guard.faults import first_line, full_memory
from metaaugment.learned.source import Source, space_hash
from metaaugment.networks import NETWORKS
from metaaugment.networks import network as build_network
from metaaugment.ops import SPACES, Space
from metaaugment.policy import HEADS, KINDS, POLICIES, innermost, name_of
from metaaugment.policy import build as build_policy
from metaaugment.transformation import FLOAT_TYPES

FORMAT = 1
KIND = "policy"
WAY_OUT = "restore an intact copy of it, or export the policy again"
NAME_ONE = "name a policy file; metaaugment export RUN FILE makes one from a run"
# Fields of a source that a file holds as they are, and all fields of a file.
SOURCE_FIELDS = ("network", "num_classes", "channels", "mean", "std", "fill", "size", "layer")
FIELDS = ("p", "policy", "theta", "w", *SOURCE_FIELDS, "space", "provenance")
# What a file holds, as `LearnedPolicy` takes it: p, its source, θ and w as modules (neither for p alone), provenance.
Content = tuple[Tensor, Source, nn.Module | None, nn.Module | None, Mapping[str, Any]]


class Foreign(ValueError):
    """An intact policy that needs something that is missing here; the message says what would help."""


def write(file: Path, content: Content, half: bool) -> None:
    """Write the file whole or not at all; with `half`, θ and w in float16."""
    p, source, policy, extractor, provenance = content
    tree = {
        "format": FORMAT,
        "p": p,
        "policy": None if policy is None else policy_name(policy),
        "theta": _stored("theta", policy, half),
        "w": _stored("w", extractor, half),
        **{field: getattr(source, field) for field in SOURCE_FIELDS},
        "space": {"name": source.space.name, "sha256": space_hash(source.space)},
        "provenance": provenance,
    }
    sealed.save(file, KIND, tree)


@contextmanager
def reading(file: Path) -> Iterator[dict[str, Any]]:
    """The tree of a file; errors in reading it, or in what is made of it inside, become `Damaged`, naming the file.

    Memory that is full says nothing of the file, so that error stays what it is.
    """
    try:
        tree = sealed.load(file, KIND)
    except sealed.OtherKind as error:
        raise sealed.Damaged(file, error.reason, NAME_ONE) from None
    except sealed.Damaged as error:
        raise sealed.Damaged(file, error.reason, WAY_OUT) from None
    except OSError as error:
        raise sealed.Damaged(file, f"cannot be read ({error.strerror or error})", NAME_ONE) from None
    try:
        yield tree
    except Foreign as error:
        raise sealed.Damaged(file, f"cannot be used here: {error}") from None
    except sealed.MALFORMED as error:
        if full_memory(error):
            raise
        raise sealed.Damaged(file, f"is not an intact policy: {first_line(error)}", WAY_OUT) from error


def content(tree: Mapping[str, Any], extractor: nn.Module | None, space: Space | None) -> Content:
    """The content of a tree, built with the user's own network and space if it needs them."""
    if not isinstance(tree, dict) or "format" not in tree:
        raise ValueError("it does not say its format")
    if type(tree["format"]) is not int or tree["format"] != FORMAT:
        raise Foreign(
            f"it has format {tree['format']!r}, but this version of metaaugment reads {FORMAT}; use the version that "
            "wrote it, or export the policy again"
        )
    if missing := [field for field in FIELDS if field not in tree]:
        raise ValueError(f"the field {missing[0]!r} is missing")
    values: dict[str, Any] = {
        name: tuple(tree[name]) if isinstance(tree[name], list) else tree[name] for name in SOURCE_FIELDS
    }
    source = Source(**values, space=_space_of(tree["space"], space))
    if tree["policy"] is None:
        if tree["theta"] or tree["w"]:
            raise ValueError("it has the tensors of a policy, but does not name it")
        if extractor is not None:
            raise Foreign("it holds p alone and needs no network; leave out extractor=")
        return tree["p"], source, None, None, tree["provenance"]
    policy = copied_policy(tree["policy"], tree["theta"], source.num_classes)
    try:
        network = copied_extractor(source, tree["w"], extractor)
    except ValueError as error:
        if extractor is None:
            raise
        raise Foreign(f"{error}; pass the extractor that it was learned with") from None
    return tree["p"], source, policy, network, tree["provenance"]


def _space_of(recorded: Mapping[str, str], given: Space | None) -> Space:
    name, recorded_hash = recorded["name"], recorded["sha256"]
    if given is None and name not in SPACES:
        raise Foreign(f"unknown space {name!r}; pass it with space=, or use one of {', '.join(SPACES)}")
    space = SPACES[name] if given is None else given
    if space_hash(space) != recorded_hash:
        raise Foreign(
            f"magnitudes meant something else when it was learned: its space {name!r} has the SHA-256 {recorded_hash}, "
            f"and {space.name!r} here has {space_hash(space)}; use the version of metaaugment that wrote it"
        )
    return space


# -- modules ----------------------------------------------------------------------------------------------------------


def policy_name(policy: nn.Module) -> str:
    """A policy's name in `POLICIES`; ValueError if it has none."""
    name = name_of(policy)
    if name is not None:
        return name
    inner = innermost(policy)
    if type(inner) in KINDS.values() and inner.head not in HEADS.values():
        raise ValueError(
            f"a policy with the head {inner.head!r} cannot be saved; use torch.sigmoid or "
            "metaaugment.policy.exponential"
        )
    raise ValueError(f"a policy of class {type(policy).__name__} cannot be saved; use one of {', '.join(POLICIES)}")


def copied_policy(name: str, tensors: Mapping[str, Tensor], num_classes: int) -> nn.Module:
    """A policy of this name, with copies of these tensors."""
    if name not in POLICIES:
        raise Foreign(f"unknown policy {name!r}; this version of metaaugment has {', '.join(POLICIES)}")
    wrapper, _, _ = POLICIES[name]
    weight = tensors.get("policy.feature.weight" if wrapper else "feature.weight")
    if weight is None or weight.ndim != 2:
        raise ValueError("the tensor feature.weight of the policy is missing, or is not a matrix")
    with torch.device("meta"):  # without memory of its own
        policy = build_policy(name, weight.shape[1], weight.shape[0], num_classes).float()
    return _fitted(policy, tensors, "theta")


def copied_extractor(source: Source, tensors: Mapping[str, Tensor], own: nn.Module | None) -> nn.Module:
    """The network that a policy sees through, with copies of these tensors: a copy of the user's, or one of ours."""
    if own is not None:
        if not isinstance(own, nn.Module):
            raise Foreign(f"extractor is {own!r}; give the network itself, an nn.Module")
        try:
            own = deepcopy(plain(own))
        except (RuntimeError, TypeError) as error:  # pruning and the older weight_norm leave tensors that refuse it
            if full_memory(error):
                raise
            raise Foreign(
                f"extractor cannot be copied ({first_line(error)}); make what computes its weights permanent, as "
                "torch.nn.utils.prune.remove does"
            ) from None
        return _fitted(own.float(), tensors, "w")
    if source.network is None:
        raise Foreign(
            "its extractor is the user's own network; load it in Python with extractor=network, where "
            ".sampler_only().save(FILE) writes a policy that needs none"
        )
    if source.network not in NETWORKS:
        raise Foreign(
            f"unknown network {source.network!r}; pass it with extractor=, or use one of {', '.join(sorted(NETWORKS))}"
        )
    with torch.device("meta"):
        network = build_network(source.network, source.num_classes, source.channels).float()
    return _fitted(network, tensors, "w")


def _fitted(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> nn.Module:
    """The module with its tensors replaced by copies of these, in float32; they must be exactly those that it needs."""
    needed = module.state_dict()
    for name, own in needed.items():
        if not isinstance(own, Tensor):
            raise ValueError(f"{what}/{name} of the network is not a tensor, so a file cannot hold it")
        if not isinstance(found := tensors.get(name), Tensor):
            raise ValueError(f"the tensor {what}/{name} is missing")
        if found.shape != own.shape:
            raise ValueError(f"the tensor {what}/{name} is {tuple(found.shape)}; it must be {tuple(own.shape)}")
        if found.dtype != own.dtype and not (found.dtype in FLOAT_TYPES and own.is_floating_point()):
            raise ValueError(f"the tensor {what}/{name} has dtype {found.dtype}; it must be {own.dtype}")
    if unknown := sorted(tensors.keys() - needed.keys()):
        raise ValueError(f"the tensor {what}/{unknown[0]} has no place in the network")
    # Copies, because a tensor that was read may be a view of the file, which may change later.
    copies = {name: tensors[name].detach().to(own.dtype, copy=True) for name, own in needed.items()}
    module.load_state_dict(copies, assign=True)
    return module


def _stored(what: str, module: nn.Module | None, half: bool) -> dict[str, Tensor]:
    state = {} if module is None else module.state_dict()
    if not half:
        return dict(state)
    stored = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    for name, value in stored.items():
        if not value.isfinite().all():
            raise ValueError(
                f"{what}/{name} holds {state[name].abs().max():g}, too large for half precision; save it without half"
            )
    return stored
