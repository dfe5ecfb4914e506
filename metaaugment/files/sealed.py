"""Files that are whole or refused: tensors and a JSON state under one SHA-256, in the safetensors format.

Nothing in such a file is executed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from metaaugment.files.atomic import write_atomically
from metaaugment.guard.faults import first_line

TENSOR = "@tensor"  # the key of the object that stands for a tensor and holds its name
# What reading a tree of the wrong form may raise.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
MOST_CHARACTERS = 500  # of a reason


class Damaged(ValueError):
    """A file that is not what was written; `reason` says how, on one line whatever the file contains."""

    def __init__(self, file: Path, reason: str, way_out: str = "") -> None:
        reason = " ".join(reason.split())
        reason = reason if len(reason) <= MOST_CHARACTERS else f"{reason[:MOST_CHARACTERS]} …"
        super().__init__(f"{file} {reason}" + (f"; {way_out}" if way_out else ""))
        self.file, self.reason = file, reason


class OtherKind(Damaged):
    """An intact file of another kind."""


def save(file: Path, kind: str, tree: Mapping[str, Any]) -> None:
    """Write a tree of dictionaries and lists whose leaves are tensors and JSON values."""
    write(file, kind, *copied(tree))


def copied(tree: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The tree with names in place of its tensors, and copies of the tensors on the CPU: what `write` takes."""
    tensors: dict[str, Tensor] = {}
    return _pack(tree, tensors, ""), tensors


def part(tree: Any, tensors: Mapping[str, Tensor], name: str) -> tuple[Any, dict[str, Tensor]]:
    """One entry of a tree that was `copied`, with its own tensors: what `write` takes."""
    path = _below("", name)
    within = {place: tensor for place, tensor in tensors.items() if place == path or place.startswith(f"{path}/")}
    return tree[name], within


def write(file: Path, kind: str, tree: Any, tensors: Mapping[str, Tensor]) -> None:
    state = json.dumps({"kind": kind, "tree": tree})
    metadata = {"state": state, "sha256": _digest(tensors, state)}
    content = safetensors.torch.save(dict(tensors), metadata)
    write_atomically(file, lambda part: part.write_bytes(content))


def load(file: Path, kind: str) -> dict[str, Any]:
    """The tree that `save` was given, on the CPU; keys are strings.

    Raises:
        Damaged: for anything but an intact file of this kind.
        OSError: where it cannot be read.
    """
    if file.is_char_device():
        raise Damaged(file, "is a device, not a file")
    content = file.read_bytes()  # read once: the file may be replaced meanwhile
    try:
        tensors = safetensors.torch.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch lacks
        raise Damaged(file, f"is cut off or damaged ({error})") from None
    if "state" not in metadata or "sha256" not in metadata:
        raise OtherKind(file, f"is not a {kind} file of metaaugment")
    if _digest(tensors, metadata["state"]) != metadata["sha256"]:
        raise Damaged(file, "is damaged: its SHA-256 is not the one that was written")
    try:
        state = json.loads(metadata["state"])
        found, tree = str(state["kind"]), _unpack(state["tree"], tensors)
    except MALFORMED as error:  # with a valid SHA-256: written by another program
        raise Damaged(file, f"is not an intact {kind}: its state is malformed ({first_line(error)})") from None
    if found != kind:
        raise OtherKind(file, f"is a {found} file, not a {kind} file")
    if not isinstance(tree, dict):
        raise Damaged(file, f"is not an intact {kind}: its state is a {type(tree).__name__}, not an object")
    return tree


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def _pack(tree: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The tree with a name in place of each tensor; copies of the tensors go to `tensors`."""
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: path}
    if isinstance(tree, Mapping):
        names = [str(key) for key in tree]
        if len(set(names)) < len(names) or TENSOR in names:
            raise ValueError(f"the keys {names} cannot be saved; as text they must differ, and {TENSOR!r} is reserved")
        return {
            name: _pack(value, tensors, _below(path, name)) for name, value in zip(names, tree.values(), strict=True)
        }
    if isinstance(tree, list | tuple):
        return [_pack(value, tensors, _below(path, str(place))) for place, value in enumerate(tree)]
    return tree


def _below(path: str, name: str) -> str:
    """Escaped as in JSON pointers: a slash within a name is not one between names."""
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {TENSOR}:
            return tensors[tree[TENSOR]]
        return {key: _unpack(value, tensors) for key, value in tree.items()}
    return [_unpack(value, tensors) for value in tree] if isinstance(tree, list) else tree
