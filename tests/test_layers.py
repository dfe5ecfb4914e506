"""Imports point down only: each part knows the layers below it and nothing of those above."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "metaaugment"

# From the top down; modules of one line may use each other. The README names the chief ones of each layer.
LAYERS = (
    ("cli", "command", "program", "integrations", "report", "bench", "search"),
    ("experiments",),
    ("training",),
    ("transfer", "policy_file", "source", "frozen"),
    ("baselines", "data", "networks", "sealed", "atomic"),
    ("learner", "capture", "observation", "checks", "finite", "alpha"),
    ("hypergradient", "policy", "sampler", "features", "replay", "batch_norm"),
    ("embedding", "transformation", "ops", "distributed", "seeds", "faults", "words", "version", "waiting"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# The program and the list of public names stand above everything.
TOP = ("__init__", "__main__")
# Core dependencies: what the method may import besides torch. Everything else is for the layers above it.
CORE = {"torch", "numpy", "PIL", "safetensors", "jaxtyping", "triton", "metaaugment"}
METHOD = LEVEL["learner"]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


def test_the_layers_of_the_readme_are_these() -> None:
    readme = " ".join((PACKAGE.parent / "README.md").read_text().split())
    said = readme.split("(`tests/test_layers.py`): ", 1)[1].split(".", 1)[0]
    for named, layer in zip(said.split("; "), LAYERS, strict=True):
        assert set(named.split(", ")) <= set(layer)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    if part(path) in TOP:
        return
    assert part(path) in LEVEL, f"{part(path)} has no layer; give it one in tests/test_layers.py"
    for name in imported(path):
        # The package itself imports nearly all of its parts.
        assert name != "metaaugment" or LEVEL[part(path)] == 0, f"{path.name} imports the whole package"
        if name.startswith("metaaugment."):
            target = name.split(".")[1]
            assert target in LEVEL, f"{path.name} imports {name}; import from the part itself"
            assert LEVEL[target] >= LEVEL[part(path)], f"{path.name} imports {name}, which lies above it"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_no_name_of_a_package_hides_a_module(path: Path) -> None:
    """`import metaaugment.data.dataset as d` would give the function of that name, if there were such a module."""
    names = {name.rpartition(".")[2] for name in imported(path)}
    assert not names & {file.stem for file in path.parent.iterdir()}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_method_needs_the_core_only(path: Path) -> None:
    """It also runs where only torch, numpy, Pillow, safetensors and jaxtyping are installed, and knows no clock."""
    if part(path) in TOP or LEVEL[part(path)] < METHOD:
        return
    import sys

    for name in imported(path):
        package = name.split(".")[0]
        assert package in CORE or package in sys.stdlib_module_names, f"{path.name} imports {name}"
        assert package not in ("time", "datetime"), f"{path.name} looks at a clock"
