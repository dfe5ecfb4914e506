"""What the README shows works, as it stands there."""

import re
from pathlib import Path

import pytest

from metaaugment import cli

from commands import understood
from pages import blocks, commands

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = blocks(ROOT / "README.md")


@pytest.mark.parametrize("code", [block.text for block in BLOCKS if block.language == "python"])
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_commands_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [words for block in BLOCKS if block.language == "" for words in commands(block.text)]
    ours = [words[1:] for words in shown if words[0] == "metaaugment"]
    assert ours
    for words in ours:
        cli.main(words)


def test_long_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to what they would do, which takes too long here."""
    shown = [words for block in BLOCKS if block.language == "sh" for words in commands(block.text)]
    assert len(understood(shown, monkeypatch)) == len(shown) > 5


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert target in targets


def test_files_it_points_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
