"""The scripts under benchmarks/ run, and what they say of a run follows from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from metaaugment.files import sealed
from metaaugment.lab.training import checkpoint

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(file.name for file in (ROOT / "benchmarks").glob("*.py"))


def benchmark(name: str, *args: object) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_says_what_it_takes(name: str) -> None:
    assert "--out" in benchmark(name, "--help")


@pytest.mark.slow
def test_whole_training_is_timed_beside_bare_steps(tmp_path: Path) -> None:
    args = ("digits", "--epochs", 2, "--repeats", 1, "--variants", "metaaugment lagged every 8", "--device", "cpu")
    benchmark("training.py", *args, "--out", tmp_path / "found.json")
    plain, joint = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert (plain["what"], joint["what"]) == ("baseline", "metaaugment lagged every 8")
    assert plain["over_baseline"] == 1
    assert joint["epoch_over_bare"] == pytest.approx(joint["epoch_seconds"] / joint["bare_seconds"])


@pytest.mark.slow
def test_departures_are_measured_once_each(tmp_path: Path) -> None:
    variants = ("baseline", "baseline, validation images too")
    args = ("--recipe", "digits", "--per-class", 20, "--epochs", 1, "--seeds", 1, "--processes", 1)
    args += ("--runs", tmp_path / "runs", "--out", tmp_path / "found.json", "--variants")
    benchmark("departures.py", *args, variants[0])
    (first,) = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert (first["variant"], first["images"]) == (variants[0], 200)
    benchmark("departures.py", *args, *variants)
    again, more = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert again == first
    assert (more["variant"], more["images"]) == (variants[1], 200 + 10 * 10)


@pytest.mark.slow
def test_a_departure_that_was_stopped_knows_its_time_and_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between its training, which is made to have taken long, and its figure."""
    args = ("--recipe", "digits", "--per-class", 20, "--epochs", 1, "--seeds", 1, "--processes", 1)
    args += ("--runs", tmp_path / "runs", "--out", tmp_path / "found.json", "--variants", "baseline")
    monkeypatch.setenv("METAAUGMENT_COMMIT", "first")
    benchmark("departures.py", *args)
    (tmp_path / "found.json").unlink()
    state = checkpoint.load(folder := tmp_path / "runs" / "baseline, seed 0")
    assert state is not None
    state["log"][0]["seconds"] = 1e6
    sealed.save(folder / checkpoint.LAST, "checkpoint", state)
    monkeypatch.setenv("METAAUGMENT_COMMIT", "second")
    benchmark("departures.py", *args)
    (found,) = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert found["seconds"] > 1e6
    assert found["commit"] == ["first", "second"]
