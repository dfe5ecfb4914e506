"""The paper's tables as runs: what is run, in what order and time, what is kept, and what is reported of it."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from metaaugment.lab import cli
from metaaugment.lab.data.catalog import check_there
from metaaugment.lab.experiments import jobs as working
from metaaugment.lab.experiments import reproduce as reproducing
from metaaugment.lab.experiments import results, run, validity
from metaaugment.lab.experiments.flags import flags
from metaaugment.lab.experiments.jobs import Job, Search, Where, Work
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.methods import copies as entry_copies
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.reproduce import Queue, planned, seconds_of
from metaaugment.lab.experiments.tables import COMPARISONS, ROWS, Entry, Row, find_rows, folder_name
from metaaugment.lab.search.run import record_of
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.interruption import Interrupted
from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.launch import launch
from metaaugment.lab.training.log import FIGURES, LOG
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learned.source import Source
from metaaugment.ops import find_space
from metaaugment.sampler import SingleSampler

from commands import Captured, refused
from processes import until

ROOT = Path(__file__).parent.parent
OMNIGLOT = "omniglot-wrn-40-2"
QUIET = Console(quiet=True)


def where(folder: Path) -> Where:
    return Where(folder / "runs", folder / "results", Place(device="cpu"), record_of)


def an_entry(row: str, name: str) -> tuple[Row, Entry]:
    return ROWS[row], next(entry for entry in ROWS[row].entries if entry.name == name)


def a_job(folder: Path, row: str = "digits", name: str = "baseline", seed: int = 0, epochs: int | None = None) -> Job:
    return Job(*an_entry(row, name), epochs, where(folder), seed)


def digits(folder: Path, seeds: int = 1) -> list[Work]:
    """What is missing of the baseline on digits."""
    return planned(find_rows(("digits",)), seeds, None, ["baseline"], where(folder))


def kept(folder: Path, seeds: int = 1) -> list[dict[str, Any]]:
    """The results of the baseline on digits."""
    files = (folder / "results" / "digits" / f"baseline-seed{seed}.json" for seed in range(seeds))
    return [json.loads(file.read_text()) for file in files]


def reproduce_digits(folder: Path, report: Path, console: Console, seeds: int = 1) -> None:
    reproducing.reproduce(find_rows(("digits",)), seeds, None, None, ["baseline"], 1, where(folder), report, console)


# -- the tables --------------------------------------------------------------------------------------------------------

ENTRIES = [(row, entry) for row in ROWS.values() for entry in row.entries]


@pytest.mark.parametrize(("row", "entry"), ENTRIES, ids=lambda one: getattr(one, "recipe", None) or one.name)
def test_every_entry_is_a_recipe_that_the_command_line_understands(
    row: Row, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process is told comes out as the same recipe, every value of it."""
    asked: list[Recipe] = []
    monkeypatch.setattr(run, "train", lambda recipe, *more: asked.append(recipe))
    policy = Path("some.safetensors") if entry.under else None
    recipe = row.run(entry, 3, 97, policy)
    cli.main(["train", recipe.name, *flags(recipe, RECIPES[recipe.name]())])
    assert asked == [recipe]
    assert (recipe.seed, recipe.epochs) == (3, 97)
    validity.check(recipe)


# Tables 1, 3 and 4 as the paper prints them, then Table 2 and the one of transfer.
FIGURES_OF_THE_PAPER = """
                               baseline autoaugment faa   pba   dada randaugment advaa metaaugment
cifar10-wrn-28-10              96.1     97.4        97.3  97.42 97.3 97.3        98.10 97.76±0.04
cifar10-wrn-40-2               94.7     96.3        96.4  -     96.4 -           -     96.79±0.06
cifar10-shake-shake-26-2x96d   97.1     98.0        98.0  97.97 98.0 98.0        98.15 98.29±0.03
cifar10-shake-shake-26-2x112d  97.2     98.1        98.1  97.97 98.0 -           98.22 98.28±0.01
cifar10-pyramidnet             97.3     98.5        98.3  98.54 98.3 98.5        98.64 98.57±0.02
cifar100-wrn-28-10             81.2     82.9        82.8  83.27 82.5 83.3        84.51 83.79±0.11
cifar100-wrn-40-2              74.0     79.3        79.4  -     79.1 -           -     80.60±0.16
cifar100-shake-shake-26-2x96d  82.9     85.7        85.4  84.69 84.7 -           85.90 85.97±0.09
cifar100-pyramidnet            86.0     89.3        88.3  89.06 88.8 -           89.58 89.46±0.11
omniglot-wrn-28-10             87.89    -           89.24 89.25 -    87.86       -     89.61±0.05
omniglot-wrn-40-2              85.86    -           88.72 88.30 -    88.10       -     89.12±0.10
imagenet-resnet-50             76.3     77.6        77.6  -     77.5 77.6        79.40 79.74±0.08
imagenet-resnet-200            78.5     80.0        80.6  -     -    -           81.32 81.43±0.08
"""
OTHER_FIGURES = {
    ("cifar10-wrn-28-10-mt", "advaa"): "98.10", ("cifar10-wrn-28-10-mt", "metaaugment"): "98.26 ± 0.02",
    ("cifar100-wrn-28-10-mt", "advaa"): "84.51", ("cifar100-wrn-28-10-mt", "metaaugment"): "85.21 ± 0.09",
    ("cifar10-wrn-40-2", "transfer-wrn-28-10"): "96.82 ± 0.10",
    ("cifar100-wrn-40-2", "transfer-wrn-28-10"): "80.15 ± 0.09",
}  # fmt: skip


def test_the_papers_figures() -> None:
    header, *lines = (line.split() for line in FIGURES_OF_THE_PAPER.strip().splitlines())
    printed = OTHER_FIGURES | {
        (row, name): figure.replace("±", " ± ")
        for row, *figures in lines for name, figure in zip(header, figures, strict=True) if figure != "-"
    }  # fmt: skip
    ours = {(row.recipe, entry.name): entry.paper for row, entry in ENTRIES if entry.paper}
    for row in (row for row in ROWS if RECIPES[row]().transfer):
        source = "transfer-resnet-50" if row.startswith("imagenet") else "transfer-wrn-28-10"
        ours[row, "metaaugment"] = ours.pop((row, source))
    assert ours == printed


def test_every_recipe_of_the_paper_is_a_row() -> None:
    assert set(ROWS) == {name for name in RECIPES if name != "folder" and not name.endswith("-fast")}
    assert {row.recipe for row in find_rows(("table-1", "table-2", "table-3", "table-4"))} == set(ROWS) - {"digits"}


def test_a_fast_recipe_is_the_fast_entry_of_its_row() -> None:
    for name in (name for name in RECIPES if name.endswith("-fast")):
        row, entry = an_entry(name.removesuffix("-fast"), "metaaugment-fast")
        assert replace(row.run(entry, 0, None, None), name=name) == RECIPES[name]()


def test_every_row_has_all_methods() -> None:
    """Adversarial AutoAugment has its eight copies; beside a figure of the paper's a policy is learned as there."""
    for row in ROWS.values():
        assert {entry.changes["method"] for entry in row.entries} == set(METHODS)
        for entry in row.entries:
            if entry.changes["method"] == "advaa":
                assert entry_copies(row.run(entry, 0, None, None)) == 8
            if entry.under is not None:
                _, source = an_entry(*entry.under)
                assert source.changes == {"method": "metaaugment"} or not entry.paper


def test_tables_and_rows_are_found_by_name() -> None:
    assert [row.recipe for row in find_rows(("table-3",))] == ["omniglot-wrn-40-2", "omniglot-wrn-28-10"]
    twice = find_rows(("digits", "omniglot-wrn-40-2", "digits"))
    assert [row.recipe for row in twice] == ["digits", "omniglot-wrn-40-2"]
    with pytest.raises(ValueError, match="unknown table, row or comparison 'table-9'; choose from digits, table-3"):
        find_rows(("table-9",))
    with pytest.raises(ValueError, match="not a row; it is run by: omniglot-wrn-40-2 --methods metaaugment-f"):
        find_rows(("omniglot-wrn-40-2-fast",))


def test_a_comparison_is_run_by_its_name_alone() -> None:
    for name, comparison in COMPARISONS.items():
        (row,) = find_rows((name,))
        assert row.recipe == comparison.row
        assert {entry.name for entry in row.entries} == set(comparison.entries)
    (row,) = find_rows(("omniglot-wrn-40-2",))
    assert not any(entry.apart for entry in row.entries)
    (both,) = find_rows(("ablation-epsilon", "ablation-embedding"))
    assert len(both.entries) == 5  # metaaugment-fast is in each, and is run once
    assert {name for a in COMPARISONS.values() for name in a.entries} >= {
        entry.name for entry in ROWS["omniglot-wrn-40-2"].entries if entry.apart
    }


def test_what_was_held_back_is_no_test(tmp_path: Path) -> None:
    """As an earlier version kept such results; they stand in a table of their own."""
    (tmp_path / OMNIGLOT).mkdir()
    for file in (ROOT / "results" / "archive" / OMNIGLOT).glob("tried-fast-*.json"):
        shutil.copy(file, tmp_path / OMNIGLOT)
    report = results.markdown(tmp_path)
    assert f"### {OMNIGLOT}: accuracy on images that were held back" in report
    assert "| tried-fast | 89.83 | 1 |" in report
    assert "(table-3)" not in report


def test_ablations_stand_apart_in_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "omniglot-wrn-40-2"
    folder.mkdir()
    for name in ("metaaugment-fast", "fast-epsilon-0"):
        shutil.copy(ROOT / "results" / "omniglot-wrn-40-2" / f"{name}-seed0.json", folder)
    main, ablation = results.markdown(tmp_path).split("### ablation-epsilon")
    assert "metaaugment-fast" in main
    assert "fast-epsilon-0" not in main
    assert ablation.index("fast-epsilon-0") < ablation.index("metaaugment-fast")
    assert "ablation-embedding" not in ablation


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_budget_is_a_time() -> None:
    for text, seconds in {"90s": 90, "25m": 1500, "2h": 7200, "1.5m": 90, " 3s ": 3}.items():
        assert seconds_of(text) == seconds
    for text in ("", "25", "m", "-3s", "3 days", "0s", "1e3s", "nan s"):
        with pytest.raises(ValueError, match="it must be a time such as 90s, 25m or 2h"):
            seconds_of(text)


def test_missing_runs_those_begun_first_then_seed_by_seed(tmp_path: Path) -> None:
    rows, entries, here = find_rows(("digits",)), ["baseline", "metaaugment"], where(tmp_path)
    finished = a_job(tmp_path)
    finished.result.parent.mkdir(parents=True)
    finished.result.write_text("{}")
    record(a_job(tmp_path, name="metaaugment", seed=2))
    names = [job.name for job in planned(rows, 3, None, entries, here)]
    assert names == ["metaaugment-seed2", "metaaugment-seed0", "baseline-seed1", "metaaugment-seed1", "baseline-seed2"]
    with pytest.raises(ValueError, match="--methods has 'nope'; choose from advaa"):
        planned(rows, 1, None, ["nope"], here)


def test_row_after_row_and_what_the_paper_does_not_have_last_in_each(tmp_path: Path) -> None:
    """Within a budget, whole rows are worth more than a first seed of each."""
    rows, entries = find_rows(("table-3",)), ["baseline", "pba-svhn", "metaaugment", "faa"]
    assert [str(work) for work in planned(rows, 2, None, entries, where(tmp_path))] == [
        f"omniglot-{network} {name}"
        for network in ("wrn-40-2", "wrn-28-10")
        for name in ("baseline-seed0", "metaaugment-seed0", "faa-search", "faa-seed0", "baseline-seed1",
                     "metaaugment-seed1", "faa-seed1", "pba-svhn-seed0", "pba-svhn-seed1")
    ]  # fmt: skip


def test_a_plan_is_told_and_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    kept = Path("results/omniglot-wrn-40-2")
    kept.mkdir(parents=True)
    for seed, seconds in enumerate((300, 420)):
        result = json.loads((ROOT / kept / f"faa-seed{seed}.json").read_text())
        write_json(kept / f"faa-seed{seed}.json", result | {"seconds": seconds})
    begun = Path("runs/omniglot-wrn-40-2/faa-search")
    begun.mkdir(parents=True)
    write_json(begun / "search.json", record_of("faa", "omniglot-wrn-40-2", {}))
    before = sorted(tmp_path.rglob("*"))
    cli.main(["reproduce", "omniglot-wrn-40-2", "--methods", "baseline", "faa", "--seeds", "3", "--plan"])
    assert capsys.readouterr().out.splitlines() == [
        "omniglot-wrn-40-2 faa-search, begun",
        *(f"omniglot-wrn-40-2 baseline-seed{seed}" for seed in (0, 1, 2)),
        "omniglot-wrn-40-2 faa-seed2, about 6 min on NVIDIA H200",
        "4 runs to do",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_says_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    methods = ["--methods", "baseline", "transfer-wrn-28-10", "metaaugment"]
    cli.main(["reproduce", "cifar10-pyramidnet", *methods[:-1], "--seeds", "1", "--plan"])
    run, count, waiting = capsys.readouterr().out.splitlines()
    assert (run, count) == ("cifar10-pyramidnet baseline-seed0", "1 run to do")
    assert waiting.startswith(
        "cifar10-pyramidnet transfer-wrn-28-10-seed0 waits for the policy of cifar10-wrn-28-10 metaaugment-seed0; make "
        "it with: metaaugment reproduce cifar10-wrn-28-10 --methods metaaugment --seeds 1"
    )
    cli.main(["reproduce", "cifar10-wrn-28-10", "cifar10-pyramidnet", *methods, "--seeds", "1", "--plan"])
    assert "waits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "--seeds", "0"], "--seeds is 0"),
        (["digits", "--epochs", "0"], "--epochs is 0"),
        (["digits", "--budget", "25"], "--budget is '25'"),
        (["digits", "--at-once", "0"], "--at-once is 0"),
        (["digits", "--device", "toaster"], "toaster"),
        (["digits", "--runs", "a-file"], "--runs is a-file, which is a file"),
        (["digits", "--results", "a-file"], "--results is a-file, which is a file"),
        (["digits", "--report", "a-file"], "a-file is not a report of reproduce; choose another name"),
        (["digits", "--report", "damaged"], "--report is damaged, which is a folder"),
        (["digits", "--results", "damaged"], "baseline-seed0.json is damaged"),
        ([], "--plan needs the names of what is to be planned, such as table-3"),
        (["--methods", "faa"], "name the table or row that has it, such as table-3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("plan", [["--plan"], []], ids=["plan", "run"])
def test_a_plan_refuses_what_the_run_would_refuse(
    arguments: list[str], words: str, plan: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A damaged result counted as one that is there. Whatever is in the way is told before anything is begun."""
    if "table-3" in words and ("--methods" in arguments) == bool(plan):
        return  # one is about --plan, the other not
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("# of mine\n")
    Path("damaged/digits").mkdir(parents=True)
    Path("damaged/digits/baseline-seed0.json").write_text("{")
    assert words in refused(capsys, "reproduce", *arguments, *plan)
    assert Path("a-file").read_text() == "# of mine\n"
    assert not Path("runs").exists()


def test_other_epochs_are_kept_apart() -> None:
    row = "cifar10-wrn-40-2"
    assert folder_name(row, None) == folder_name(row, 600) == row
    assert folder_name(row, 200) == "cifar10-wrn-40-2-200-epochs"
    assert results.paper("cifar10-wrn-40-2-200-epochs", "metaaugment") == "96.79 ± 0.06"


# -- whose folder it is ------------------------------------------------------------------------------------------------


def record(job: Job, *lacking: str, **changes: object) -> None:
    """A folder as a run leaves it whose recipe differs in some fields, or lacks them."""
    job.folder.mkdir(parents=True, exist_ok=True)
    recipe = {key: value for key, value in (job.recipe.to_json() | changes).items() if key not in lacking}
    (job.folder / "recipe.json").write_text(json.dumps(recipe))


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_recipe_is_refused(tmp_path: Path, finished: bool) -> None:
    """It was gone on with, or kept, as the result of the row."""
    job = a_job(tmp_path)
    record(job, lr=0.25)
    if finished:
        (job.folder / "result.json").write_text('{"test_accuracy": 0.5}')
    way = "move the folder away, or choose another --runs"
    with pytest.raises(ValueError, match=rf"baseline-seed0 was made with --lr 0.25, but digits .* has 0\.\d+; {way}"):
        digits(tmp_path)
    record(job)
    assert len(digits(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["run", "search"])
def test_what_nobody_knows_what_made_is_refused(kind: str, tmp_path: Path) -> None:
    work: Work = a_search(tmp_path) if kind == "search" else a_job(tmp_path)
    work.folder.mkdir(parents=True, exist_ok=True)
    (work.folder / work.outcome).touch()
    (work.folder / work.record).write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be understood: the recipe field 'name' is missing; move"):
        work.check()
    (work.folder / work.record).unlink()
    what = {"run": r"a result, but no recipe\.json", "search": r"a policy, but no search\.json"}[kind]
    with pytest.raises(ValueError, match=rf"has {what} that says of what; move"):
        work.check()


def test_recipes_of_older_versions_are_still_those_of_their_rows(tmp_path: Path) -> None:
    older = 0
    for file in (ROOT / "results").glob("*/*-seed*.json"):
        result = json.loads(file.read_text())
        ran = result["recipe"]
        job = a_job(tmp_path, ran["name"], result["entry"], result["seed"], ran["epochs"])
        assert job.result.parent.name == file.parent.name
        record(job, *(job.recipe.to_json().keys() - result["recipe"].keys()), **result["recipe"])
        job.check()
        older += "held_back" not in result["recipe"]
    assert older


def test_a_policy_may_be_named_from_elsewhere_but_is_the_same(tmp_path: Path) -> None:
    job = a_job(tmp_path, "omniglot-wrn-40-2", "transfer-wrn-40-2")
    record(job, policy="runs/omniglot-wrn-40-2/metaaugment-fast.safetensors")
    job.check()
    record(job, policy="runs/omniglot-wrn-40-2/metaaugment.safetensors")
    with pytest.raises(ValueError, match=r"--policy runs/omniglot-wrn-40-2/metaaugment\.safetensors, but"):
        job.check()


def test_no_policy_is_taken_from_a_run_of_another_recipe(tmp_path: Path) -> None:
    job = a_job(tmp_path, "omniglot-wrn-40-2", "transfer-wrn-40-2")
    assert job.source is not None
    record(job.source, every=1)
    (job.source.folder / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"metaaugment-fast-seed0 was made with --every 1, but .* has 8"):
        planned([job.row], 1, None, [job.entry.name], job.where)


DADA = Entry("dada", {"method": "dada", "per_class": 10}, search={"epochs": 1, "per_class": 10})


def a_search(folder: Path, **changes: object) -> Search:
    """A search of digits as its folder and its policy record it, with some settings changed."""
    search = Search(replace(ROWS["digits"], entries=(DADA,)), DADA, 1, where(folder))
    record = record_of("dada", "digits", DADA.search or {})
    for values in record.values():
        values |= {name: value for name, value in changes.items() if name in values}
    search.folder.mkdir(parents=True)
    (search.folder / "search.json").write_text(json.dumps(record))
    found = json.loads((ROOT / "results" / "searches" / "omniglot-wrn-40-2-dada.json").read_text())
    (search.folder / "policy.json").write_text(json.dumps(found | {"search": record}))
    return search


def plan_of(search: Search) -> list[Work]:
    return planned([search.row], 2, search.epochs, [], search.where)


@pytest.mark.parametrize(("name", "value", "has"), [
    ("lr", 0.25, "0.1"), ("seed", 3, "0"), ("epochs", 6, "1"), ("per_class", 7, "10"), ("method", "pba", "dada"),
    ("temperature", 2.0, "0.5"),
])  # fmt: skip
@pytest.mark.parametrize("kept", ["begun", "finished", "among the results"])
def test_a_search_with_other_settings_is_refused(tmp_path: Path, name: str, value: object, has: str, kept: str) -> None:
    """Whatever lay in the folder was gone on with, and all seeds trained under what it found."""
    search = a_search(tmp_path, **{name: value})
    what, way = search.folder, "move the folder away, or choose another --runs"
    if kept == "among the results":
        search.makes.parent.mkdir(parents=True)
        shutil.copy(search.folder / "policy.json", search.makes)
        what, way = search.makes, "move the file away, or choose another --results"
    if kept != "finished":
        (search.folder / "policy.json").unlink()
    told = f"{what} was made with --{name.replace('_', '-')} {value}, but digits dada-search has {has}; {way}"
    with pytest.raises(ValueError, match=re.escape(told)):
        plan_of(search)


def test_the_kept_searches_are_those_of_their_rows() -> None:
    where = Where(ROOT / "runs", ROOT / "results", Place(), record_of)
    searches = [Search(*an_entry("omniglot-wrn-40-2", system), None, where) for system in ("dada", "faa", "pba")]
    assert {search.makes for search in searches} == set((ROOT / "results" / "searches").glob("*-*.json"))
    for search in searches:
        search.check()


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_no_policy_of_the_system_is_refused_and_not_kept(tmp_path: Path, kept: bool) -> None:
    """A file that was cut off got among the results, where it stopped every run of its entry."""
    search = a_search(tmp_path)
    if kept:
        search.export()
    file = search.makes if kept else search.folder / "policy.json"
    whole = file.read_text()
    other = whole.replace('"system": "dada"', '"system": "faa"')
    for text, sentence in (
        (whole[: len(whole) // 2], "is not a policy of a compared system"),
        (other, "is a policy of faa, but digits dada-search needs one of"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"{file} {sentence}.*; move the f.* away, or choose another --r"):
            plan_of(search)
        if not kept:
            with pytest.raises(ValueError, match=f"{file} {sentence}"):
                search.export()
            assert not search.makes.exists()


def test_no_result_comes_beside_one_under_another_policy(tmp_path: Path) -> None:
    """The means of the report were over runs under different policies."""
    search = a_search(tmp_path)
    assert [work.ready() for work in plan_of(search)] == [True, True]
    search.export()
    first, second = plan_of(search)
    assert isinstance(first, Job)
    first.result.parent.mkdir(parents=True)
    write_json(first.result, {"policy_sha256": working.digest_of(search.makes)})
    (again,) = plan_of(search)
    assert again.ready()
    search.makes.write_text(search.makes.read_text().replace('"max_level": 1', '"max_level": 2'))
    told = f"{first.result} was trained under another policy than {search.makes} holds now; put that one back, or move"
    with pytest.raises(ValueError, match=re.escape(told)):
        plan_of(search)
    with pytest.raises(ValueError, match=re.escape(told)):  # also of a policy that is made meanwhile
        second.ready()
    write_json(first.result, {"policy_sha256": None})  # as of an older version
    assert [job.name for job in plan_of(search)] == ["dada-seed1"]


def test_a_learned_policy_is_known_by_the_digest_in_the_results_of_its_runs(tmp_path: Path) -> None:
    job = a_job(tmp_path, "omniglot-wrn-40-2", "transfer-wrn-40-2", seed=1)
    assert isinstance(job.source, Job)
    job.source.makes.parent.mkdir(parents=True)
    source = Source(None, 5, 3, find_space("metaaugment"), (0.5,) * 3, (0.2,) * 3, (0,) * 3, (8, 8))
    LearnedPolicy(SingleSampler().probabilities, source).save(job.source.makes)
    job.result.parent.mkdir(parents=True)
    other = job.result.with_name("transfer-wrn-40-2-seed0.json")
    write_json(other, {"policy_sha256": LearnedPolicy.load(job.source.makes).digest()[:16]})
    job.check_policy()
    write_json(other, {"policy_sha256": "0" * 16})
    with pytest.raises(ValueError, match=r"transfer-wrn-40-2-seed0\.json was trained under another policy than"):
        planned([job.row], 2, None, [job.entry.name], job.where)


# -- the queue ---------------------------------------------------------------------------------------------------------

RESULT = json.dumps({
    "test_accuracy": 0.5, "epochs": 1, "seconds": 1, "images_per_second": 1, "machine": {"hardware": "none"},
    "commit": "",
})  # fmt: skip
# In the place of a training: says that it lives, and ends well, badly, or when it is asked to.
STAND_IN = """
import json, pathlib, signal, sys, time
folder, seconds, rc = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder.mkdir(parents=True, exist_ok=True)
(folder / "recipe.json").write_text(sys.argv[4])
open(folder / "alive", "a").write("x")
time.sleep(seconds)
if rc == 0:
    (folder / "result.json").write_text(sys.argv[5])
print("the last word")
sys.exit(rc)
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1, rc: int = 0) -> None:
    def start(job: Job) -> "subprocess.Popen[bytes]":
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        with (job.folder.parent / f"{job.name}.log").open("ab") as log:
            recipe = json.dumps(job.recipe.to_json())
            arguments = [sys.executable, "-c", STAND_IN, str(job.folder), str(seconds), str(rc), recipe, RESULT]
            return subprocess.Popen(arguments, stdout=log, stderr=log)

    monkeypatch.setattr(Job, "start", start)


def living(folder: Path) -> int:
    """Trainings that can be asked to stop by now."""
    return len(list(folder.glob("runs/digits/*/alive")))


def test_results_are_kept_with_how_many_ran_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0.5)
    Queue(digits(tmp_path, 3), 2, QUIET).run(None)
    found = kept(tmp_path, 3)
    assert all(one["entry"] == "baseline" and one["test_accuracy"] == 0.5 for one in found)
    assert [one["side_by_side"] for one in found[:2]] == [2, 2]
    assert digits(tmp_path, 3) == []  # nothing is missing any more


def test_when_the_time_is_over_all_are_stopped_and_go_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on alone has shared the device before, but one that is begun anew has not."""
    stand_in(monkeypatch, 600)
    queue = Queue(digits(tmp_path, 3), 2, QUIET)
    with monkeypatch.context() as clock:
        clock.setattr(reproducing.time, "monotonic", lambda: 61.0 if living(tmp_path) == 2 else 0.0)
        queue.run(60)
    assert (len(queue.waiting), queue.kept, queue.failed, queue.live) == (3, 0, {}, {})
    shared = [job for job in digits(tmp_path, 3) if job.begun]
    assert [job.name for job in shared] == ["baseline-seed0", "baseline-seed1"]
    shared[1].folder.rename(tmp_path / "moved away")
    stand_in(monkeypatch)
    Queue(digits(tmp_path, 3), 1, QUIET).run(None)
    assert [one["side_by_side"] for one in kept(tmp_path, 3)] == [2, 1, 1]


def test_what_is_to_be_worried_about_in_a_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of twelve minutes ended at 22 %, and only its own log said why."""
    stand_in(monkeypatch)
    said = io.StringIO()
    Queue(digits(tmp_path), 1, Console(file=said), lambda folder: [f"Weights collapsed in {folder.name}."]).run(None)
    assert said.getvalue().splitlines()[1:] == [
        "digits baseline-seed0: 50.00%",
        "digits baseline-seed0: Weights collapsed in baseline-seed0.",
    ]


def test_the_course_of_a_run_is_kept_beside_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    rows = [dict.fromkeys(FIGURES, 1 / 3) | {"epoch": epoch, "weights": [1.0] * 9} for epoch in (1, 2)]
    rows[0]["train_loss"] = None  # which is not finite
    logs = ["".join(json.dumps(row) + "\n" for row in rows), "[]\n", None]
    for job, log in zip(digits(tmp_path, 3), logs, strict=True):
        record(job)
        if log is not None:
            (job.folder / LOG).write_text(log)
    Queue(digits(tmp_path, 3), 1, QUIET).run(None)
    assert len(results.files(tmp_path / "results")) == 3  # a result needs no log
    (course,) = (tmp_path / "results" / "digits" / "courses").iterdir()
    assert course.name == "baseline-seed0.json"
    kept = json.loads(course.read_text())
    assert kept.pop("train_loss") == [None, 0.333333]
    assert kept == {figure: [0.333333, 0.333333] for figure in FIGURES[1:]}


def test_a_course_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Only a log that cannot be read is done without: a result whose course is lost looks as if it never had one."""
    job = a_job(tmp_path)
    record(job)
    (job.folder / "result.json").write_text(RESULT)
    (job.folder / LOG).write_text(json.dumps(dict.fromkeys(FIGURES, 0.5)) + "\n")
    job.result.parent.mkdir(parents=True)
    (job.result.parent / "courses").write_text("a file in the place of the folder")
    with pytest.raises(FileExistsError):
        job.keep()
    assert not job.result.exists()
    (job.result.parent / "courses").unlink()
    job.keep()
    assert results.course_file(job.result).exists()
    assert job.result.exists()


def test_every_course_that_is_kept_ends_where_its_run_did() -> None:
    for file in results.files(ROOT / "results"):
        if results.course_file(file).exists():
            course = json.loads(results.course_file(file).read_text())
            result = json.loads(file.read_text())
            assert {len(column) for column in course.values()} == {result["epochs"]}
            assert course["val_accuracy"][-1] == pytest.approx(result["val_accuracy"], abs=1e-5)


def test_trainings_of_others_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two `reproduce` at a time were told as runs alone; the others may begin later."""
    stand_in(monkeypatch, 1.0)
    monkeypatch.setattr(reproducing, "NEIGHBOURS", 0.0)
    others = [tmp_path / "runs" / name for name in ("omniglot/another", "omniglot/that has ended", "of train itself")]
    for other in others:
        other.mkdir(parents=True)
        (other / ".lock").touch()

    def begin() -> None:
        until(lambda: living(tmp_path) == 1)
        with run_folder.locked(others[0]), run_folder.locked(others[2]):
            until(a_job(tmp_path).result.exists)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    Queue(digits(tmp_path), 1, QUIET).run(None)
    thread.join()
    Queue(digits(tmp_path, 2), 1, QUIET).run(None)
    assert [one["side_by_side"] for one in kept(tmp_path, 2)] == [3, 1]


def test_a_folder_that_another_process_trains_into_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill of `reproduce`, whose trainings live on."""
    stand_in(monkeypatch)
    said, job = io.StringIO(), a_job(tmp_path)
    record(job)
    with run_folder.locked(job.folder):
        reproduce_digits(tmp_path, tmp_path / "R.md", Console(file=said))
    assert not (job.folder / "alive").exists()
    told = f"another process is training into {job.folder}; once that has ended, the same command keeps"
    assert told in said.getvalue()
    assert "1 left\n" in said.getvalue()
    (job.folder / "result.json").write_text(RESULT)
    Queue(digits(tmp_path), 1, QUIET).run(None)
    assert kept(tmp_path)[0]["test_accuracy"] == 0.5


@pytest.mark.parametrize("left", ["at work", "stopped"])
def test_what_another_process_does_meanwhile_is_no_failure(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two `reproduce` over the same folders, each counted as failed what the other one had begun before it."""
    job, start = a_job(tmp_path), Job.start
    queue, other = Queue([job], 1, QUIET), run_folder.locked(job.folder, "another launcher")

    def beaten(job: Job) -> "subprocess.Popen[bytes]":
        record(job)  # by the other one, after it was looked for and before our process did
        other.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(Job, "begun", False)
            process = start(job)
        if left == "stopped":
            process.wait()
            other.__exit__(None, None, None)
            stand_in(monkeypatch)  # then it is gone on with
        return process

    monkeypatch.setattr(Job, "start", beaten)
    queue.run(None)
    assert f"{job.folder} exists already" in job.folder.with_name(f"{job.name}.log").read_text()
    if left == "stopped":
        assert (queue.kept, queue.failed) == (1, {})
    else:
        assert (queue.waiting, queue.failed) == ([job], {})
        assert "another process is training" in queue.held_up(tmp_path / "R.md")[job]
        other.__exit__(None, None, None)


def test_a_training_that_fails_in_its_own_folder_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another process has trained before: whose turn it was is told by the folder, not by words."""
    job = a_job(tmp_path)
    job.folder.mkdir(parents=True)
    (job.folder / "notes.txt").touch()
    (queue := Queue([job], 1, QUIET)).run(None)
    assert "exists already" in queue.failed[job]
    record(job)
    (job.folder / "checkpoint.safetensors").write_text("no checkpoint")
    with run_folder.locked(job.folder, "another launcher"):
        pass
    (queue := Queue([job], 1, QUIET)).run(None)
    assert "checkpoint.safetensors" in queue.failed[job]
    assert run_folder.last_locked(job.folder) == launch(launcher=os.getpid())


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, rc=1)
    sentence = r"digits baseline-seed0 failed: the last word; its full output is in .*baseline-seed0.log"
    with pytest.raises(ValueError, match=sentence):
        reproduce_digits(tmp_path, tmp_path / "R.md", QUIET, seeds=2)
    assert living(tmp_path) == 2


def test_a_killed_training_is_told_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: Job) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])

    monkeypatch.setattr(Job, "start", start)
    with pytest.raises(ValueError, match=r"failed: killed by signal 9, .*; the same command continues it"):
        reproduce_digits(tmp_path, tmp_path / "R.md", QUIET)


def test_data_that_are_not_there_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """All of them in one sentence; some of ImageNet's classes are enough to train on, and are not refused."""
    monkeypatch.setattr(Job, "start", lambda job: pytest.fail(f"{job} was started"))
    monkeypatch.chdir(tmp_path)
    nowhere = tmp_path / "no data"
    sentence = refused(capsys, "reproduce", "table-1", "--seeds", 5, "--data", nowhere)
    for name in ("cifar10", "cifar100"):
        assert f"{name} is missing ({nowhere}/" in sentence
        assert f"get it: metaaugment data get {name} --data '{nowhere}')" in sentence
    assert not list(tmp_path.iterdir())
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    (tmp_path / "imagenet" / "val").mkdir()
    check_there(["digits", "imagenet"], tmp_path)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"^not all data are there: cifar10 is incomplete: .*move .* away and get it"):
        check_there(["cifar10"], tmp_path)


def test_a_training_that_cannot_be_started_is_left_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: Job) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(Job, "start", start)
    said = io.StringIO()
    with pytest.raises(OSError, match="temporarily unavailable"):
        reproduce_digits(tmp_path, tmp_path / "R.md", Console(file=said, width=500), seeds=2)
    assert "0 runs finished" in said.getvalue()
    assert "2 left: run the same command to continue" in said.getvalue()


def test_a_training_that_cannot_be_started_beside_others_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, 0.5)
    start = Job.start

    def alone(job: Job) -> "subprocess.Popen[bytes]":
        if queue.live:
            raise OSError(12, "Cannot allocate memory")
        return start(job)

    monkeypatch.setattr(Job, "start", alone)
    queue = Queue(digits(tmp_path, 2), 2, QUIET)
    queue.run(None)
    assert [one["side_by_side"] for one in kept(tmp_path, 2)] == [1, 1]


def test_a_folder_that_no_result_can_be_written_to_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "digits").write_text("no folder")
    with pytest.raises(ValueError, match=r"written to .*results/digits: File exists; choose another .* --results"):
        reproduce_digits(tmp_path, tmp_path / "R.md", QUIET)
    (tmp_path / "results" / "digits").unlink()

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", full)
        with pytest.raises(ValueError, match=r"written to .*results/digits: No space left on device"):
            reproduce_digits(tmp_path, tmp_path / "R.md", QUIET)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_be_kept_is_left_and_the_same_command_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as 0 failed, 0 left, and the runs after it were not made."""
    stand_in(monkeypatch)
    monkeypatch.setattr(results, "markdown", lambda folder: results.MADE_BY)
    said = io.StringIO()
    first, second = (a_job(tmp_path, seed=seed) for seed in (0, 1))
    keep = Job.keep

    def full(job: Job) -> str:
        if job.seed == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(job.result))
        return keep(job)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "keep", full)
        with pytest.raises(OSError, match="No space left on device"):
            reproduce_digits(tmp_path, tmp_path / "R.md", Console(file=said, soft_wrap=True), seeds=2)
    assert second.result.exists()
    *_, summary, why = said.getvalue().splitlines()
    assert summary.endswith("0 failed, 1 left")
    assert why == (
        f"digits baseline-seed0 is whole in {first.folder}, but cannot be kept: {first.result}: No space left on "
        "device; once that is fixed, the same command keeps it"
    )
    reproduce_digits(tmp_path, tmp_path / "new" / "folder" / "R.md", QUIET, seeds=2)
    assert first.result.exists()
    assert (tmp_path / "new" / "folder" / "R.md").exists()
    assert (first.folder / "alive").read_text() == "x"  # it was not trained again


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_report_that_cannot_be_written_hides_no_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    stand_in(monkeypatch, 600 if interrupted else 0.1)
    said, report = io.StringIO(), tmp_path / "R.md"
    (tmp_path / "results" / "digits").mkdir(parents=True)
    (tmp_path / "results" / "digits" / "pba-seed0.json").write_text("{}")

    def markdown(folder: Path) -> str:
        if living(tmp_path):
            report.mkdir()  # which no file can take the place of
        return "the report"

    def ask() -> None:
        until(lambda: living(tmp_path) > 0)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(results, "markdown", markdown)
    if interrupted:
        threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(Interrupted if interrupted else OSError):
        reproduce_digits(tmp_path, report, Console(file=said))
    assert " finished in " in said.getvalue()
    assert f"{report} was not written" in said.getvalue()


def test_without_results_no_report_is_replaced(tmp_path: Path) -> None:
    """As of a name that was misspelt."""
    said, report = io.StringIO(), tmp_path / "R.md"
    report.write_text(others := f"{results.MADE_BY} from other results")
    reproducing.reproduce([], 1, None, None, (), None, where(tmp_path), report, Console(file=said, width=500))
    assert said.getvalue().strip().endswith(f"0 failed, 0 left; {tmp_path / 'results'} holds no result")
    assert report.read_text() == others


def test_what_is_wrong_with_one_run_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is none ended it all in a traceback and was kept; so did a policy that could not be exported."""
    stand_in(monkeypatch)
    row, said = ROWS["omniglot-wrn-40-2"], io.StringIO()
    names = ("baseline", "randaugment", "transfer-wrn-40-2")
    spoiled, good, transfer = (a_job(tmp_path, row.recipe, name) for name in names)
    assert transfer.source is not None
    for job in (spoiled, transfer.source):
        record(job)
        (job.folder / "result.json").write_text("{}")
    queue = Queue([transfer, spoiled, good], 2, Console(file=said, width=500))
    queue.run(None)
    assert queue.kept == 1
    assert good.result.exists()
    assert not spoiled.result.exists()
    assert {job.name for job in queue.failed} == {spoiled.name, transfer.name}
    assert "transfer-wrn-40-2-seed0 failed: " in said.getvalue()
    assert "result.json is damaged: its test_accuracy is 'None', not a share of 0 to 1; remove it" in said.getvalue()


def test_a_run_under_a_policy_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = []

    class Policy:
        def save(self, file: Path, half: bool) -> None:
            exported.append((file, half))
            file.write_text("policy")

    monkeypatch.setattr(working, "learned_policy", lambda folder: Policy())
    stand_in(monkeypatch)
    row = ROWS["omniglot-wrn-40-2"]
    wanted = [entry for entry in row.entries if entry.name in ("metaaugment-fast", "transfer-wrn-40-2")]
    joint, transfer = (Job(row, entry, None, where(tmp_path), 0) for entry in wanted)
    assert not transfer.ready()
    queue = Queue([transfer, joint], 2, QUIET)
    queue.run(None)
    assert queue.kept == 2
    assert exported == [(tmp_path / "runs" / "omniglot-wrn-40-2" / "metaaugment-fast.safetensors", True)]
    kept = json.loads(transfer.result.read_text())
    assert kept["policy"] == kept["recipe"]["policy"] == "omniglot-wrn-40-2/metaaugment-fast.safetensors"
    assert str(tmp_path) not in transfer.result.read_text()


@pytest.mark.slow
def test_a_transfer_goes_on_where_its_folders_were_moved(tmp_path: Path) -> None:
    """Its recipe names the policy where that lay."""
    transfer = Entry("transfer", {"method": "metaaugment"}, under=("digits", "metaaugment"))

    def run_them(folder: Path) -> Job:
        job = Job(ROWS["digits"], transfer, 1, where(folder), 0)
        assert job.source is not None
        for one in (job.source, job):
            assert one.ready()
            assert one.start().wait() == 0, (one.folder.parent / f"{one.name}.log").read_text()
        return job

    job = run_them(tmp_path / "first")
    (job.folder / "result.json").unlink()
    (tmp_path / "first").rename(tmp_path / "moved")
    job = run_them(tmp_path / "moved")
    assert job.policy is not None
    assert json.loads((job.folder / "recipe.json").read_text())["policy"] == str(job.policy)


def test_a_run_that_goes_on_is_told_where_its_policy_lies(tmp_path: Path) -> None:
    """It may have been moved with all folders."""
    job = a_job(tmp_path, "omniglot-wrn-40-2", "transfer-wrn-28-10")
    record(job)
    assert job.words()[-4:] == ["--resume", str(job.folder), "--policy", str(job.policy)]


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_whose_policy_never_comes_says_whose_it_is_and_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The same command would have gone on for ever."""
    said, here, report = io.StringIO(), where(tmp_path), tmp_path / "R.md"
    row, entry = an_entry("omniglot-wrn-40-2", "transfer-wrn-28-10")
    source = Job(row, entry, 7, here, 2).source
    assert source is not None
    if kept:
        source.result.parent.mkdir(parents=True)
        result = json.loads((ROOT / "results/omniglot-wrn-28-10/metaaugment-fast-seed0.json").read_text())
        write_json(source.result, result | {"recipe": source.recipe.to_json()})
    reproducing.reproduce([row], 1, None, 7, [entry.name], 1, here, report, Console(file=said))
    assert "the same command" not in said.getvalue()
    before, command = said.getvalue().rstrip("\n").rsplit("make it with: metaaugment ", 1)
    assert f"transfer-wrn-28-10-seed0 waits for the policy of {source.row.recipe} {source.name}" in before
    assert (f"move {source.result} away" in before) == kept
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(reproducing, "reproduce", lambda *arguments: asked.append(arguments))
    cli.main(shlex.split(command))
    ((rows, seeds, _, epochs, entries, _, there, named, *_),) = asked
    source.result.unlink(missing_ok=True)
    assert [job.folder for job in planned(rows, seeds, epochs, entries, there)] == [source.folder]
    assert (there, named) == (here, report)


@pytest.mark.slow
def test_a_policy_is_searched_for_once_and_then_trained_under(tmp_path: Path) -> None:
    row, here, said = replace(ROWS["digits"], entries=(DADA,)), where(tmp_path), io.StringIO()
    search, first, second = planned([row], 2, 1, [], here)
    assert (search.name, first.name, second.name) == ("dada-search", "dada-seed0", "dada-seed1")
    assert isinstance(first, Job)
    assert not first.ready()
    reproducing.reproduce([row], 2, None, 1, [], 1, here, tmp_path / "R.md", Console(file=said, soft_wrap=True))
    found = tmp_path / "results" / "searches" / "digits-1-epochs-dada.json"
    told = said.getvalue().splitlines()
    assert told[:3] == ["digits dada-search begins", f"digits dada-search: policy found; {found}",
                        "digits dada-seed0 begins"]  # fmt: skip
    assert told[-1].startswith("2 runs finished")
    assert json.loads(found.read_text())["search"]["cost"]["trials"] == 1
    for job in (first, second):
        assert isinstance(job, Job)
        result = json.loads(job.result.read_text())
        assert result["policy"] == "searches/digits-1-epochs-dada.json"
        assert result["policy_sha256"] == working.digest_of(found)
    shutil.rmtree(tmp_path / "runs")
    second.result.unlink()
    (again,) = planned([row], 2, 1, [], here)  # the policy is kept with the results
    assert again.ready()


def test_a_search_goes_on_and_one_that_failed_holds_up_its_runs(tmp_path: Path) -> None:
    """By the words of its command; the run says nothing of its own, as the same command tries again."""
    entry = Entry("faa", {"method": "faa"}, search={"folds": 0})
    row, here, said = replace(ROWS["digits"], entries=(entry,)), where(tmp_path), io.StringIO()
    with pytest.raises(ValueError, match=r"faa-search failed: --folds is 0; it must be"):
        reproducing.reproduce([row], 1, None, 1, [], 1, here, tmp_path / "R.md", Console(file=said, soft_wrap=True))
    assert "1 failed, 1 left: run the same command to continue" in said.getvalue()
    search = Search(row, entry, 1, here)
    assert search.words() == [
        "search", "faa", "digits", "--device", "cpu", "--out", str(search.folder), "--folds", "0",
    ]  # fmt: skip
    assert search.progress() == "0 trials"
    search.folder.mkdir(parents=True)
    (search.folder / "search.json").touch()
    assert search.words() == ["search", "faa", "digits", "--device", "cpu", "--resume", str(search.folder)]
    (search.folder / "policy.json").write_text("{}")
    queue = Queue([search], 1, QUIET)
    queue.run(None)
    assert "system" in queue.failed[search]  # what is no policy is not kept
    assert not search.makes.exists()


def test_digits_for_real(tmp_path: Path, capsys: Captured) -> None:
    folders = ["--runs", f"{tmp_path}/runs", "--results", f"{tmp_path}/results", "--report", f"{tmp_path}/RESULTS.md"]
    command = ["reproduce", "digits", "--seeds", "1", "--epochs", "1", "--methods", "baseline", "--device", "cpu"]
    cli.main([*command, *folders])
    result = json.loads((tmp_path / "results" / "digits-1-epochs" / "baseline-seed0.json").read_text())
    report = (tmp_path / "RESULTS.md").read_text()
    assert f"| baseline | {100 * result['test_accuracy']:.2f} | 1 | – | 1 |" in report
    assert {"recipe", "test_top5", "seconds", "images_per_second", "machine", "commit"} <= result.keys()
    said = capsys.readouterr().out
    assert "digits baseline-seed0 begins" in said
    assert "1 run finished" in said


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_is_not_stale() -> None:
    assert (ROOT / "RESULTS.md").read_text() == results.markdown(ROOT / "results")


def test_every_accuracy_of_the_report_has_its_files() -> None:
    """Taken from the files by another way than the report's own."""
    report = (ROOT / "RESULTS.md").read_text()
    shown = 0
    for folder in (folder for folder in (ROOT / "results").iterdir() if folder.is_dir()):
        values: dict[str, list[float]] = {}
        for file in sorted(folder.glob("*-seed*.json")):
            values.setdefault(file.name.split("-seed")[0], []).append(json.loads(file.read_text())["test_accuracy"])
        for entry, found in values.items():
            deviation = f" ± {100 * statistics.stdev(found):.2f}" if len(found) > 1 else ""
            assert f"| {entry} | {100 * statistics.fmean(found):.2f}{deviation} | {len(found)} |" in report
            shown += 1
    # Comparisons show again what stands in a row's own table.
    assert len({line for line in report.splitlines() if line.count("| ") > 8 and "accuracy" not in line}) == shown


def test_speeds_are_told_with_their_commit_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    file = tmp_path / "bench" / "training-x.json"
    known = {"machine": {"hardware": "a", "torch": "b"}, "epochs": 5, "figures": []}
    for more, title in (({}, "(a, torch b)"), ({"commit": "0123456789+"}, "(a, torch b, commit 0123456+)")):
        file.write_text(json.dumps(known | more))
        assert f"## Speed of training {title}\n" in results.markdown(tmp_path)
    figure = {"recipe": "digits", "what": None, "steps": 1, "steps_seconds": 0, "steps_over_bare": 1}
    for damaged in (known | {"figures": [figure]}, {"figures": [{"recipe": "digits"}]}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"training-x\.json is damaged: .* not written by benchmarks/training\.py"):
            results.markdown(tmp_path)


@pytest.mark.parametrize(
    ("commit", "told"),
    [
        (["0123456789+", "abcdef0123"], "0123456+, abcdef0"), ("0123456789+", "0123456+"),
        ("0123456789, continued at abcdef0123+", "0123456, abcdef0+"), (None, "unknown"),
    ],
    ids=["a list", "as text", "as one text", "none"],
)  # fmt: skip
def test_the_report_says_which_code_was_changed_or_is_not_known(commit: str | None, told: str, tmp_path: Path) -> None:
    two_results(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "baseline-seed1.json").unlink()
    result = json.loads((folder / "baseline-seed0.json").read_text())
    (folder / "baseline-seed0.json").write_text(json.dumps(result | {"commit": commit}))
    assert f"| {told} |\n" in results.markdown(tmp_path)


def two_results(folder: Path, **changes: object) -> None:
    """Two of one entry, the second changed; a value of None is left out."""
    source = json.loads((ROOT / "results" / "omniglot-wrn-40-2" / "baseline-seed0.json").read_text())
    (folder / "omniglot-wrn-40-2").mkdir()
    for seed, changed in enumerate((source, of_seed(source, 1) | changes)):
        values = {key: value for key, value in changed.items() if value is not None}
        (folder / "omniglot-wrn-40-2" / f"baseline-seed{seed}.json").write_text(json.dumps(values))


def of_seed(result: dict[str, Any], seed: int) -> dict[str, Any]:
    return result | {"seed": seed, "recipe": result["recipe"] | {"seed": seed}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"test_accuracy": 1.01}, "is damaged: its test_accuracy is '1.01', not a share of 0 to 1"),
        ({"test_accuracy": -0.1}, "is damaged: its test_accuracy is '-0.1'"),
        ({"epochs": 200.5}, "is damaged: its epochs is '200.5', not a whole number of at least 1"),
        ({"epochs": 0}, "is damaged: its epochs is '0'"),
        ({"side_by_side": True}, "is damaged: its side_by_side is 'True', not a whole number of at least 1"),
        ({"epochs": 3}, "has epochs 3, but .*baseline-seed0.json has 200; move"),
        ({"held_back_accuracy": 0.5, "test_accuracy": None}, "has measure held_back_accuracy, but .* has test_acc"),
        ({"seed": 7}, f"holds the result of {OMNIGLOT}/baseline-seed1.json and {OMNIGLOT}/baseline-seed7.json; move"),
        ({"entry": "randaugment"}, f"holds the result of {OMNIGLOT}/randaugment-seed1.json; move it there, or away"),
        ({"recipe": {"seed": 7}}, f"holds the result of {OMNIGLOT}/baseline-seed1.json and .*seed7.json"),
        ({"recipe": {"lr": 3.0}}, "has lr 3.0, but baseline has 0.1; move it away"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_result_that_is_none_or_makes_no_mean_is_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    two_results(tmp_path, **{"entry": "baseline", **changes})
    with pytest.raises(ValueError, match=rf"baseline-seed1\.json {sentence}"):
        results.markdown(tmp_path)


def test_a_mean_over_runs_of_different_machines_names_them_and_text_of_a_file_stays_in_its_cell(tmp_path: Path) -> None:
    two_results(tmp_path, precision="float32", machine={"hardware": "one|two\n\n# three"})
    (line,) = (line for line in results.markdown(tmp_path).splitlines() if line.startswith("| baseline |"))
    assert r"| NVIDIA H200, bf16; one\|two # three, float32 |" in line
    assert line.replace(r"\|", "").count("|") == 10  # nine cells


def test_no_mean_is_over_runs_with_different_settings(tmp_path: Path) -> None:
    """Nor of an entry that no table knows, whose settings are those of its first file."""
    two_results(tmp_path, recipe={"lr": 3.0})
    for file in sorted(tmp_path.glob("*/*.json")):
        text = file.read_text().replace('"entry": "baseline"', '"entry": "mine"')
        file.with_name(file.name.replace("baseline", "mine")).write_text(text)
        file.unlink()
    with pytest.raises(ValueError, match=r"mine-seed1\.json has lr 3\.0, but .*mine-seed0\.json has 0\.1"):
        results.markdown(tmp_path)


@pytest.mark.parametrize("folder", ["omniglot-wrn-28-10", "omniglot-wrn-40-2-80-epochs"])
def test_a_result_in_the_folder_of_another_row_is_refused(tmp_path: Path, folder: str) -> None:
    """It stood beside the paper's figure of that row."""
    two_results(tmp_path, recipe=None)  # the second one does not say: it is left alone
    (tmp_path / "omniglot-wrn-40-2").rename(tmp_path / folder)
    with pytest.raises(ValueError, match=r"holds the result of omniglot-wrn-40-2/baseline-seed0\.json; move it there"):
        results.markdown(tmp_path)
    (tmp_path / folder / "baseline-seed0.json").unlink()
    assert "| baseline |" in results.markdown(tmp_path)


def test_no_mean_is_over_runs_under_different_policies(tmp_path: Path) -> None:
    two_results(tmp_path, policy_sha256="b")  # the first one does not say
    (folder,) = tmp_path.iterdir()
    third = of_seed(json.loads((folder / "baseline-seed1.json").read_text()), 2)
    (folder / "baseline-seed2.json").write_text(json.dumps(third))
    results.markdown(tmp_path)
    (folder / "baseline-seed2.json").write_text(json.dumps(third | {"policy_sha256": "c"}))
    with pytest.raises(ValueError, match=r"seed2\.json has policy_sha256 c, but .*seed1\.json has b; move"):
        results.markdown(tmp_path)


def test_no_row_is_over_different_images(tmp_path: Path) -> None:
    """Whatever their entry; rehearsals, which hold some back, have their own."""
    folder = tmp_path / "omniglot-wrn-40-2"
    folder.mkdir()
    for name in ("baseline-seed0", "randaugment-seed0", f"../archive/{OMNIGLOT}/tried-fast-seed0"):
        shutil.copy(ROOT / "results" / OMNIGLOT / f"{name}.json", folder)
    results.markdown(tmp_path)
    file = folder / "randaugment-seed0.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps(result | {"data": {"fingerprint": "of a part of them"}}))
    sentence = r"randaugment-seed0\.json has images of a part.*, but .*baseline-seed0\.json has"
    with pytest.raises(ValueError, match=sentence):
        results.markdown(tmp_path)
