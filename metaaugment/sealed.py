"""Files that are whole or refused: tensors and a JSON state under one SHA-256, in the safetensors format.

Nothing in such a file is executed. Writing is atomic: whoever reads sees the old file or the new one, never a part.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

TENSOR = "@tensor"  # the key under which a tensor's name stands in its place


class Damaged(ValueError):
    """A file that is not what was written; `reason` says in what way."""

    def __init__(self, file: Path, reason: str, way_out: str = "") -> None:
        super().__init__(f"{file} {reason}" + (f"; {way_out}" if way_out else ""))
        self.file, self.reason = file, reason


def save(file: Path, kind: str, tree: Mapping[str, Any]) -> None:
    """Write a tree of dictionaries and lists whose leaves are tensors and JSON values."""
    write(file, kind, *copied(tree))


def copied(tree: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The tree with names in the place of its tensors, and copies of these on the CPU: what `write` takes."""
    tensors: dict[str, Tensor] = {}
    return _pack(tree, tensors, ""), tensors


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
    content = file.read_bytes()  # once: it may be replaced meanwhile
    try:
        tensors = safetensors.torch.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, KeyError) as error:  # KeyError: of a type that torch has not
        raise Damaged(file, f"is cut off or damaged ({error})") from None
    if "state" not in metadata or "sha256" not in metadata:
        raise Damaged(file, f"is no {kind} file of metaaugment")
    if _digest(tensors, metadata["state"]) != metadata["sha256"]:
        raise Damaged(file, "is damaged: its SHA-256 is not the one that was written")
    state = json.loads(metadata["state"])
    if state["kind"] != kind:
        raise Damaged(file, f"is a {state['kind']} file, not a {kind} file")
    return _unpack(state["tree"], tensors)


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Have a file written under another name, and put it in place when it is safe on the disk."""
    part = file.with_name(f".{file.name}.part")
    try:
        write(part)
        with part.open("rb+") as content:
            os.fsync(content.fileno())
        part.replace(file)
    except OSError as error:  # named by the file that is meant
        raise OSError(error.errno, error.strerror or str(error), str(file)) from None
    finally:
        part.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder safe against a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def _pack(tree: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The tree with a name in the place of each tensor; the tensors, copied, go to `tensors`."""
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: path}
    if isinstance(tree, Mapping):
        names = [str(key) for key in tree]
        if len(set(names)) < len(names) or TENSOR in names:
            raise ValueError(f"the keys {names} cannot be told apart in a file; {TENSOR!r} is taken")
        return {
            name: _pack(value, tensors, _below(path, name)) for name, value in zip(names, tree.values(), strict=True)
        }
    if isinstance(tree, list | tuple):
        return [_pack(value, tensors, _below(path, str(place))) for place, value in enumerate(tree)]
    return tree


def _below(path: str, name: str) -> str:
    """As in JSON pointers: a slash within a name is not one between names."""
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {TENSOR}:
            return tensors[tree[TENSOR]]
        return {key: _unpack(value, tensors) for key, value in tree.items()}
    return [_unpack(value, tensors) for value in tree] if isinstance(tree, list) else tree
