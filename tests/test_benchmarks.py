"""The scripts under benchmarks/ run, and what they say of a run follows from it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from metaaugment.files import sealed
from metaaugment.lab.data.batches import Batches
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.interruption import Interrupted
from metaaugment.lab.training.machine import single

from endings import Stop

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(file.name for file in (ROOT / "benchmarks").glob("*.py") if file.name != "over_runs.py")


def benchmark(name: str, *args: object) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the middle of training, where the learning rate is not 0."""
    out = tmp_path_factory.mktemp("benchmarks") / "unfinished"
    recipe = replace(RECIPES["digits"](), per_class=20, batch=50, epochs=3, size=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Lines", lambda console: Stop(6))
        with pytest.raises(Interrupted):
            run.train(recipe, Place(out=out), Console(quiet=True))
    return out


def looked(name: str, unfinished: Path, tmp_path: Path, *args: object) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAAUGMENT_COMMIT", "that it looked with")
        benchmark(name, unfinished, *args, "--out", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["commit"] == "that it looked with"
    return found["runs"]["unfinished"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_says_what_it_takes(name: str) -> None:
    assert "--out" in benchmark(name, "--help")


@pytest.mark.slow
def test_a_look_ahead_by_zero_is_the_gradient_at_w(unfinished: Path, tmp_path: Path) -> None:
    found = looked("look_ahead.py", unfinished, tmp_path, "--batches", 1, "--validation", 60)
    assert found["samples"] == 50
    assert found["look ahead"].keys() == {*(f"{n} × the learning rate" for n in (0, 1, 3, 10)), "learned"}
    was = run.as_it_was(unfinished, Place(), Console(quiet=True))
    was.learner.part = was.train.batch
    validation = Batches(was.validation.split, 60, 0, was.train.device, was.train.reader).since(0)
    seen = was.learner.observe(*next(was.train.since(0)))
    s = was.learner.alignment(seen, was.learner.validation_gradient(*next(validation))).double()
    at_zero = found["look ahead"]["0 × the learning rate"]
    assert at_zero["alpha"] == 0
    assert at_zero["mean"] == pytest.approx((s / s.std()).mean().item(), rel=1e-3)
    means = [at["mean"] for at in found["look ahead"].values()]
    assert len(set(means)) == len(means)


@pytest.mark.slow
def test_judged_magnitudes_are_relative_to_the_average(unfinished: Path, tmp_path: Path) -> None:
    found = looked("judged_magnitudes.py", unfinished, tmp_path, "--batches", 20)
    assert found["samples"] == 20 * 50
    for what in ("outputs", "losses"):
        quarters = torch.tensor(list(found[what].values()), dtype=torch.float64)
        assert quarters.mean().item() == pytest.approx(1, abs=0.2)
        assert quarters.std() > 0


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
    assert single(found["commit"]) == ["first", "second"]
