"""Modules that have moved: for one version their old names import the same modules, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old and new names below `metaaugment`; what lies in a folder has moved with it.
MOVED = {
    **{name: f"guard.{name}" for name in ("alpha", "checks", "faults", "finite", "replay")},
    **{name: f"files.{name}" for name in ("atomic", "sealed")},
    **{name: f"lab.{name}" for name in ("cli", "command", "program", "seeds", "words")},
    **{name: f"lab.{name}" for name in ("baselines", "bench", "data", "experiments", "report", "search", "training")},
    "networks.pretrained": "lab.experiments.experiment",
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
