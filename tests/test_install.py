"""The library as its users get it: the wheel without extras, in an environment that has what the wheel asks for."""

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pages import blocks

ROOT = Path(__file__).parent.parent
(LOOP, *_) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")


def needed(requirements: list[str], found: dict[str, Distribution]) -> dict[str, Distribution]:
    """These distributions, and all that they require without extras."""
    for requirement in map(Requirement, requirements):
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = distribution(requirement.name)
        assert found[requirement.name].version in requirement.specifier
        needed(found[requirement.name].requires or [], found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that holds the wheel, and links to the packages that it requires: nothing is fetched."""
    folder = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    about = next(packages.glob("metaaugment-*.dist-info")) / "METADATA"
    asked = [line.split(": ", 1)[1] for line in about.read_text().splitlines() if line.startswith("Requires-Dist: ")]
    for one in needed(asked, {}).values():
        for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(str(one.locate_file(name)))
    return python


def run(python: Path, *words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run([python, *words], capture_output=True, text=True, cwd=cwd, env=env)


def test_the_loop_of_the_readme_runs_without_the_laboratory(python: Path, tmp_path: Path) -> None:
    policy = ROOT / "policies" / "omniglot-wrn-40-2.safetensors"
    more = f"""
import sys
assert not [name for name in sys.modules if name.startswith("metaaugment.lab")]
assert {str(ROOT)!r} not in ma.__file__
policy = ma.LearnedPolicy.load({str(policy)!r})
images, weights = policy.augment(batch[0])
assert images.shape == batch[0].shape and abs(weights.sum() - 1) < 1e-5
print(ma.__version__)
"""
    ended = run(python, "-c", LOOP + more, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_laboratory_is_not_there_and_says_how_to_get_it(python: Path, tmp_path: Path) -> None:
    ended = run(python, "-m", "metaaugment", "recipes", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "matplotlib, rich, sklearn, tyro" in ended.stderr
    assert ended.stderr.endswith("pip install 'metaaugment[lab]'\n")
    assert ended.stderr.count("\n") == 1
    command = subprocess.run([python.parent / "metaaugment"], capture_output=True, text=True)
    assert (command.returncode, command.stderr) == (2, ended.stderr)
    digits = run(python, "-c", "import metaaugment as ma; ma.dataset('digits')", cwd=tmp_path)
    assert "pip install 'metaaugment[lab]'" in digits.stderr.splitlines()[-1]


def test_old_names_of_modules_and_arguments_by_place_warn(python: Path, tmp_path: Path) -> None:
    code = """
import warnings, torch
import metaaugment as ma
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from metaaugment.transfer import LearnedPolicy
    from metaaugment.data.files import read_image
    from metaaugment.training import folder
    from metaaugment import sealed
    assert ma.frozen.FrozenPolicy
    learner = ma.Learner(ma.network("small-cnn", 10), ma.UniformSampler(), ma.UniformPolicy(), None, None, "forward")
assert LearnedPolicy is ma.LearnedPolicy
assert sealed.__name__ == sealed.__spec__.name == "metaaugment.files.sealed"
assert learner.route.__name__ == "forward"
print(*(f"{one.category.__name__} {one.filename} {one.message}" for one in told), sep="\\n")
"""
    ended = run(python, "-c", code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = ended.stdout.splitlines()
    assert told[0].startswith("DeprecationWarning <string> metaaugment.transfer is now metaaugment.learned.policy")
    assert [name for name in ("lab.data.files", "lab.training.folder", "files.sealed") if f".{name};" in str(told)]
    assert "extractor=…, features=…, route=…" in told[-1]


@pytest.mark.parametrize("positional", [(None, None, "forward"), (*[None] * 12, 1)])
def test_too_many_or_double_arguments_are_refused_as_ever(positional: tuple[object, ...]) -> None:
    import metaaugment as ma

    parts = ma.network("small-cnn", 10), ma.UniformSampler(), ma.UniformPolicy()
    with pytest.raises(TypeError):
        ma.Learner(*parts, *positional, route="forward")  # type: ignore[call-arg]
