"""With how many threads a CPU computes, and how they wait: never by how busy it is, and a run keeps its number."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from metaaugment.files import sealed
from metaaugment.lab.data import dataset
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.search.crew import Crew
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training import checkpoint, machine
from metaaugment.lab.training.trainer import Trainer
from metaaugment.waiting import WAITING

from commands import program
from endings import Stop, assert_same, final

# Three epochs of four steps; convolutions of these sizes are summed in another order by two threads than by one.
DIGITS = ("digits", "--device", "cpu", "--per-class", "20", "--batch", "50", "--epochs", "3", "--every", "4")


class Counts(Stop):
    """Notes the threads of each step, and stops after some."""

    def __init__(self, into: list[int], after: int) -> None:
        super().__init__(after)
        self.into = into

    def stepped(self, trainer: Trainer) -> None:
        self.into.append(torch.get_num_threads())
        super().stepped(trainer)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains with these words, and stops after some steps; returns the threads of each step."""

    def train(*words: object, stop_after: int = 99) -> list[int]:
        into: list[int] = []
        monkeypatch.setattr(run, "Lines", lambda console: Counts(into, stop_after))
        assert program("train", *DIGITS, *words) == (0 if stop_after > 12 else 143)
        return into

    return train


def test_a_run_computes_with_the_threads_asked_for_and_keeps_them(tmp_path: Path, counted: Any) -> None:
    """Otherwise it would end in other weights than a run that was not stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert counted("--threads", "2", "--out", whole) == [2] * 12
    assert counted("--threads", "2", "--out", stopped, stop_after=5) == [2] * 5
    assert counted("--resume", stopped) == [2] * 7
    assert json.loads((stopped / "result.json").read_text())["machine"]["threads"] == 2
    assert_same(final(stopped), final(whole))
    assert torch.get_num_threads() == 1, "as before"


def test_a_run_may_be_continued_with_another_number(tmp_path: Path, counted: Any) -> None:
    """As on another machine."""
    assert counted("--threads", "2", "--out", tmp_path, stop_after=5) == [2] * 5
    assert counted("--resume", tmp_path, "--threads", "3") == [3] * 7


def test_a_checkpoint_from_before_that_record_is_continued_as_it_was(tmp_path: Path, counted: Any) -> None:
    counted("--threads", "2", "--out", tmp_path, stop_after=5)
    state = sealed.load(tmp_path / checkpoint.LAST, "checkpoint")
    del state["threads"]
    sealed.save(tmp_path / checkpoint.LAST, "checkpoint", state)
    assert counted("--resume", tmp_path) == [1] * 7, "torch's own number, which is 1 in these tests"


@pytest.mark.parametrize("wrong", [0, 10**9, "two"])
def test_a_number_that_no_run_has_is_refused(
    wrong: object, tmp_path: Path, counted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    counted("--out", tmp_path, stop_after=5)
    state = sealed.load(tmp_path / checkpoint.LAST, "checkpoint")
    sealed.save(tmp_path / checkpoint.LAST, "checkpoint", state | {"threads": wrong})
    capsys.readouterr()
    assert program("train", *DIGITS, "--resume", tmp_path) == 2
    assert f"--threads is {wrong!r}; it must be 1 to 1024" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "out"), [(("train", "digits"), "run"), (("search", "dada", "digits"), "search")])
def test_no_threads_are_refused(
    command: tuple[str, ...], out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(*command, "--threads", "0", "--out", tmp_path / out) == 2
    assert "--threads is 0; it must be 1 to 1024" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_by_default_each_core_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the process is bound to, that its container has time of, and that its like on the machine leave."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    assert Place().computing() == 1, "OMP_NUM_THREADS is 1 in these tests"
    with machine.threads(16):
        assert Place().computing() == 8
        for quota, cores in (("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)):
            (tmp_path / "cpu.max").write_text(f"{quota}\n")
            assert Place().computing() == cores
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        assert Place().computing() == 2


def count_threads(lab: Laboratory) -> Callable[[int], int]:
    return lambda piece: torch.get_num_threads()


def test_what_a_search_finds_does_not_depend_on_its_processes(tmp_path: Path) -> None:
    """Each computes with as many threads as one alone; the cores were divided among them."""
    recipe = RECIPES["digits"]()
    lab = Laboratory(recipe, Place(device="cpu"), dataset("digits"), tmp_path, Console(quiet=True))
    with machine.threads(2), Crew(lab, 2, count_threads, ()) as crew:
        assert dict(crew.do(range(2))) == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("said", "turns"), [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"), ({"GOMP_SPINCOUNT": "5"}, "5")]
)
def test_threads_that_wait_leave_the_cores_to_other_processes(said: dict[str, str], turns: str) -> None:
    """Unless somebody says otherwise; OpenMP itself tells how often it looks before it sleeps. Nothing stays set."""
    rest = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, "-c", "import os, metaaugment; print({**os.environ})"]
    process = subprocess.run(command, env=rest | said | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT = '{turns}'" in process.stderr
    assert {name for name in WAITING if f"'{name}'" in process.stdout} == set(said)
