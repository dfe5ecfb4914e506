"""What the README shows works, as it stands there."""

import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import metaaugment.search.search as searching
from metaaugment import cli
from metaaugment.data import download
from metaaugment.experiments import export, run
from metaaugment.experiments import reproduce as reproducing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_commands_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line.split("#")[0].split() for block in blocks("") for line in block.splitlines()]
    ours = [command[1:] for command in commands if command and command[0] == "metaaugment"]
    assert ours
    for command in ours:
        cli.main(command)


def test_long_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to what they would do, which takes too long here."""
    asked = []
    monkeypatch.setattr(run, "train", lambda recipe, place, console: asked.append(recipe.name))
    monkeypatch.setattr(searching, "search", lambda kind, recipe, *more: asked.append(f"{kind.system} {recipe.name}"))
    monkeypatch.setattr(reproducing, "reproduce", lambda rows, *more: asked.append(rows[0].table))
    monkeypatch.setattr(download, "get", lambda name, *more: asked.append(name))
    monkeypatch.setattr(export, "learned_policy", lambda folder: MagicMock(save=lambda *_: asked.append("export")))
    commands = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    for command in commands:
        assert command[0] == "metaaugment"
        cli.main(command[1:])
    assert len(asked) == len(commands) > 5


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert target in targets


def test_files_it_points_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
