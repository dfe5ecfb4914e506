"""What a report reads from runs and says of them: its tables, its words and its warnings."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch.optim import Adam

import metaaugment as ma
from metaaugment.files import sealed
from metaaugment.lab.data import DataSet, Images
from metaaugment.lab.data.batches import Reader
from metaaugment.lab.experiments import run as training
from metaaugment.lab.experiments.diagnosis import INPUTS, Correlation, Diagnosis
from metaaugment.lab.experiments.experiment import assemble
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.report import comparison, concerns, curves, diagnosis, learned, preferences, runs
from metaaugment.lab.report.page import Report
from metaaugment.lab.report.seen import Pictures, Seen
from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.trainer import Phase
from metaaugment.ops import INDEX

Rows = list[dict[str, Any]]
UNIFORM = [[1 / 196] * 14] * 14
MACHINE = {"hardware": "2 cores", "threads": 1}


def row(epoch: int, **figures: Any) -> dict[str, Any]:
    usual = {"train_loss": 1.0, "val_loss": 0.5, "val_accuracy": 0.9, "alpha": 0.1 + 0.001 * epoch, "skipped": 0,
             "effective_samples": 0.9, "seconds": 2.0, "probabilities": UNIFORM,
             "weights": [0.1, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0]}  # fmt: skip
    return {"epoch": epoch, **usual, **figures}


def write_run(folder: Path, rows: Rows | int = 4, finished: bool = True, result: Any = None, **recipe: Any) -> Path:
    """A run as its trainer leaves it, with figures of our own."""
    rows = [row(epoch) for epoch in range(1, rows + 1)] if isinstance(rows, int) else rows
    folder.mkdir(parents=True)
    written = {**RECIPES["digits"]().to_json(), "epochs": max(len(rows), 1), **recipe}
    write_json(folder / "recipe.json", written)
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    if finished:
        usual = {"test_accuracy": 0.9, "val_accuracy": 0.9, "machine": MACHINE, "precision": "float32",
                 "data": {"val": 100, "test": 600, "fingerprint": "abc"}}  # fmt: skip
        write_json(folder / "result.json", usual | (result or {}))
    return folder


def said(run: Path) -> str:
    """All warnings on a run."""
    return " ".join(concerns.concerns(runs.read(run)))


@pytest.fixture
def warned(tmp_path: Path) -> Callable[..., str]:
    """All warnings on a run, by its name, in whose epochs a figure takes a course."""

    def of(name: str, course: list[float], figure: str = "effective_samples", **recipe: Any) -> str:
        rows = [row(epoch, **{figure: value}) for epoch, value in enumerate(course, 1)]
        return said(write_run(tmp_path / name, rows, **recipe))

    return of


def groups(folder: Path) -> list[comparison.Group]:
    return comparison.groups(runs.find([folder])[0])


def seen_of(weight: list[float], first: list[int], magnitude: list[float], label: list[int]) -> Seen:
    """Samples by hand, whose second function is always Identity."""
    n = len(weight)
    t = ma.Transformation(
        torch.tensor(first),
        torch.full((n,), INDEX["Identity"]),
        torch.stack([torch.tensor(magnitude), torch.zeros(n)], 1),
        torch.ones(n, 2, dtype=torch.int8),
    )
    none = torch.zeros(0, 1, 4, 4, dtype=torch.uint8)
    values = np.array(weight), np.zeros(n)
    return Seen(
        1, "metaaugment", ["a", "b"], np.ones(n), np.arange(n), np.array(label), t, *values, Pictures([], none, none)
    )


# -- what a folder holds ----------------------------------------------------------------------------------------------


def test_a_whole_run_misses_only_its_look(tmp_path: Path) -> None:
    run = runs.read(write_run(tmp_path / "run"))
    assert run.missing == ["there is no look.safetensors: no samples are shown, and nothing by magnitude or class"]
    assert run.distributions[1].shape == (4, 14, 14)
    assert run.quantiles[1].shape == (4, 7)


def test_a_baseline_has_no_policy_to_miss(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row(1).items() if key not in ("probabilities", "weights")}]
    assert runs.read(write_run(tmp_path / "run", rows, method="baseline")).missing == []


def test_folders_are_gone_through_and_each_run_is_read_once(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "runs" / "digits" / f"baseline-seed{seed}", method="baseline", seed=seed)
    found, empty = runs.find([tmp_path / "runs", tmp_path / "runs" / "digits" / "baseline-seed1"])
    assert [run.folder.name for run in found] == ["baseline-seed0", "baseline-seed1"]
    assert empty == []


def test_empty_and_foreign_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.txt").write_text("a cat")
    found, empty = runs.find([tmp_path])
    assert not found
    assert empty == [f"{tmp_path} holds no run: neither recipe.json nor log.jsonl is in it or below it"]


def test_what_a_search_trains_is_no_run(tmp_path: Path) -> None:
    search = tmp_path / "search"
    for inner in ("fold-0", "trial-07", "training", "children/3"):
        (search / inner).mkdir(parents=True)
        (search / inner / "log.jsonl").write_text(json.dumps(row(1)))
    assert len(runs.run_folders(tmp_path)) == 4, "it is search.json that says so"
    (search / "search.json").write_text("{}")
    assert runs.find([tmp_path]) == ([], [f"{tmp_path} holds no run: what a search trains does not count"])
    write_run(search / "with-its-policy")
    write_run(tmp_path / "training")
    assert [run.folder.name for run in runs.find([tmp_path])[0]] == ["with-its-policy", "training"]


def test_a_log_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"level": "info"}\n[1, 2]\n\x00\xff\nEpoch 1: fine\n{"epoch": "x"}\n')
    run = runs.read(tmp_path)
    assert run.rows == []
    assert "lines 1, 2, 3 and 2 more of log.jsonl cannot be read as a row, and are left out" in run.missing
    assert "there is no recipe.json" in run.missing
    assert Report([run], []).html()


def test_a_half_written_run(tmp_path: Path) -> None:
    """Killed while it wrote a row: the rows before are there."""
    folder = write_run(tmp_path / "run", 3, finished=False, epochs=9)
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"epoch": 4, "train_lo')
    (folder / "look.safetensors").write_bytes(b"half a look")
    run = runs.read(folder)
    assert run.epochs.tolist() == [1, 2, 3]
    assert "line 4 of log.jsonl cannot be read as a row, and is left out" in run.missing
    assert "it is not finished: 3 of 9 epochs done, and there is no final accuracy yet" in run.missing
    assert any(sentence.startswith("look.safetensors is cut off or damaged") for sentence in run.missing)


def test_a_damaged_recipe_and_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "recipe.json").write_text('{"name": "dig')
    (folder / "result.json").write_text("[]")
    missing = " ".join(runs.read(folder).missing)
    assert "recipe.json is damaged" in missing
    assert "result.json is damaged" in missing


@pytest.mark.parametrize("nothing", [math.nan, None, "0.3", True, math.inf])
def test_a_log_with_nan(nothing: object, tmp_path: Path) -> None:
    """json.dumps writes NaN, which JSON has not; it is read, and shown as a gap."""
    rows = [row(1), row(2, val_loss=nothing, probabilities=[[nothing] * 14] * 14), row(3)]
    run = runs.read(write_run(tmp_path / "run", rows))
    assert np.isnan(run.values("val_loss")).tolist() == [False, True, False]
    assert "val_loss is missing or not finite in epoch 2" in run.missing
    assert "log.jsonl does not say how often each pair of functions was drawn in 1 of 3 epochs" in run.missing
    assert run.distributions[0].tolist() == [1, 3]


@pytest.mark.parametrize("change", [
    lambda look: look.pop("samples"),
    lambda look: look.update(space="nowhere"),
    lambda look: look.update(shown=3),
    lambda look: look["samples"].update(first=torch.tensor([99])),
    lambda look: look["samples"].update(weight=torch.tensor([math.nan])),
    lambda look: look["shown"].update(sample=torch.tensor([7])),
    lambda look: look["shown"].update(images=torch.zeros(1, 5, 4, 4, dtype=torch.uint8)),
])  # fmt: skip
def test_a_look_that_does_not_fit_together_is_left_out(change: Any, tmp_path: Path) -> None:
    one, image = torch.tensor([0]), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    whole, real = ("epoch", "place", "label", "first", "second"), ("weight", "output", "loss")
    samples = {**dict.fromkeys(whole, one), **dict.fromkeys(real, one.float())}
    samples |= {"magnitudes": torch.zeros(1, 2), "signs": torch.ones(1, 2)}
    shown = {"sample": one, "images": image, "originals": image}
    look = {"epoch": 1, "space": "metaaugment", "classes": ["a"], "samples": samples, "shown": shown}
    folder = write_run(tmp_path / "run")
    sealed.save(folder / "look.safetensors", "look", look)
    assert runs.read(folder).seen is not None, "it is the change that is refused"
    change(look)
    sealed.save(folder / "look.safetensors", "look", look)
    run = runs.read(folder)
    assert run.seen is None
    assert any(sentence.startswith("look.safetensors ") for sentence in run.missing)


# -- runs beside each other -------------------------------------------------------------------------------------------


def test_seeds_are_mean_and_deviation(tmp_path: Path) -> None:
    """0.90 and 0.94: mean 92, deviation 2.83, by hand."""
    for seed, accuracy in enumerate((0.90, 0.94)):
        write_run(tmp_path / str(seed), seed=seed, result={"test_accuracy": accuracy})
    write_run(tmp_path / "other", policy_lr=0.5)
    lines = comparison.table(groups(tmp_path))
    assert [(line.label, line.accuracy, line.seeds) for line in lines] == [
        ("digits · metaaugment", "92.00 ± 2.83", "2"),
        ("digits · metaaugment · policy lr 0.5", "90.00", "1"),
    ]


def test_a_seed_counts_once(tmp_path: Path) -> None:
    """A copy of a run, or the same run made again, was taken for one more seed, and made the deviation smaller."""
    for seed, accuracy in enumerate((0.90, 0.94)):
        write_run(tmp_path / f"seed{seed}", seed=seed, result={"test_accuracy": accuracy})
    shutil.copytree(tmp_path / "seed1", tmp_path / "seed1-copied")
    write_run(tmp_path / "seed0-elsewhere", seed=0, result={"test_accuracy": 0.98})
    report = Report.of([tmp_path / name for name in ("seed0", "seed1", "seed1-copied", "seed0-elsewhere")])
    (line,) = comparison.table(report.groups)
    assert (line.accuracy, line.seeds) == ("92.00 ± 2.83", "2")
    assert dict(report.missing)["Results on digits"] == [
        f"{tmp_path}/seed1-copied is not counted: it has seed 1 of digits · metaaugment, like {tmp_path}/seed1, with "
        "the same figures.",
        f"{tmp_path}/seed0-elsewhere is not counted: it has seed 0 of digits · metaaugment, like {tmp_path}/seed0, but "
        "with other figures.",
    ]
    assert f"{tmp_path}/seed1-copied is not counted" in report.html()


def test_of_two_unfinished_runs_of_a_seed_the_one_that_is_further_counts(tmp_path: Path) -> None:
    for name, epochs in (("stopped", 2), ("ahead", 3), ("copied", 3)):
        write_run(tmp_path / name, epochs, finished=False, epochs=9)
    (group,) = comparison.groups(runs.find([tmp_path / name for name in ("stopped", "ahead", "copied")])[0])
    assert [run.folder.name for run in group.runs] == ["ahead"]
    assert all(sentence.endswith("/ahead, with the same figures.") for sentence in comparison.repeated([group]))


def test_recipes_from_before_a_field_was_added_are_the_same(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), seed=seed)
    old = json.loads((tmp_path / "0" / "recipe.json").read_text())
    del old["learn_alpha"]
    (tmp_path / "0" / "recipe.json").write_text(json.dumps(old))
    assert [len(group.runs) for group in groups(tmp_path)] == [2]


def test_runs_on_other_images_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    for seed, fingerprint in enumerate(("abc", "xyz")):
        write_run(tmp_path / str(seed), seed=seed, dataset="folder", result={"data": {"fingerprint": fingerprint}})
    labels = [group.label for group in groups(tmp_path)]
    assert labels == ["digits · metaaugment · data abc", "digits · metaaugment · data xyz"]


def test_cost_is_against_plain_training_of_the_same_work(tmp_path: Path) -> None:
    write_run(tmp_path / "policy", [row(1, seconds=9.0), row(2, seconds=3.0), row(3, seconds=3.0)])
    write_run(tmp_path / "plain", [row(1, seconds=2.0)], method="baseline", epochs=3)
    write_run(tmp_path / "larger", [row(1, seconds=5.0)], method="baseline", epochs=3, batch=100)
    other = {"data": {"fingerprint": "xyz"}}
    write_run(tmp_path / "other", [row(1, seconds=5.0)], method="baseline", epochs=3, split_seed=1, result=other)
    lines = comparison.table(groups(tmp_path))
    assert {line.label: line.cost for line in lines}["digits · metaaugment"] == "1.50 ×"


@pytest.mark.parametrize(("other", "reason"), [
    ({"method": "randaugment"}, "no run with --method baseline"),
    ({"method": "baseline", "batch": 7}, "no run with --method baseline"),
    ({"method": "baseline", "result": {"machine": {"hardware": "a GPU"}}}, "no run with --method baseline"),
    ({"method": "baseline", "result": {"data": {"fingerprint": "xyz"}}}, "use other images"),
])  # fmt: skip
def test_a_cost_without_its_measure_is_a_dash_with_a_reason(other: Any, reason: str, tmp_path: Path) -> None:
    write_run(tmp_path / "policy")
    write_run(tmp_path / "other", **other)
    line = next(line for line in comparison.table(groups(tmp_path)) if "meta" in line.label)
    assert line.cost == "–"
    assert reason in line.why


@pytest.mark.parametrize(("change", "labels", "said"), [
    ({}, ("", ""), None),
    ({"batch": 7}, ("", ""), None),
    ({"epochs": 9}, (" · epochs 4", " · epochs 9"), "not trained for the same number of epochs"),
    ({"per_class": 5}, ("", " · per class 5"), "not trained on the same images"),
    ({"size": 12}, ("", " · size 12"), "not trained on the same images"),
    ({"split_seed": 1, "result": {"data": {"fingerprint": "xyz"}}}, ("", " · split seed 1"),
     "not trained on the same images"),
    ({"epochs": 9, "result": {"data": {"fingerprint": "xyz"}}}, (" · epochs 4 · data abc", " · epochs 9 · data xyz"),
     "not trained on the same images, nor for the same number of epochs"),
])  # fmt: skip
def test_methods_on_other_images_or_for_other_epochs_say_so(
    change: Any, labels: tuple[str, str], said: str | None, tmp_path: Path
) -> None:
    write_run(tmp_path / "plain", method="baseline", size=None)
    write_run(tmp_path / "policy", **{"size": None, **change})
    report = Report.of([tmp_path])
    methods = ("digits · baseline", "digits · metaaugment")
    assert [group.label for group in report.groups] == [a + b for a, b in zip(methods, labels, strict=True)]
    assert report.html().count("These runs were not trained") == (said is not None)
    assert said is None or f"{said}:" in dict(report.missing)["Results on digits"][0]


def test_labels_say_which_policy_a_run_is_under_and_where_held_back_images_are_from(tmp_path: Path) -> None:
    write_run(tmp_path / "a", method="baseline", held_back=0.2)
    write_run(tmp_path / "b", method="randaugment", held_back=0.2, held_back_from="training")
    write_run(tmp_path / "c", policy="mine.safetensors", held_back=0.2)
    labels = [group.label for group in groups(tmp_path)]
    assert labels[1:] == [
        "digits · randaugment · held back from training",
        "digits · metaaugment · policy mine.safetensors",
    ]


def test_labels_leave_out_what_the_recipe_has_itself(tmp_path: Path) -> None:
    """Digits are lagged and updated every 2 steps, folders have 224 pixels and a clip of 5; one has no such recipe."""
    variants = {
        "a": {"epochs": 40}, "b": {"epochs": 40, "lagged": False, "held_back": 0.5}, "c": {"every": 4, "flip": True},
        "d": {"name": "mine"}, "e": {"name": "mine", "lagged": False, "held_back": 0.5},
        "f": {"name": "folder", "size": 224, "clip": 5.0}, "g": {"name": "folder", "size": None, "clip": None},
    }  # fmt: skip
    for name, changes in variants.items():
        write_run(tmp_path / name, **{"dataset": changes.get("name", "digits"), "epochs": 4, **changes})
    labels = [group.label for group in groups(tmp_path)]
    assert labels == [
        "digits · metaaugment",
        "digits · metaaugment · no lagged · held back 0.5",
        "digits · metaaugment · epochs 4 · every 4 · flip",
        "mine · metaaugment · lagged",
        "mine · metaaugment · held back 0.5",
        "folder · metaaugment",
        "folder · metaaugment · no clip · own size",
    ]


def test_data_sets_stand_apart_whatever_their_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "one", epochs=7)
    write_run(tmp_path / "two", name="omniglot", dataset="omniglot", result={"data": {"fingerprint": "xyz"}})
    report = Report.of([tmp_path])
    assert [group.label for group in report.groups] == ["digits · metaaugment", "omniglot · metaaugment"]
    html = report.html()
    assert "These runs were not trained" not in html
    assert "The runs are of different data sets (digits, omniglot)" in " ".join(html.split())


def test_likeness_by_hand() -> None:
    """Two distributions over four pairs that share 0.4 + 0.1 + 0.1 + 0.2 of their draws."""
    p, q = np.array([[0.4, 0.1], [0.2, 0.3]]), np.array([[0.5, 0.2], [0.1, 0.2]])
    correlation, shared = comparison.likeness(p, q)
    assert shared == pytest.approx(0.8)
    assert correlation == pytest.approx(0.05 / math.sqrt(0.05 * 0.09))
    assert comparison.likeness(p, p) == (pytest.approx(1), 1)
    assert math.isnan(comparison.likeness(p, np.full((2, 2), 0.25))[0])


def test_two_networks_are_compared_beside_two_seeds_of_one(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    p = generator.random((14, 14))
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", [row(1, probabilities=(p / p.sum()).tolist())], seed=seed)
    write_run(tmp_path / "b", [row(1, probabilities=(p.T / p.sum()).tolist())], network="wrn-40-2")
    small, both = comparison.alike(groups(tmp_path))
    assert (small.other, small.pairs, small.correlation) == ("its other seeds", 1, pytest.approx(1))
    assert ("wrn-40-2" in both.other, both.pairs) == (True, 2)
    assert both.correlation == pytest.approx(np.corrcoef(p.flatten(), p.T.flatten())[0, 1])


# -- what a policy prefers --------------------------------------------------------------------------------------------


def test_weights_by_function_and_magnitude_by_hand() -> None:
    rotate, color = INDEX["Rotate"], INDEX["Color"]
    seen = seen_of([1.0, 3.0, 0.5, 0.7], [rotate, rotate, color, rotate], [1.0, 1.5, 5.0, 10.0], [0, 0, 1, 1])
    means = preferences.by_function(seen)
    assert set(means) == {rotate, color}, "single functions are drawn; Identity behind them is none"
    assert means[rotate].weight == pytest.approx(4.7 / 3)
    by_magnitude = preferences.by_magnitude(seen, rotate)
    assert [mean.count for mean in by_magnitude] == [2, 0, 0, 0, 1]
    assert by_magnitude[0].weight == 2
    assert by_magnitude[0].error == pytest.approx(1)
    seen.transformation.second[0] = color
    assert preferences.by_function(seen)[color].weight == pytest.approx(0.75)
    words = learned.weight_by_magnitude(seen, [rotate, INDEX["Identity"]]).words
    assert "Rotate: mean weight by magnitude 0 to 2 2.00, 8 to 10 0.70, of 3 samples" in words
    assert "Identity: mean weight 1.40 of 3 samples, it takes no magnitude" in words


def test_single_functions_are_shown_as_such(tmp_path: Path) -> None:
    """Whose pairs with another second function than Identity are not drawn less often: they are no choice at all."""
    p, q = np.zeros((14, 14)), np.zeros((14, 14))
    p[:, INDEX["Identity"]], q[:, INDEX["Identity"]] = np.arange(1, 15) / 105, np.arange(14, 0, -1) / 105
    correlation, shared = comparison.likeness(p, q)
    assert correlation == pytest.approx(-1)
    assert shared == pytest.approx(1 - np.abs(np.arange(1, 15) - np.arange(14, 0, -1)).sum() / 210)
    words = learned.marginals(p, 3).words
    assert "Identity 1.87" in words
    assert "As the second" not in words
    folder = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    rows = [row | {"probabilities": p.tolist()} for row in rows]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = Report.of([folder]).html()
    assert "Functions by how often they are drawn" in content
    assert "How often each pair of functions is drawn" not in content


def test_weights_by_class_are_relative_to_the_function() -> None:
    """Under Rotate class a weighs 0.5 and class b 1.5: half of, and one and a half times its mean."""
    seen = seen_of([0.5] * 10 + [1.5] * 10, [INDEX["Rotate"]] * 20, [5.0] * 20, [0] * 10 + [1] * 10)
    found = preferences.by_class(seen)
    assert found.labels == [1, 0], "the highest first"
    assert found.functions == [INDEX["Rotate"]]
    assert found.relative.tolist() == [[1.5], [0.5]]
    assert found.left_out() == ""
    picture = learned.classes(seen)
    assert picture is not None
    assert "b under Rotate 1.50" in picture.words
    few = seen_of([0.5, 1.5], [INDEX["Rotate"]] * 2, [5.0] * 2, [0, 1])
    assert learned.classes(few) is None, "a mean of one sample says nothing"


def test_of_many_classes_those_are_shown_that_differ_by_more_than_chance() -> None:
    """Of 25 classes with 8 samples each two differ, and their standard error is that of any 8 of the 200 weights."""
    weights = np.tile([0.9, 1.1], 100)
    weights[8 * 3 : 8 * 4], weights[8 * 20 : 8 * 21] = 1.2, 0.8
    few = np.ones(10)  # of ten more classes, which have one sample each
    label = [*np.repeat(np.arange(25), 8), *range(25, 35)]
    functions = [INDEX["Rotate"], INDEX["Color"]] * 105
    seen = seen_of([*weights, *few], functions, [5.0] * 210, label)
    seen = replace(seen, classes=[f"class {number}" for number in range(40)])
    found = preferences.by_class(seen)
    assert found.labels == [3, 20]
    assert [mean.weight for mean in found.means] == pytest.approx([1.2, 0.8])
    deviation = math.sqrt((184 * 0.1**2 + 16 * 0.2**2) / 210)
    assert [mean.error for mean in found.means] == pytest.approx([deviation / math.sqrt(8)] * 2)
    assert found.functions == [], "each has 4 samples of a class, too few for a column of its own"
    assert found.left_out() == (
        "Shown are classes whose mean weight differs from that of all by more than twice its standard error: 2 of 25. "
        "Chance alone would give about 1. Classes left out: 23 that differ less, 15 with fewer than 4 samples here."
    )
    picture = learned.classes(seen)
    assert picture is not None
    assert "class 3 under any function 1.20, class 20 under any function 0.80" in picture.words
    none = preferences.by_class(replace(seen, weight=np.full(210, 0.3)))
    assert none.labels == []
    assert "standard error: none of 25." in none.left_out()


def test_only_later_samples_count() -> None:
    seen = seen_of([9.0, 9.0, 1.0, 1.0], [INDEX["Color"]] * 4, [5.0] * 4, [0] * 4)
    seen = replace(seen, epochs=np.array([1, 2, 9, 10]))
    assert preferences.by_function(seen)[INDEX["Color"]].weight == 1


def test_words_name_the_extreme_pairs() -> None:
    p = np.ones((14, 14))
    p[2, 5], p[13, 0] = 3, 0.5
    words = preferences.extremes(p / p.sum(), 1)
    assert words == "most drawn Rotate then Color 2.98; least drawn Identity then AutoContrast 0.50"


def test_the_highest_alpha_is_below_the_edge_of_its_panel(tmp_path: Path) -> None:
    """The axis begins at 0: a margin of the values' own range, which may be small, would be none of it."""
    run = runs.read(write_run(tmp_path / "run", [row(epoch, alpha=0.1 + 1e-4 * epoch) for epoch in range(1, 5)]))
    picture = curves.over_epochs(comparison.groups([run]), "alpha")
    low, high = picture.figure.axes[0].get_ylim()
    assert low == 0
    assert high > 1.04 * 0.1004


def test_curves_say_their_course(tmp_path: Path) -> None:
    losses = [2.0, 0.25, None, 0.5]
    write_run(tmp_path / "run", [row(epoch, val_loss=loss) for epoch, loss in enumerate(losses, 1)])
    group = groups(tmp_path)
    picture = curves.over_epochs(group, "val_loss")
    assert "goes from 2 in epoch 1 to 0.5 in epoch 4, lowest 0.25 in epoch 2" in picture.words
    assert isinstance(picture.figure, Figure)


def test_a_method_has_the_curves_of_what_it_logs(tmp_path: Path) -> None:
    always = {"train_loss", "val_loss", "val_accuracy"}
    wanted = {
        "baseline": always,
        "metaaugment": always | {"alpha", "effective_samples"},
        "advaa": always | {"controller_entropy"},
    }
    for method in wanted:
        more = {"controller_entropy": 0.8} if method == "advaa" else {}
        write_run(tmp_path / method, [row(1, **more), row(2)], method=method)
    (data,) = Report.of([tmp_path]).data
    every = [run for group in data.groups for run in group.runs]
    assert {run.method: {key for key in curves.READINGS if curves.has(run, key)} for run in every} == wanted
    assert "is 0.8 in epoch 1." in next(p for p in data.pictures(legend=False) if p.name == "controller_entropy").words


def test_one_epoch_is_a_whole_number_with_bands(tmp_path: Path) -> None:
    """The bands are those of the quantiles in the row: the outermost from 0.1 to 2."""
    run = runs.read(write_run(tmp_path / "run", 1))
    spread = curves.weight_spread(run)
    for picture in (spread, *(curves.over_epochs(comparison.groups([run]), key) for key in curves.READINGS)):
        axes = picture.figure.axes[0]
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]
    bands = [band.get_paths()[0].get_extents() for band in spread.figure.axes[0].collections]
    assert [(band.y0, band.y1) for band in bands] == [(0.1, 2.0), (0.5, 1.5), (0.8, 1.2)]
    assert all(band.width > 0 for band in bands)
    assert spread.title == "Weights after epoch 1"
    assert spread.words.endswith("all 0.10 to 2.00.")
    assert curves.weight_spread(runs.read(write_run(tmp_path / "two", 2))).title == "Weights over time"


def test_a_diagnosis_is_drawn_so_that_nothing_overlaps() -> None:
    """In the picture of a file, and in each of the two of a page: its legend and bars, and names of ticks."""
    some = Correlation(0.3, 0.1)
    sizes = [32, 64, 128, 256, 512, 1024, 1623]
    found = Diagnosis(
        2048, 3246, 128, 0.5, 0.1, dict.fromkeys(sizes, some), dict.fromkeys(INPUTS, some), Correlation(0.01, 0.1)
    )
    whole, (predicted, noise) = diagnosis.picture(found), diagnosis.panels(found)
    for figure in (whole.figure, predicted.figure, noise.figure):
        figure.draw_without_rendering()
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert box is not None
            assert box.x1 <= figure.bbox.x1, "its title is not cut off"
            if (legend := axes.get_legend()) is not None:
                assert not any(legend.get_window_extent().overlaps(bar.get_window_extent()) for bar in axes.patches)
            names = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
            assert all(one.x1 < other.x0 for one, other in pairwise(names))
    ticks = noise.figure.axes[0].get_xticks()
    assert ticks.tolist() == [32, 64, 128, 256, 512, 1623]
    assert "1,024 images" in noise.words, "it is drawn, only without a name"
    _, of_few = diagnosis.panels(replace(found, noise=dict.fromkeys([32, 50], some)))
    assert of_few.figure.axes[0].get_xticks().tolist() == [32, 50]


# -- warnings ---------------------------------------------------------------------------------------------------------


NEVER = "Policy idle: it was never updated, so its weights are those it began with"


@pytest.mark.parametrize(("figures", "recipe", "warning"), [
    ({"effective_samples": 0.2}, {}, "Weights collapsed: 20% of a mini-batch"),
    ({"effective_samples": 0.2}, {"policy": "p.safetensors"}, "Weights collapsed: 20% of a mini-batch effectively "
     "train the network, the other samples have next to no weight. Its p alone (export --sampler-only) may help."),
    ({"effective_samples": 0.9995}, {}, "Policy idle: weights are uniform"),
    ({"effective_samples": 1.0}, {"batch": 1}, "Policy idle: a mini-batch is one sample, whose weight is always 1;"),
    ({"effective_samples": 1.0}, {"batch": 1, "copies": 2}, "Policy idle: weights are uniform"),
    ({"alpha": 0.1}, {}, f"{NEVER}; check whether --every is larger"),
    ({"alpha": 0.1}, {"learn_alpha": False, "policy_lr": 0.0}, f"{NEVER}; --policy-lr is 0."),
    ({"alpha": 0.001}, {}, "α near zero: since epoch 1 of 20 it has been below 0.005,"),
    ({"alpha": -0.002}, {}, "α near zero: since epoch 1 of 20 it has been below 0.005,"),
    ({"skipped": 3}, {}, "Non-finite steps skipped: 3 so far"),
])  # fmt: skip
def test_warnings(figures: Any, recipe: Any, warning: str, tmp_path: Path) -> None:
    found = said(write_run(tmp_path / "run", [row(epoch, **figures) for epoch in range(1, 21)], **recipe))
    assert found.startswith(warning)


@pytest.mark.parametrize(("figures", "recipe"), [
    ({}, {}),
    ({"alpha": 0.1}, {"learn_alpha": False}),  # fixed on purpose
    ({"alpha": 0.001}, {"real_alpha": True}),  # as the learning rate is at the end
    ({"alpha": 0.1}, {"policy": "learned.safetensors"}),  # under a policy that was learned before
    ({"alpha": 0.1, "effective_samples": 1.0}, {"policy": "p-alone.safetensors"}),  # whose weights are equal on purpose
    ({"alpha": 0.1, "effective_samples": 1.0}, {"method": "randaugment"}),
    ({"effective_samples": 0.3}, {}),
])  # fmt: skip
def test_what_is_no_reason_to_worry(figures: Any, recipe: Any, tmp_path: Path) -> None:
    assert said(write_run(tmp_path / "run", [row(epoch, **figures) for epoch in range(1, 21)], **recipe)) == ""


def test_alpha_is_said_to_be_near_zero_only_long_before_the_end(warned: Callable[..., str]) -> None:
    """Where it is usual it was warned of, and where it is a fault nothing said since when."""
    of_alpha, rising = partial(warned, figure="alpha"), [0.1 + 0.01 * e for e in range(6)]
    early = of_alpha("early", rising + [0.0015] * 24)
    assert early.startswith("α near zero: since epoch 7 of 30 it has been below 0.005, and the policy")
    assert "--policy-clip, or a lower --policy-lr, limits them" in early
    known = of_alpha("known", rising + [0.0] * 24, batch=50, result={"data": {"train": 1049}}, policy_clip=5.0)
    assert "since epoch 7 of 30 (step 140) it has been" in known, "1,049 images make 20 steps of 50"
    assert "A lower --policy-clip" in known
    assert of_alpha("comes back for an epoch", rising + [0.0] * 10 + [0.03] + [0.0] * 13).startswith(early[:45])
    assert of_alpha("in the last third", rising * 3 + [0.05] * 3 + [0.0] * 9) == "", "as on CIFAR"
    assert of_alpha("before it", rising * 3 + [0.05] + [0.0] * 11).startswith("α near zero: since epoch 20 of 30")
    assert of_alpha("comes back for good", rising + [0.0] * 18 + rising) == ""
    assert of_alpha("is falling", [*rising, 0.0], epochs=9, finished=False) == "", "its end is not reached"
    phases = {"random_epochs": 20, "frozen_epochs": 4}  # so 6 epochs in which it learns
    course = [0.1] * 20 + [0.09] * 4 + [0.0] * 6
    assert of_alpha("learns late", course, **phases) == ""
    assert "since epoch 24 of 26" in of_alpha("later", course[:20] + [0.09] * 3 + [0.0] * 7, **phases)


def test_a_policy_that_has_hardly_learned(warned: Callable[..., str]) -> None:
    """Shares of an untrained policy's weights, 0.96 and 0.99, were no reason for a word."""
    for share in (0.99, 0.96):
        assert warned(f"{share}", [share] * 20).startswith(
            "Policy hardly learned: its weights are spread as in its first epoch (the effective share of a mini-batch "
            f"is {share:.3f}, and was {share:.3f})"
        )
    # Deviations of 0.1, then 0.13, then 0.1 again; and 0.1, then 0.07, as of a policy that learns to predict.
    assert warned("learned", [0.9901] * 5 + [0.9834] * 15) == ""
    assert warned("learned once", [0.9901] * 5 + [0.9834] * 10 + [0.9901] * 10) == ""
    assert warned("learned to predict", [0.9901] * 5 + [0.9951] * 15) == ""
    assert warned("one odd epoch", [0.9901] * 9 + [0.95] + [0.9901] * 9).startswith("Policy hardly learned")
    assert warned("under way", [0.96] * 20, finished=False, epochs=40) == ""
    assert warned("begun spread", [0.8] * 20) == "", "it learned within its first epoch"
    assert warned("too short to tell", [0.96] * 9) == ""
    assert warned("given", [0.96] * 20, policy="learned.safetensors") == ""


def test_one_cause_has_one_warning(tmp_path: Path) -> None:
    still = [row(e, alpha=0.0, effective_samples=0.97) for e in range(1, 21)]
    never = [row(e, alpha=0.1, effective_samples=0.97) for e in range(1, 21)]
    equal = [row(e, effective_samples=0.9995) for e in range(1, 21)]
    for name, rows, cause in (("a", still, "α near zero"), ("b", never, "Policy idle"), ("c", equal, "Policy idle")):
        run = runs.read(write_run(tmp_path / name, rows))
        assert [sentence.split(":")[0] for sentence in concerns.concerns(run)] == [cause]


def test_phases_on_purpose_are_not_warned_of_and_a_transfer_has_none(tmp_path: Path) -> None:
    """ImageNet's: equal weights at first, and a frozen policy at last; under a policy file all epochs count."""
    rows = [row(e, effective_samples=1.0, alpha=0.1) if e not in (5, 6, 7) else row(e) for e in range(1, 13)]
    assert said(write_run(tmp_path / "phases", rows, random_epochs=4, frozen_epochs=5)) == ""
    rows = [row(e, effective_samples=0.2) for e in range(1, 31)]
    run = write_run(tmp_path / "run", rows, random_epochs=40, frozen_epochs=40, policy="p.safetensors")
    assert said(run).startswith("Weights collapsed: 20% of a mini-batch")


def test_policy_saturated(warned: Callable[..., str]) -> None:
    """The course of a run on Omniglot with four copies; once it lasts, it is not said to be idle as well."""
    course = [0.95] * 8 + [0.85, 0.7, 0.65, 0.6, 0.58, 0.34, 0.965] + [0.999] * 5
    assert warned("run", course).startswith("Policy saturated: 60% of a mini-batch effectively trained the network")
    assert "around epoch 12, and all weights are equal now" in warned("again", course)
    longer = warned("longer", course + [0.9995] * 40)
    assert longer.startswith("Policy saturated: 60%")
    assert "idle" not in longer
    assert warned("back", [min(share, 0.98) for share in course]) == "", "as on the digits"
    assert warned("under", course, policy="learned.safetensors") == "", "what does not learn"


def test_validation_overfitted(warned: Callable[..., str], tmp_path: Path) -> None:
    up = warned("up", [0.6] * 7 + [0.3] * 6 + [0.6] * 7, "val_loss")
    assert "was 0.3 around epoch 8, and is 0.6 now" in up
    assert warned("tiny", [0.004] * 9 + [0.008] * 11, "val_loss") == "", "twice next to nothing"
    assert warned("spike", [0.5] * 19 + [5.0], "val_loss") == "", "one bad epoch"
    # 3 standard errors of 0.9 on 100 and 600 images are 9.7 points.
    assert said(write_run(tmp_path / "chance", 20, result={"val_accuracy": 0.99})) == ""
    assert "the test accuracy is 10.0% below" in said(write_run(tmp_path / "gap", 20, result={"val_accuracy": 1.0}))


# -- the data set with the known answer -------------------------------------------------------------------------------


def test_the_report_says_what_the_policy_of_the_known_answer_learned(tmp_path: Path) -> None:
    """Moves that push the pattern out of the picture destroy the label: those samples have the lowest weights."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    import sample_aware

    generator = torch.Generator().manual_seed(0)
    patterns = [sample_aware.Patterns.draw(n, generator) for n in (5120, 1000, 200)]
    data = DataSet(
        "patterns", *(Images(part.images, part.labels) for part in patterns), ("level", "upright"),
        (100 / 255,), (50 / 255,), (100,),
    )  # fmt: skip
    recipe = replace(
        RECIPES["digits"](), name="patterns", dataset="patterns", space="metaaugment", epochs=8, batch=128, lr=0.02,
        policy_batch=256, policy_lr=1e-3,
    )  # fmt: skip
    experiment = assemble(recipe, data, torch.device("cpu"), Console(quiet=True))
    torch.manual_seed(0)
    experiment = replace(experiment, network=sample_aware.task_network())

    def begin(before: ma.Learner | None) -> tuple[ma.Learner, Adam]:
        learner = experiment.learner(sample_aware.MoveHalf(), ma.PolicyNetwork(64))
        return learner, Adam(learner.policy_parameters(), recipe.policy_lr)

    write_json(tmp_path / "recipe.json", recipe.to_json())
    training.trainer(experiment, Place(), tmp_path, Reader(0, False), [], [Phase(recipe.epochs, begin)]).run()

    run = runs.read(tmp_path)
    seen = run.seen
    assert seen is not None
    assert concerns.concerns(run) == []
    means = preferences.by_function(seen)
    assert means[INDEX["TranslateX"]].weight < 0.7 < 1.05 < means[INDEX["Identity"]].weight
    of = replace(patterns[0], column=patterns[0].column[seen.place])
    moved = seen.transformation.first.numpy() == INDEX["TranslateX"]
    destroyed = moved & of.destroyed_by(seen.transformation).numpy()
    recent = seen.recent()
    assert seen.weight[recent & destroyed].mean() < 0.75 * seen.weight[recent & moved & ~destroyed].mean()
    shown = {name: destroyed[[seen.pictures.sample[place] for place in places]]
             for name, places in learned.shown(seen).items()}  # fmt: skip
    assert shown["low"].mean() > 0.7, "a fourth of the samples are moved and destroyed by chance at most"
    assert not shown["high"].any()
    words = learned.weight_by_magnitude(seen, [INDEX["TranslateX"]]).words
    assert words == f"TranslateX: mean weight by magnitude 8 to 10 {means[INDEX['TranslateX']].weight:.2f}, of " \
                    f"{means[INDEX['TranslateX']].count} samples."  # fmt: skip
    assert all(card.functions[0].startswith("TranslateX") for card in learned.cards(seen, 20)["low"][:4])
