"""The folder of a run or a search remembers where its data lie."""

import json
import re
from pathlib import Path
from typing import NoReturn

import pytest

from metaaugment.lab.baselines import published
from metaaugment.lab.experiments import prediction, run
from metaaugment.lab.experiments.jobs import Job
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training import folder as run_folder
from metaaugment.learner import Learner

from commands import Captured, program, refused
from endings import Stop, assert_same_end
from trees import use_cifar, write_cifar10, write_folder

SMALL = ("--network", "small-cnn", "--size", "8", "--batch", "20", "--epochs", "2", "--every", "2", "--workers", "0")
IMAGES = {f"{part}/{name}": n for part, n in (("train", 40), ("val", 36), ("test", 5)) for name in ("cat", "dog")}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in its second epoch, begun in the folder `here` on the data in `here/mine`, which it was told as `mine`."""
    write_folder(tmp_path / "here" / "mine", IMAGES)
    monkeypatch.chdir(tmp_path / "here")
    with monkeypatch.context() as patch:
        patch.setattr(run, "Lines", lambda console: Stop(5))
        assert program("train", "folder", "--data", "mine", *SMALL, "--out", tmp_path / "run") == 143
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert checkpoint.of_run(tmp_path / "run")["epoch"] == 1
    return tmp_path / "run"


def test_a_run_continues_from_any_folder_without_being_told_its_data(stopped: Path, tmp_path: Path) -> None:
    """It was "the data set folder has no default folder"."""
    assert program("train", "folder", "--resume", stopped) == 0
    whole = tmp_path / "whole"
    assert program("train", "folder", "--data", tmp_path / "here" / "mine", *SMALL, "--out", whole) == 0
    assert_same_end(stopped, whole)
    assert program("train", "folder", "--resume", stopped) == 0, "and is finished already"


def test_a_run_is_diagnosed_without_being_told_its_data(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "LEAST", 2)
    monkeypatch.setattr(prediction, "MOST", 2)
    assert program("diagnose", stopped, "--samples", 160) == 0
    assert (stopped / "diagnosis.json").exists()


def test_data_that_were_moved_are_named_once(stopped: Path, tmp_path: Path, capsys: Captured) -> None:
    before = tmp_path / "here" / "mine"
    now = before.rename(tmp_path / "elsewhere")
    for command in (("train", "folder", "--resume", stopped), ("diagnose", stopped)):
        sentence = refused(capsys, *command)
        assert f"the data of {stopped} were in {before}, which is no folder any more" in sentence
        assert sentence.endswith("--data DIR")
    assert program("train", "folder", "--resume", stopped, "--data", "../elsewhere") == 0
    (stopped / "result.json").unlink()
    assert program("train", "folder", "--resume", stopped) == 0
    assert json.loads((stopped / run_folder.PLACE).read_text()) == {"data": str(now)}


def test_other_images_are_refused_wherever_they_lie(stopped: Path, tmp_path: Path, capsys: Captured) -> None:
    other = write_folder(tmp_path / "other", IMAGES | {"train/cat": 41})
    sentence = refused(capsys, "train", "folder", "--resume", stopped, "--data", other)
    assert "belongs to a run on other data" in sentence
    assert json.loads((stopped / run_folder.PLACE).read_text()) == {"data": str(tmp_path / "here" / "mine")}
    (tmp_path / "here" / "mine" / "train" / "cat" / "003.png").unlink()
    assert "belongs to a run on other data" in refused(capsys, "train", "folder", "--resume", stopped)
    assert "was trained on other data" in refused(capsys, "diagnose", stopped)


def test_a_run_made_before_there_was_this_memory_is_told_its_data_as_before(
    stopped: Path, tmp_path: Path, capsys: Captured
) -> None:
    (stopped / run_folder.PLACE).unlink()
    sentence = refused(capsys, "train", "folder", "--resume", stopped)
    assert "the data set folder has no default folder; name a folder of your own images with --data" in sentence
    assert program("train", "folder", "--resume", stopped, "--data", tmp_path / "here" / "mine") == 0


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"data": 3}'])
def test_a_memory_that_cannot_be_read_is_in_nobodys_way(
    content: str, stopped: Path, tmp_path: Path, capsys: Captured
) -> None:
    (stopped / run_folder.PLACE).write_text(content)
    sentence = refused(capsys, "train", "folder", "--resume", stopped)
    assert re.search(r"place\.json is damaged: .*; remove it, and say where the data are with --data DIR$", sentence)
    assert program("train", "folder", "--resume", stopped, "--data", tmp_path / "here" / "mine") == 0


def test_digits_lie_in_no_folder(tmp_path: Path) -> None:
    """What a reproduction says of all its runs may be gone when one on the digits goes on."""
    (tmp_path / "data").mkdir()
    flags = ("--epochs", "1", "--per-class", "20", "--size", "8")
    assert program("train", "digits", *flags, "--data", tmp_path / "data", "--out", tmp_path / "run") == 0
    (tmp_path / "data").rmdir()
    (tmp_path / "run" / "result.json").unlink()
    assert program("train", "digits", "--resume", tmp_path / "run") == 0


def test_a_folder_that_a_mistake_has_freed_can_be_named_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the first step shows, as when a network needs another route."""
    data, out = write_folder(tmp_path / "mine", IMAGES), tmp_path / "run"

    def refuse(*_: object) -> NoReturn:
        raise ValueError("another route")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "policy_backward", refuse)
        assert program("train", "folder", "--data", data, *SMALL, "--out", out) == 2
    assert program("train", "folder", "--data", data, *SMALL, "--epochs", 1, "--out", out) == 0


def test_a_search_continues_without_being_told_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    data, out = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20}), tmp_path / "search"
    monkeypatch.chdir(tmp_path)
    assert program("search", "dada", "folder", "--data", "mine", *SMALL[:-4], "--workers", "0", "--out", out) == 0
    monkeypatch.chdir(out)
    found = published.find(out / "policy.json")
    (out / "policy.json").unlink()
    assert program("search", "dada", "folder", "--resume", out) == 0
    assert published.find(out / "policy.json") == found
    (out / "policy.json").unlink()
    data.rename(tmp_path / "moved")
    assert f"the data of {out} were in {data}" in refused(capsys, "search", "dada", "folder", "--resume", out)
    assert program("search", "dada", "folder", "--resume", out, "--data", tmp_path / "moved") == 0


def test_a_reproduction_goes_on_with_runs_that_remember_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It refused to begin without --data, though nothing was to begin."""
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path / "data"))
    monkeypatch.setenv("METAAUGMENT_DATA", str(tmp_path / "nothing here"))
    monkeypatch.chdir(tmp_path)
    started = []

    def start(job: Job) -> None:
        started.append(job)
        raise OSError(11, "nothing is started here")

    monkeypatch.setattr(Job, "start", start)
    words = ("reproduce", "cifar10-wrn-40-2", "--methods", "baseline", "--seeds", 1)
    assert "not all data are there" in refused(capsys, *words)
    assert not started
    assert "nothing is started here" in refused(capsys, *words, "--data", "data")
    (job,) = started
    job.folder.mkdir(parents=True)
    (job.folder / "recipe.json").write_text(json.dumps(job.recipe.to_json()))
    Place(data=Path("data")).remember(job.folder, job.dataset)
    assert "nothing is started here" in refused(capsys, *words)
    assert "not all data are there" in refused(capsys, *words[:-1], 2), "the second one is still to begin"
