"""Files that are whole or refused: tensors and a JSON state under one SHA-256, in the safetensors format.

Nothing in such a file is executed. Writing is atomic: whoever reads sees the old file or the new one, never a part.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


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
    write_atomically(file, lambda part: save_file(dict(tensors), part, metadata))


def load(file: Path, kind: str) -> dict[str, Any]:
    """The tree that `save` was given, on the CPU; keys are strings.

    Raises:
        Damaged: for anything but an intact file of this kind.
        OSError: where it cannot be read.
    """
    with file.open("rb"):  # a missing or forbidden file is an OSError that names it
        pass
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118, no mapping
    except SafetensorError as error:
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
    except SafetensorError as error:  # the writer's own errors of the disk come in this dress
        raise OSError(None, str(error), str(file)) from None
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
        return {"tensor": path}
    if isinstance(tree, Mapping):
        return {str(key): _pack(value, tensors, f"{path}/{key}".lstrip("/")) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_pack(value, tensors, f"{path}/{key}") for key, value in enumerate(tree)]
    return tree


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {"tensor"}:
            return tensors[tree["tensor"]]
        return {key: _unpack(value, tensors) for key, value in tree.items()}
    return [_unpack(value, tensors) for value in tree] if isinstance(tree, list) else tree
