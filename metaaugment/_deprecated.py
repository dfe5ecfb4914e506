"""What goes with version 0.3: old names of modules that have moved, and arguments by their place, with a warning."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec

P = ParamSpec("P")

# Old and new names below `metaaugment`; what lies in a folder has moved with it.
MOVED = {
    **{name: f"guard.{name}" for name in ("alpha", "checks", "faults", "finite", "replay")},
    **{name: f"files.{name}" for name in ("atomic", "sealed")},
    **{name: f"lab.{name}" for name in ("cli", "program", "seeds", "words")},
    **{name: f"lab.{name}" for name in ("baselines", "bench", "data", "experiments", "report", "search", "training")},
    "networks.pretrained": "lab.experiments.experiment",
    "hypergradient": "alignment",
    "command": "lab.parsing",
    "transfer": "learned.policy",
    "policy_file": "learned.file",
    "frozen": "learned.frozen",
    "source": "learned.source",
}
PACKAGE = "metaaugment."


def new_name(name: str) -> str | None:
    """Where a module is now, if it has moved."""
    below = name.removeprefix(PACKAGE)
    for old, new in MOVED.items() if below != name else ():
        if below == old or below.startswith(f"{old}."):
            return PACKAGE + new + below.removeprefix(old)
    return None


class Moved(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if new_name(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} is now {new}; its old name goes with 0.3", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the old name's spec here.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, Moved())  # first: the finder of files would load what lies in a moved folder once more


def positional_until(last: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Take keyword arguments up to this one by their place, too."""

    def decorated(function: Callable[P, None]) -> Callable[P, None]:
        parameters = inspect.signature(function).parameters
        names, kinds = list(parameters), [parameter.kind for parameter in parameters.values()]
        first = kinds.index(inspect.Parameter.KEYWORD_ONLY)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> None:
            by_place = dict(zip(names[first : names.index(last) + 1], args[first:], strict=False))
            if by_place and not by_place.keys() & kwargs.keys() and len(args) <= first + len(by_place):
                said = ", ".join(f"{name}=…" for name in by_place)
                advice = f"give these by name: {said}; by their place they are not taken from 0.3 on"
                warnings.warn(advice, DeprecationWarning, stacklevel=2)
                args, kwargs = args[:first], by_place | kwargs
            function(*args, **kwargs)  # type: ignore[arg-type, call-arg]

        return called  # type: ignore[return-value]

    return decorated
