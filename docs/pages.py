"""The blocks of a Markdown page, run as a reader would run them: in order, in one folder, in one Python.

    ```python          executed; all blocks of a page share their names
    ```text            right behind such a block: what it prints
    ```sh              our commands, one per line
    ```console         the same behind "$ ", each followed by what it prints
    <!-- setup … -->   Python that is run and not shown

A fence that goes on with "not run:" and a reason is left alone. In what is printed "..." stands for anything.
"""

import contextlib
import doctest
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaaugment.lab import cli

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```([^\s`]*)[ ]?(.*?)\n(.*?)^```$|^<!-- (setup)\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]\(_build/pages/([^)]+)\)")


@dataclass(frozen=True)
class Block:
    """`line` is that of its first line in the page; `reason`, why it is not run."""

    page: Path
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    content, found = page.read_text(), []
    for match in FENCE.finditer(content):
        language, words, text = match[1] or match[4] or "", match[2] or "", match[3] if match[4] is None else match[5]
        if language.startswith("{"):
            continue  # a directive of the site's
        if words and not words.startswith("not run: "):
            raise ValueError(f"{page.name}: a fence says {words!r}; it may say 'not run:' and a reason")
        line = content[: match.start()].count("\n") + 2
        found.append(Block(page, line, language, text, words.removeprefix("not run: ")))
    return found


def commands(text: str) -> list[list[str]]:
    """The words of each line of a shell, without comments."""
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def pictures(page: Path) -> list[str]:
    """The pictures that a page shows, which its blocks make: PAGE/FILE."""
    return PICTURE.findall(page.read_text())


def run(page: Path, folder: Path) -> int:
    """Run the blocks of a page in an empty folder, beside the repository's policies and results; how many there were.

    Raises AssertionError, naming the line, for output that the page does not have, or a command that fails.
    """
    for name in ("policies", "results"):
        (folder / name).symlink_to(ROOT / name)
    names: dict[str, Any] = {"__name__": "page"}
    runnable = [block for block in blocks(page) if not block.reason]
    printed = ""
    with contextlib.chdir(folder):
        for block in runnable:
            printed = _run(block, names, printed)
    return len(runnable)


def _run(block: Block, names: dict[str, Any], printed: str) -> str:
    """What a block prints; `printed` is what the one above it did."""
    match block.language:
        case "python" | "setup":
            return _output(_execute, block, names)
        case "text":
            _compare(block, block.text, printed)
        case "sh":
            return "".join(_output(_call, block, words) for words in commands(block.text))
        case "console":
            for line, expected in _dialogue(block.text):
                _compare(block, expected, _output(_call, block, shlex.split(line)))
        case language:
            raise ValueError(f"{block.where}: a block of {language!r} is not run; mark it so")
    return ""


def _execute(block: Block, names: dict[str, Any]) -> None:
    # Empty lines ahead, so that a traceback has the line of the page.
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)


def _call(block: Block, words: list[str]) -> None:
    assert words[0] == "metaaugment", f"{block.where}: {words[0]} is not a command of ours; mark the block as not run"
    try:
        with contextlib.redirect_stderr(sys.stdout):
            cli.main(words[1:])
    except SystemExit as stop:
        # A mistake may be shown: then its sentence is compared.
        if stop.code and block.language != "console":
            raise AssertionError(f"{block.where}: {' '.join(words)} failed") from None


def _output(action: Callable[..., None], *args: object) -> str:
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        action(*args)
    return written.getvalue()


def _compare(block: Block, expected: str, printed: str) -> None:
    # Tabs are set as spaces by whoever reads a page.
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, flags), (
        f"{block.where} says\n{expected}\nand this was printed:\n{printed}"
    )


def _dialogue(text: str) -> Iterator[tuple[str, str]]:
    """Each command, and what is shown behind it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        yield line, expected
