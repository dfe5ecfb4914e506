"""Reading data from pickles without running their code.

A pickle is a program: loading it calls whatever functions it names. Here the few names that a pickled numpy array needs
give stand-ins that only keep their arguments, and any other name is refused.
"""

import io
import pickle
import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class _Inert:
    """A call that was not made: its arguments, and the state that was to be set."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _keep(*arguments: Any) -> _Inert:
    return _Inert(arguments)


def _encode(text: str, encoding: str) -> bytes:
    """In old protocols, Python 3 writes bytes as text in this one encoding."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"its text is in the encoding {encoding!r}, not latin-1")
    return text.encode("latin-1")


ALLOWED: dict[tuple[str, str], Callable[..., Any] | str] = {
    **{(f"{core}.multiarray", "_reconstruct"): _keep for core in ("numpy.core", "numpy._core")},
    **{(f"{core}.numeric", "_frombuffer"): _keep for core in ("numpy.core", "numpy._core")},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _keep,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which data do not need")
        return ALLOWED[module, name]


def load(file: Path) -> dict[str, Any]:
    """The dictionary in a pickle of any Python version, its keys as text; its arrays are inert values, for `array`.

    Raises ValueError for anything else.
    """
    written = file.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the strings of a broken pickle
        try:
            _check_places(written)
            content = _Unpickler(io.BytesIO(written), encoding="bytes").load()
        except Exception as error:  # a broken pickle raises nearly every exception there is
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"not a pickle of data: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"a pickled {type(content).__name__} where a dictionary is expected")
    texts = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    return {key: value for key, value in texts.items() if isinstance(key, str)}


def _check_places(written: bytes) -> None:
    """Refuse memo indices that are too high, without executing anything. A pickler counts them up from 0; for one that
    is far too high, loading would allocate memory for all those below it."""
    for count, (instruction, place, _) in enumerate(pickletools.genops(written)):
        if instruction.name.endswith("PUT") and isinstance(place, int) and place > count:
            raise pickle.UnpicklingError(f"it uses memo index {place:,} after only {count:,} instructions")


def array(value: Any) -> np.ndarray:
    """The array of an inert value. Raises ValueError for all but uint8 in C order."""
    match value:
        case _Inert(state=(_, tuple(shape), _Inert((kind, *_)), False | 0, bytes(raw))):  # _reconstruct
            pass
        case _Inert((bytes() | bytearray() as raw, _Inert((kind, *_)), tuple(shape), "C")):  # _frombuffer
            pass
        case _:
            raise ValueError("its images are not an array in C order")
    if kind not in ("u1", b"u1"):
        raise ValueError(f"its images are of type {kind!r} where u1 (uint8) is expected")
    return np.frombuffer(raw, np.uint8).reshape(shape)
