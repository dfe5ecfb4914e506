"""Calls of the program: their exit status, what it says of a mistake or, where it would take long, what it would do."""

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest

import metaaugment.lab.search.run as searching
from metaaugment.lab import cli
from metaaugment.lab.data import download
from metaaugment.lab.experiments import export, reproduce, run
from metaaugment.lab.report import page

Captured = pytest.CaptureFixture[str]


def program(*args: object) -> int:
    """The exit status of a call."""
    try:
        cli.main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(capsys: Captured, *args: object) -> str:
    """The one sentence that a mistake gets, or a fault of the machine: at status 2, and without a traceback."""
    capsys.readouterr()
    assert program(*args) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("metaaugment: ")
    return sentence


def understood(commands: Sequence[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each command would do, in a word or two; one that is refused ends the test."""
    asked = []
    monkeypatch.setattr(run, "train", lambda recipe, *more: asked.append(recipe.name))
    monkeypatch.setattr(searching, "search", lambda kind, r, *_, **__: asked.append(f"{kind.system} {r.name}"))
    monkeypatch.setattr(reproduce, "reproduce", lambda rows, *more: asked.append(rows[0].table))
    monkeypatch.setattr(reproduce, "planned", lambda rows, *more: asked.append(f"plan {rows[0].table}") or [])
    monkeypatch.setattr(download, "get", lambda name, *more: asked.append(name))
    monkeypatch.setattr(export, "learned_policy", lambda folder: MagicMock(save=lambda *_: asked.append("export")))
    monkeypatch.setattr(export, "save_network", lambda *_: asked.append("network"))
    monkeypatch.setattr(page, "watch", lambda runs, write: asked.append("watch"))
    for command in commands:
        assert command[0] == "metaaugment"
        cli.main(command[1:])
    return asked
