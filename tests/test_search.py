"""What all searches share: the folder that remembers, going on, refusals, the cost, and the commands."""

import errno
import json
import math
import multiprocessing
import re
import resource
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from metaaugment.files.sealed import Damaged
from metaaugment.lab import cli
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import FoundPolicy, Function, Schedule, SubPolicies
from metaaugment.lab.data import CorruptImage, DataSet, dataset
from metaaugment.lab.experiments import experiment, validity
from metaaugment.lab.experiments.experiment import prepare
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import faa, pba
from metaaugment.lab.search.crew import Crew
from metaaugment.lab.search.run import SEARCHES, Kind, search
from metaaugment.lab.search.trials import TRIALS, Laboratory
from metaaugment.lab.training.interruption import Interrupted

import searches
from commands import Captured, program, refused
from searches import QUIET
from trees import write_folder

FOUND = SubPolicies("faa", "mine", "faa", 1, ((Function("Rotate", 0.5, 0.7), Function("Color", 1.0, 0.2)),))


@dataclass(frozen=True)
class Settings:
    """Tries three things."""

    tries: int = 3
    """How many."""
    helpers: int = 1
    """Of no consequence."""

    def check(self) -> None:
        if self.tries < 1:
            raise ValueError("--tries is too small")


def recipe(**changes: Any) -> Recipe:
    return replace(RECIPES["digits"](), **{"method": "faa", "epochs": 1, "per_class": 10, **changes})


def finder(stop_after: int | None = None) -> Kind:
    """A search whose trials are numbers; it may be stopped behind one of them."""

    def find(lab: Laboratory, settings: Settings) -> SubPolicies:
        for number in range(len(lab.trials()), settings.tries):
            lab.note({"trial": number, "objective": number / 10, "seconds": 2.5})
            if stop_after == number:
                raise Interrupted(15)
        return FOUND

    return Kind("faa", Settings, find, where=("helpers",))


laboratory = partial(searches.laboratory, recipe=recipe())


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_line_left_half_written_is_no_trial_and_spoils_no_other(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    lab.note({"trial": 0, "seconds": 1.0})
    with (tmp_path / TRIALS).open("a") as file:
        file.write('{"trial": 1, "obj')
    assert [row["trial"] for row in lab.trials()] == [0]
    lab.note({"trial": 2, "seconds": 1.0})
    assert [row["trial"] for row in lab.trials()] == [0, 2]


def test_a_row_that_does_not_fit_on_the_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The system takes the part of a row that fits, without an error, and refuses the rest."""
    lab = laboratory(tmp_path)
    lab.note({"trial": 0, "seconds": 1.0})
    before, limits = (tmp_path / TRIALS).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as full:
            lab.note({"trial": 1, "seconds": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.value.filename == str(tmp_path / TRIALS)
    assert (tmp_path / TRIALS).read_bytes() == before


def _note_many(folder: Path, worker: int) -> None:
    lab = Laboratory(recipe(), Place(), None, folder, QUIET)  # type: ignore[arg-type]
    for number in range(200):
        lab.note({"worker": worker, "number": number, "seconds": 1.0, "padding": "x" * 500})


def test_processes_note_at_the_same_time_without_losing_a_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_note_many, args=(tmp_path, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = sorted((row["worker"], row["number"]) for row in laboratory(tmp_path).trials())
    assert found == [(worker, number) for worker in range(3) for number in range(200)]


# -- several processes ---------------------------------------------------------------------------------------------


def doubled(lab: Laboratory, out_of_memory: int) -> Callable[[int], int]:
    def double(number: int) -> int:
        if number == out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if number == 3:
            raise CorruptImage(lab.folder / "a.png", "it is none")
        return 2 * number

    return double


def test_full_memory_in_a_process_of_a_search(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It counts as killed, for want of memory for all: others may do its work. It ended in a traceback."""
    said = "2 of 2 processes were killed, exit status 1, before a trial was finished; check that there is memory"
    with pytest.raises(ValueError, match=said), Crew(laboratory(tmp_path), 2, doubled, (0,)) as crew:
        list(crew.do([0]))
    assert capfd.readouterr().err == 2 * "metaaugment: the memory of the GPU is full\n"


def test_an_image_that_a_process_cannot_read_is_the_searchs_to_put_into_words(tmp_path: Path) -> None:
    """After what others have finished; and no process is left."""
    with Crew(laboratory(tmp_path), 2, doubled, (0,)) as crew:
        assert sorted(crew.do([1, 2, 4])) == [(1, 2), (2, 4), (4, 8)]
        with pytest.raises(CorruptImage, match=r"a\.png cannot be read as an image \(it is none\)$"):
            list(crew.do([3]))
    assert multiprocessing.active_children() == []


# -- from beginning to end ---------------------------------------------------------------------------------------------


def test_it_ends_in_a_policy_with_its_cost(tmp_path: Path) -> None:
    file = search(finder(), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    assert published.find(file) == FOUND
    about = json.loads(file.read_text())["search"]
    assert (about["cost"]["trials"], about["cost"]["seconds"], about["cost"]["unit"]) == (3, 7.5, "CPU-seconds")
    assert about["settings"] == {"tries": 3}
    assert Recipe.from_json(about["recipe"]) == recipe()


def test_it_does_not_see_what_is_held_back(tmp_path: Path) -> None:
    search(finder(), recipe(held_back=0.5), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    values = json.loads((tmp_path / "s" / "search.json").read_text())
    data = dataset("digits", size=recipe().size, per_class=recipe().per_class)
    assert values["data"] == data.rehearsal(0.5, 0).fingerprint() != data.fingerprint()


def test_a_folder_is_no_policy_but_may_have_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder, not a policy; name a file, or one of autoaugment-"):
        published.find(tmp_path)
    file = search(finder(), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    with pytest.raises(ValueError, match=f"{tmp_path / 's'} is a folder, not a policy; name its file {file}$"):
        published.find(tmp_path / "s")


def test_a_policy_of_other_images_of_ones_own_may_have_seen_the_test_images(tmp_path: Path, capsys: Captured) -> None:
    """Which a run says, as it does of a learned policy."""
    mine = replace(RECIPES["folder"](), method="faa", network="small-cnn", size=8, batch=8, epochs=1)
    one, more = (write_folder(tmp_path / name, {"cat": n, "dog": n}) for name, n in (("one", 20), ("more", 25)))
    place = Place(data=one, device="cpu", workers=0)
    file = search(finder(), mine, Settings(), replace(place, out=tmp_path / "s"), QUIET)
    note = f"--policy {file} was learned on other images than those of this run; if it has seen some of the test images"
    for data in (one, more):
        prepare(replace(mine, policy=file), replace(place, data=data), Console(soft_wrap=True))
        assert (note in capsys.readouterr().out) == (data == more)


def test_a_stopped_search_goes_on(tmp_path: Path, capsys: Captured) -> None:
    place = Place(out=tmp_path / "s", device="cpu")
    with pytest.raises(Interrupted):
        search(finder(stop_after=1), recipe(), Settings(helpers=4), place, Console(soft_wrap=True))
    said = capsys.readouterr().out
    command = f"metaaugment search faa digits --device cpu --resume {tmp_path / 's'} --helpers 4"
    assert f"stopped after 2 trials; nothing is lost, continue with: {command}" in said
    assert not (tmp_path / "s" / "policy.json").exists()
    # Settings of where trials are made may change; the others are those it began with.
    resumed = Place(resume=tmp_path / "s", device="cpu")
    file = search(finder(), recipe(), Settings(helpers=7), resumed, QUIET)
    assert [row["trial"] for row in laboratory(tmp_path / "s").trials()] == [0, 1, 2]
    assert search(finder(), recipe(), Settings(), resumed, QUIET) == file  # finished already


def test_it_keeps_the_threads_that_it_began_with(tmp_path: Path) -> None:
    """With others it would find another policy than a search that was not stopped."""
    threads = []

    def counting(kind: Kind) -> Kind:
        def find(lab: Laboratory, settings: Settings) -> FoundPolicy:
            threads.append(torch.get_num_threads())
            return kind.find(lab, settings)

        return replace(kind, find=find)

    with pytest.raises(Interrupted):
        search(counting(finder(stop_after=1)), recipe(), Settings(), Place(out=tmp_path / "s", threads=2), QUIET)
    begun = (tmp_path / "s" / "search.json").read_text()
    assert json.loads(begun)["threads"] == 2
    for wrong in (0, "two"):
        (tmp_path / "s" / "search.json").write_text(json.dumps(json.loads(begun) | {"threads": wrong}))
        with pytest.raises(Damaged, match=rf"search\.json cannot be understood: --threads is {wrong!r}; it must be"):
            search(finder(), recipe(), Settings(), Place(resume=tmp_path / "s"), QUIET)
    (tmp_path / "s" / "search.json").write_text(begun)
    search(counting(finder()), recipe(), Settings(), Place(resume=tmp_path / "s"), QUIET)
    assert threads == [2, 2]
    assert torch.get_num_threads() == 1, "as before"


def test_a_resume_that_fails_loses_nothing(tmp_path: Path) -> None:
    """Also where no trial is finished yet, but a network has been in training for long."""

    def killed(lab: Laboratory, settings: Settings) -> SubPolicies:
        (lab.folder / "fold-0").mkdir()
        raise Interrupted(9)

    def wrong(lab: Laboratory, settings: Settings) -> SubPolicies:
        raise ValueError("a package is missing")

    with pytest.raises(Interrupted):
        search(Kind("faa", Settings, killed), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    resumed = Place(resume=tmp_path / "s", device="cpu")
    with pytest.raises(ValueError, match="a package is missing"):
        search(Kind("faa", Settings, wrong), recipe(), Settings(), resumed, QUIET)
    search(finder(), recipe(), Settings(), resumed, QUIET)


@pytest.mark.parametrize("file", ["trials.jsonl", None])
def test_a_fault_of_the_machine_says_how_to_go_on(file: str | None, tmp_path: Path) -> None:
    """Also one that names no file."""

    def full(lab: Laboratory, settings: Settings) -> SubPolicies:
        raise OSError(errno.ENOSPC, "No space left on device", file)

    place = Place(out=tmp_path / "s", device="cpu")
    with pytest.raises(OSError, match="No space left on device") as error:
        search(Kind("faa", Settings, full), recipe(), Settings(), place, QUIET)
    command = f"metaaugment search faa digits --device cpu --resume {tmp_path / 's'}"
    assert str(error.value.strerror) == f"No space left on device; once that is fixed, continue with: {command}"
    assert error.value.filename == (file or str(tmp_path / "s"))


def test_a_policy_that_cannot_be_written_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **about: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "policy.json")

    with monkeypatch.context() as patch:
        patch.setattr(published, "write", full)
        with pytest.raises(OSError, match=r"once that is fixed, continue with: metaaugment search .*policy.json"):
            search(finder(), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    search(finder(), recipe(), Settings(), Place(resume=tmp_path / "s", device="cpu"), QUIET)


def test_other_data_are_refused_when_it_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        search(finder(stop_after=0), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    record = tmp_path / "s" / "search.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps(values | {"data": "0" * 16}))
    with pytest.raises(ValueError, match="belongs to a run on other data"):
        search(finder(), recipe(), Settings(), Place(resume=tmp_path / "s", device="cpu"), QUIET)


def test_a_search_of_another_version_goes_on(tmp_path: Path) -> None:
    """With a field that is no more, and without one that is new; what it was begun with stays as it was written."""
    with pytest.raises(Interrupted):
        search(finder(stop_after=1), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    record = tmp_path / "s" / "search.json"
    values = json.loads(record.read_text())
    values["recipe"] |= {"power": 1.0}
    del values["recipe"]["policy_schedule"]
    record.write_text(json.dumps(values))
    search(finder(), recipe(), Settings(), Place(resume=tmp_path / "s", device="cpu"), QUIET)
    assert json.loads(record.read_text()) == values


def test_trials_in_a_database_are_not_gone_on_with_otherwise(tmp_path: Path) -> None:
    lab = replace(laboratory(tmp_path), recipe=recipe(batch=32))
    lab.note({"trial": 0, "fold": 0, "number": 0, "objective": 0.5, "seconds": 1})
    with pytest.raises(ValueError, match=r"no studies.log; if they are in a database, name it with --storage URL, o"):
        faa.find(lab, faa.Settings())
    (tmp_path / "studies.log").touch()
    with pytest.raises(ValueError, match=r"has its trials in its own studies.log; leave out --storage"):
        faa.find(lab, faa.Settings(storage="sqlite:///x.db"))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--held-out", "0.001"], "--held-out is 0.001, which holds out none of 100 images"),
        (["--batch", "90"], "--batch is 90, but a fold trains on 60 images only"),
    ],
)
def test_what_a_fold_cannot_be_is_refused_before_it_begins(
    flags: list[str], sentence: str, tmp_path: Path, capsys: Captured
) -> None:
    common = ["--per-class", "10", "--epochs", "1", "--trials", "1", "--folds", "1", "--best", "1", "--device", "cpu"]
    assert sentence in refused(capsys, "search", "faa", "digits", *common, *flags, "--out", tmp_path / "s")
    cli.main(["search", "faa", "digits", *common, "--out", str(tmp_path / "s")])  # the same folder, mended


def test_other_settings_are_refused_when_it_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        search(finder(stop_after=0), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    resumed = Place(resume=tmp_path / "s", device="cpu")
    with pytest.raises(ValueError, match=r"--tries is 5, but .* was begun with 3"):
        search(finder(), recipe(), Settings(tries=5), resumed, QUIET)
    with pytest.raises(ValueError, match=r"--epochs is 40, but .* was begun with 1"):  # the recipe's own, if it is said
        search(finder(), recipe(epochs=40), Settings(), resumed, QUIET, {"epochs"})
    with pytest.raises(ValueError, match=r"--batch is 7, but .* was begun with 50"):
        search(finder(), recipe(batch=7), Settings(), resumed, QUIET)
    with pytest.raises(ValueError, match="is a search of faa for digits, not of faa for folder"):
        search(finder(), replace(RECIPES["folder"](), method="faa"), Settings(), resumed, QUIET)


def test_the_search_of_another_system_is_not_called_damaged(tmp_path: Path) -> None:
    """Its settings are others, which is no fault of the file."""

    def stopped(lab: Laboratory, settings: pba.Settings) -> SubPolicies:
        raise Interrupted(15)

    kind = replace(SEARCHES["pba"], find=stopped)
    with pytest.raises(Interrupted):
        search(kind, recipe(method="pba"), pba.Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)
    resumed = Place(resume=tmp_path / "s", device="cpu")
    for method in ("faa", "pba"):  # also where --method says otherwise
        with pytest.raises(ValueError, match="is a search of pba for digits, not of faa for digits; continue it as p"):
            search(SEARCHES["faa"], recipe(method=method), faa.Settings(), resumed, QUIET)


HERE, NOWHERE = Path(__file__).parent, Path("nowhere")
NO_SEARCH = "nowhere is not a search: it has no search.json; name the folder of one, or begin one with --out"


@pytest.mark.parametrize(
    ("changes", "place", "sentence"),
    [
        ({"policy": Path("faa-svhn")}, {}, "--policy is not used by a search; leave it out"),
        ({}, {"tensorboard": True}, "--tensorboard is not used by a search; leave it out"),
        ({}, {"precision": "float64"}, "--precision is float64, which only train supports; leave it out, or"),
        ({"method": "pba"}, {}, "--method is 'pba'; this is the search of faa; leave out the flag"),
        ({}, {"resume": NOWHERE, "out": None}, NO_SEARCH),
        ({}, {"resume": NOWHERE, "out": Path("b")}, "--out is b, but --resume continues in nowhere; leave out --out"),
        ({}, {"out": HERE}, "exists already"),
    ],
)
def test_what_cannot_begin_or_go_on(
    changes: dict[str, Any], place: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        search(finder(), recipe(**changes), Settings(), Place(**{"out": tmp_path / "s", **place}), QUIET)
    assert not (tmp_path / "s").exists()


WAY_OUT = "; restore an intact copy of it, or begin another search with --out"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"recipe": {}}', "cannot be understood: the recipe field 'name' is missing"),
        ('{"recipe": ', "is damaged: it is not valid JSON (Expecting value: line 1 column 12 (char 11))"),
        ("[1]", "is damaged: it holds a list, not an object"),
        ("{}", "cannot be understood: 'recipe' is missing"),
        (
            json.dumps({"recipe": recipe().to_json(), "settings": {"tries": 3, "colour": 1}}),
            "cannot be understood: unknown search field 'colour', as of another version; the fields are helpers, tries",
        ),
    ],
)
def test_a_damaged_record_is_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path}/search.json {reason}{WAY_OUT}')}$"):
        search(finder(), recipe(), Settings(), Place(resume=tmp_path), QUIET)


# By system: a file of its folder, what that becomes, and what is said of it.
PBA, FAA, LINE = ("pba", "population.json"), ("faa", "studies.log"), b'{"seconds": 1}\n'
NONE = b'{"trial": 0, "generation": 1, "objective": null, "seconds": 1}\n'
DAMAGE: list[tuple[tuple[str, str], Callable[[bytes], bytes], str]] = [
    (("pba", TRIALS), lambda was: was + LINE, "row 5 has no 'trial', which all rows of this search have"),
    (("faa", TRIALS), lambda was: was + LINE, "row 5 has no 'fold', which all rows of this search have"),
    (("dada", TRIALS), lambda was: LINE, "row 1 has no 'trial', which all rows of this search have"),
    (("autoaugment", TRIALS), lambda was: was + LINE, "row 3 has no 'trial', which all rows"),
    (("autoaugment", TRIALS), lambda was: was + was, "trial 0 is where trial 2 must be"),
    (("autoaugment", TRIALS), lambda was: was.replace(b'ons": [', b'ons": [99, '), ""),
    (("pba", TRIALS), lambda was: was + NONE, "the 'objective' of row 5 is None, which is not a valid value"),
    (("dada", TRIALS), lambda was: was + b"\xff\n", "'utf-8' codec can't decode byte 0xff"),
    (PBA, lambda was: b"{}", "'generation' is missing"),
    (PBA, lambda was: was.replace(b'"generation": 1', b'"generation": 9'), "it must have one of 2 generations"),
    (PBA, lambda was: b'{"generation": 1, "policies": [[1, 2]]}', "one of 2 generations, and 2 policies of 56 numbers"),
    (PBA, lambda was: was.replace(b"0,", b"70,"), "has the probability 7; it must lie in [0, 1]"),
    (FAA, lambda was: was + b"nonsense\n", "Expecting value: line 1 column 1"),
    (FAA, lambda was: b"\xff\n" + was, "'utf-8' codec can't decode byte 0xff"),
    (FAA, lambda was: b"", "it has no trial 1 of fold 0, which trials.jsonl has"),
    (FAA, lambda was: without(was, b"function-0-first"), "The value of the parameter 'function-0-first' is not found"),
    (FAA, lambda was: without(was, b'"place":'), "'place' is missing"),
]


def without(lines: bytes, word: bytes) -> bytes:
    """The lines but for the last one that has this word."""
    kept = lines.splitlines(keepends=True)
    kept.remove([line for line in kept if word in line][-1])
    return b"".join(kept)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of each system without its policy, which a resumed search would write."""
    folder = tmp_path_factory.mktemp("unfinished")
    for system, flags in SMALL.items():
        place = ["--device", "cpu", "--out", str(folder / system)]
        cli.main(["search", system, "digits", "--epochs", "1", "--per-class", "10", *flags, *place])
        (folder / system / "policy.json").unlink()
    return folder


@pytest.mark.parametrize(("where", "damage", "reason"), DAMAGE)
def test_what_is_damaged_or_of_something_else_is_named_in_one_sentence(
    where: tuple[str, str], damage: Callable[[bytes], bytes], reason: str, unfinished: Path, tmp_path: Path,
    capsys: Captured,
) -> None:  # fmt: skip
    system, name = where
    shutil.copytree(unfinished / system, tmp_path / "s")
    file = tmp_path / "s" / name
    file.write_bytes(damage(file.read_bytes()))
    said = refused(capsys, "search", system, "digits", "--device", "cpu", "--resume", tmp_path / "s")
    assert said.startswith(f"metaaugment: {file} cannot be understood: ")
    assert reason in said
    assert said.endswith(WAY_OUT)


@pytest.mark.parametrize("system", SEARCHES)
@pytest.mark.parametrize("other", SEARCHES)
def test_the_trials_of_another_search_are_refused(
    system: str, other: str, unfinished: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(unfinished / system, tmp_path / "s")
    shutil.copyfile(unfinished / other / TRIALS, tmp_path / "s" / TRIALS)
    status = program("search", system, "digits", "--device", "cpu", "--resume", tmp_path / "s")
    assert status == (0 if system == other else 2)
    assert system == other or f"{TRIALS} cannot be understood: row 1 has no " in capsys.readouterr().err


def test_a_search_without_validation_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*args: Any, **options: Any) -> DataSet:
        data = dataset(*args, **options)
        return replace(data, val=data.val.take(data.val.labels[:0]))

    monkeypatch.setattr(experiment, "dataset", without)
    with pytest.raises(ValueError, match="digits has no validation images, which a search judges by"):
        search(finder(), recipe(), Settings(), Place(out=tmp_path / "s"), QUIET)
    assert not (tmp_path / "s").exists()


def test_two_searches_in_one_folder_are_refused(tmp_path: Path) -> None:
    def again(lab: Laboratory, settings: Settings) -> SubPolicies:
        search(finder(), recipe(), Settings(), Place(resume=lab.folder, device="cpu"), QUIET)
        return FOUND

    with pytest.raises(ValueError, match="another process is training into"):
        search(Kind("faa", Settings, again), recipe(), Settings(), Place(out=tmp_path / "s", device="cpu"), QUIET)


# -- all four, as commands --------------------------------------------------------------------------------

SMALL = {
    "faa": ["--folds", "1", "--trials", "3", "--best", "1"],
    "pba": ["--trials", "2", "--interval", "1", "--epochs", "2"],
    "dada": ["--sub-policies", "4"],
    "autoaugment": ["--children", "2"],
}
# By hand from those flags: one network and three policies; two trials of two intervals; one epoch; two children.
WORK = {
    "faa": "3 trials and 1 training of a network",
    "pba": "4 intervals of 2 trials",
    "dada": "1 epoch of one training",
    "autoaugment": "2 trials",
}


@pytest.mark.parametrize("system", SEARCHES)
def test_each_search_as_a_command(system: str, tmp_path: Path, capsys: Captured) -> None:
    flags = ["--epochs", "1", "--per-class", "20", "--device", "cpu", "--out", str(tmp_path / "s"), *SMALL[system]]
    cli.main(["search", system, "digits", *flags])
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"{WORK[system]}, ")
    assert "CPU-seconds" in said
    policy = published.find(tmp_path / "s" / "policy.json")
    assert policy.system == system
    assert isinstance(policy, Schedule if system == "pba" else SubPolicies)
    cli.main(["ops", "--policy", str(tmp_path / "s" / "policy.json")])
    assert len(capsys.readouterr().out.splitlines()) > 2


@pytest.mark.parametrize(
    ("system", "changes", "sentence"),
    [
        *(
            (system, {name: least - 1}, f"must be a whole number of at least {least}")
            for system, names, least in (
                ("faa", ("folds", "trials", "sub_policies", "draws", "best", "processes"), 1),
                ("pba", ("trials",), 2),
                ("pba", ("interval", "processes", "ray_workers"), 1),
                ("autoaugment", ("children",), 1),
            )
            for name in names
        ),
        ("faa", {"held_out": 0.6}, "--held-out is 0.6; it must be a share above 0, and at most 0.5"),
        ("faa", {"held_out": math.nan}, "--held-out is nan; it must be a share above 0, and at most 0.5"),
        ("faa", {"storage": "studies.db"}, "--storage is 'studies.db'; it must be a URL such as sqlite:///FILE"),
        ("pba", {"processes": 2, "address": "auto"}, "--processes is 2, but Ray starts its own; leave out one of the"),
        ("pba", {"functions": "papers"}, "--functions is 'papers' (did you mean paper?); choose one of paper, pba"),
        ("dada", {"temperature": 0.0}, "--temperature is 0.0; it must be above 0"),
        ("dada", {"temperature": math.nan}, "--temperature is nan; it must be above 0"),
        ("dada", {"sub_policies": 0}, "--sub-policies is 0; it must be 1 to 105"),
        ("dada", {"sub_policies": 106}, "--sub-policies is 106; it must be 1 to 105"),
        ("autoaugment", {"controller_lr": -1.0}, "--controller-lr is -1.0; it must be a number of 0 or more"),
        ("autoaugment", {"controller_lr": math.nan}, "--controller-lr is nan; it must be a number of 0 or more"),
        ("autoaugment", {"controller_lr": math.inf}, "--controller-lr is inf; it must be a number of 0 or more"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(
    system: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    kind = SEARCHES[system]
    trial, place = kind.trial(recipe(method=system)), Place(out=tmp_path / "s", device="cpu")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        search(kind, trial, kind.settings(**changes), place, QUIET)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", SEARCHES.values(), ids=SEARCHES)
def test_settings_are_flags_of_their_own(kind: Kind) -> None:
    taken = {field.name for known in (Recipe, Place) for field in fields(known)}
    assert taken.isdisjoint(field.name for field in fields(kind.settings))


@pytest.mark.parametrize("system", SEARCHES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_trial_of_every_recipe_can_be_trained(system: str, name: str) -> None:
    validity.check(SEARCHES[system].trial(replace(RECIPES[name](), method=system)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pba", "digits", "--interval", "40"], "--interval is 40, but a trial has 40 epochs"),
        (["pba", "digits", "--address", "127.0.0.1:1"], "where no Ray cluster answers"),
        (["faa", "digits", "--address", "auto"], "faa shares its trials among processes with --processes N, and among"),
        (["dada", "digits", "--address=auto"], "--address is for pba, which can run on Ray; dada is a single"),
        (["autoaugment", "digits", "--address", "h:1"], "autoaugment trains its networks one after the other, on one"),
        (["dada", "digits", "--temperature", "0"], "--temperature is 0.0; it must be above 0"),
        (["faa", "cifar10-wrn-40-2", "--data", "nowhere"], "CIFAR-10 is not there"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys: Captured) -> None:
    assert sentence in refused(capsys, "search", *words, "--out", tmp_path / "s")


def test_what_says_what_a_policy_does_can_be_copied_to_a_shell(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "one of mine.json"
    published.write(FOUND, file)
    said = refused(capsys, "inspect", file)
    command = said.split(" is a policy of faa; ")[1].removesuffix(" says what it does")
    assert program(*shlex.split(command)[1:]) == 0


@pytest.mark.parametrize(
    "settings",
    [
        ("dada",),
        ("faa", "--folds", "2", "--trials", "2", "--sub-policies", "1"),
        ("pba", "--trials", "2", "--interval", "1"),
        ("autoaugment", "--children", "2"),
    ],
    ids=["dada", "faa", "pba", "autoaugment"],
)
def test_a_search_goes_on_past_an_image_that_cannot_be_read(
    settings: tuple[str, ...], tmp_path: Path, capsys: Captured
) -> None:
    """By the command that it names; without the file, the data would be others than those it began with."""
    data, out = write_folder(tmp_path / "data of mine", {"cat": 20, "dog": 20}), tmp_path / "out"
    for name in ("cat", "dog"):
        (data / name / "003.png").write_bytes(b"no image at all")
    flags = ("--network", "small-cnn", "--size", "8", "--batch", "8", "--epochs", "2", "--workers", "0")
    system, *more = settings
    said = refused(capsys, "search", system, "folder", "--data", data, *flags, *more, "--out", out)
    assert "/003.png cannot be read as an image (" in said
    command = shlex.split(said.split("; leave it out and continue with: ")[1])
    assert command[:4] == ["metaaugment", "search", system, "folder"]
    assert program(*command[1:]) == 0
    assert (out / "policy.json").exists()
