"""Imports point down only: each part knows the layers below it and nothing of those above."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "metaaugment"

# From the top down; modules of one line may use each other. The README names the rooms of the library.
LAYERS = (
    ("lab.cli", "lab.commands", "lab.parsing", "lab.program", "lab.report", "lab.bench", "lab.search"),
    ("lab.experiments",),
    ("lab.training",),
    ("lab.baselines", "lab.data"),
    ("lab.seeds", "lab.words"),
    ("integrations",),
    ("learned",),
    ("networks", "files"),
    ("learner", "capture", "state"),
    ("judge", "passes"),
    ("observation",),
    ("policy", "sampler"),
    ("algorithm", "alignment"),
    ("guard",),
    ("features", "batch_norm"),
    ("embedding", "transformation", "ops", "distributed", "version", "waiting", "_deprecated"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# The program and the list of public names stand above everything.
TOP = ("__init__", "__main__", "lab.__init__")
# Core dependencies: what the method may import besides torch. Everything else is for the layers above it.
CORE = {"torch", "numpy", "PIL", "safetensors", "jaxtyping", "triton", "metaaugment"}
LIBRARY = LEVEL["integrations"]
# What an integration is for, and imports.
OF_USERS = {
    "integrations/lightning.py": {"lightning"},
    "integrations/timm.py": {"timm"},
    "integrations/torchvision.py": {"torchvision"},
    "integrations/transformers.py": {"torchvision", "transformers"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(name: str) -> str:
    """The room of a module, by its name below `metaaugment`: the laboratory has several."""
    first, *rest = name.split(".")
    return f"lab.{rest[0]}" if first == "lab" and rest else first


def part(path: Path) -> str:
    return room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def imported(path: Path) -> set[str]:
    """Full names of all that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the full name"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    if part(path) in TOP:
        return
    assert part(path) in LEVEL, f"{part(path)} has no layer; give it one in tests/test_layers.py"
    for name in imported(path):
        # The package itself imports nearly all of its parts.
        assert name != "metaaugment" or LEVEL[part(path)] == 0, f"{path.name} imports the whole package"
        if name.startswith("metaaugment."):
            target = room(name.removeprefix("metaaugment."))
            assert target in LEVEL, f"{path.name} imports {name}; import from the part itself"
            assert LEVEL[target] >= LEVEL[part(path)], f"{path.name} imports {name}, which lies above it"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_no_name_of_a_package_hides_a_module(path: Path) -> None:
    """`import metaaugment.lab.data.dataset as d` would give the function of that name, if there were such a module."""
    names = {name.rpartition(".")[2] for name in imported(path)}
    assert not names & {file.stem for file in path.parent.iterdir()}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_library_needs_the_core_only(path: Path) -> None:
    """It also runs where only torch, numpy, Pillow, safetensors and jaxtyping are installed, and knows no clock."""
    if part(path) in TOP or LEVEL[part(path)] < LIBRARY:
        return
    used = OF_USERS.get(path.relative_to(PACKAGE).as_posix(), set())
    for name in imported(path):
        package = name.split(".")[0]
        assert package in CORE | used or package in sys.stdlib_module_names, f"{path.name} imports {name}"
        assert package not in ("datetime",), f"{path.name} looks at a clock"
