"""AutoAugment's search: what it learns, what it finds, and that no moment to stop it changes either."""

import json
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.controller import FUNCTIONS
from metaaugment.lab.baselines.found import Function
from metaaugment.lab.baselines.sub_policies import SubPolicies
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.run import train
from metaaugment.lab.search.auto_augment import Settings, policy, trial
from metaaugment.lab.search.run import search
from metaaugment.lab.search.systems import SEARCHES
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.seeds import CHILD, derived_seed
from metaaugment.lab.training.interruption import Interrupted
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.trainer import Trainer

from endings import Killed
from trees import write_folder

KIND = SEARCHES["autoaugment"]
QUIET = Console(quiet=True)
# So few steps that hard policies leave a child behind: there is something to learn, and quickly.
SMALL = replace(RECIPES["digits"](), method="autoaugment", size=8, per_class=10, batch=10, epochs=3, lr=0.02, seed=2)
TINY = replace(SMALL, batch=50, epochs=2)


def run(recipe: Recipe, out: Path, resume: bool = False, **settings: Any) -> Path:
    place = Place(resume=out, device="cpu") if resume else Place(out=out, device="cpu")
    return search(KIND, recipe, Settings(**settings), place, QUIET)


def rows(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_children_get_better_and_the_best_five_are_trained_under(tmp_path: Path) -> None:
    out = tmp_path / "search"
    file = run(SMALL, out, children=60, controller_lr=0.01)
    trials = rows(out)
    objectives = [row["objective"] for row in trials]
    assert [row["trial"] for row in trials] == list(range(60))
    assert mean(objectives[-20:]) > mean(objectives[:6])
    # The policy, from the log by hand.
    best = sorted(range(60), key=lambda place: (-objectives[place], place))[:5]
    decisions = [number for place in best for number in trials[place]["decisions"]]
    expected = [
        Function(FUNCTIONS[f], p / 10, level)
        for f, p, level in zip(decisions[::3], decisions[1::3], decisions[2::3], strict=True)
    ]
    found = published.find(file)
    assert isinstance(found, SubPolicies)
    assert [function for pair in found.sub_policies for function in pair] == expected
    assert len(found.sub_policies) == 25
    cost = json.loads(file.read_text())["search"]["cost"]
    assert cost["trials"] == 60
    assert cost["seconds"] == pytest.approx(sum(row["seconds"] for row in trials))
    assert not (out / "children").exists()
    result = train(replace(SMALL, policy=file, epochs=6), Place(out=tmp_path / "run", device="cpu"), QUIET)
    assert result["test_accuracy"] > 0.5


def test_a_child_is_a_run_under_its_policy(tmp_path: Path) -> None:
    """Its objective is what `train` says of the same policy as a file, under the child's seed."""
    run(TINY, tmp_path / "search", children=2)
    for number, row in enumerate(rows(tmp_path / "search")):
        file = tmp_path / f"{number}.json"
        published.write(policy([row["decisions"]]), file)
        recipe = replace(TINY, policy=file, seed=derived_seed(TINY.seed, CHILD, number))
        result = train(recipe, Place(out=tmp_path / f"run{number}", device="cpu"), QUIET)
        assert result["val_accuracy"] == row["objective"]


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
def test_children_that_all_diverged_make_no_policy(tmp_path: Path) -> None:
    """Also where the search is continued: what it found is known from its rows."""
    sentence = r"^no trial gave a finite result: the networks of all 2 diverged; .* with a smaller --lr$"
    for resume in (False, True):
        with pytest.raises(ValueError, match=sentence):
            run(replace(TINY, lr=1e20), tmp_path / "search", resume, children=2)
    assert not (tmp_path / "search" / "policy.json").exists()


def test_a_child_that_diverged_is_not_among_the_best(tmp_path: Path) -> None:
    """Its accuracy, however high by chance, is no reason to augment as it did."""
    file = run(TINY, tmp_path / "search", children=2)
    first, second = rows(tmp_path / "search")
    first |= {"objective": 1.0, "val_loss": None}
    (tmp_path / "search" / "trials.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    file.unlink()
    found = published.find(run(TINY, tmp_path / "search", resume=True, children=2))
    assert isinstance(found, SubPolicies)
    assert found.sub_policies == policy([second["decisions"]]).sub_policies


def test_decisions_are_functions_probabilities_and_levels() -> None:
    rotate, invert = FUNCTIONS.index("Rotate"), FUNCTIONS.index("Invert")
    found = policy([[rotate, 0, 9, invert, 10, 0] + [0] * 24, [rotate, 3, 4] * 10])
    assert found.sub_policies[0] == (Function("Rotate", 0.0, 9), Function("Invert", 1.0, 0))
    assert found.sub_policies[5:] == ((Function("Rotate", 0.3, 4), Function("Rotate", 0.3, 4)),) * 5
    assert len(found.sub_policies) == 10
    assert found.magnitude(Function("Rotate", 1.0, 9)) == 9


def dies_in_training(patch: pytest.MonkeyPatch) -> None:
    end_epoch, calls = Trainer._end_epoch, []

    def dying(trainer: Trainer, *values: float) -> None:
        calls.append(1)
        if len(calls) == 6:  # the last epoch of the third child
            raise Killed
        end_epoch(trainer, *values)

    patch.setattr(Trainer, "_end_epoch", dying)


def dies_before_noting(patch: pytest.MonkeyPatch) -> None:
    note = Laboratory.note

    def dying(lab: Laboratory, row: Row) -> None:
        if row["trial"] == 2:
            raise Killed
        note(lab, row)

    patch.setattr(Laboratory, "note", dying)


def dies_after_noting(patch: pytest.MonkeyPatch) -> None:
    note = Laboratory.note

    def dying(lab: Laboratory, row: Row) -> None:
        note(lab, row)
        if row["trial"] == 2:
            raise Killed

    patch.setattr(Laboratory, "note", dying)


def dies_while_noting(patch: pytest.MonkeyPatch) -> None:
    def dying(lab: Laboratory, row: Row) -> None:
        (lab.folder / "trials.jsonl").write_text(json.dumps(row)[:20])
        raise Killed

    patch.setattr(Laboratory, "note", dying)


def stops_on_a_signal(patch: pytest.MonkeyPatch) -> None:
    note = Laboratory.note

    def asking(lab: Laboratory, row: Row) -> None:
        note(lab, row)
        if row["trial"] == 2:
            signal.raise_signal(signal.SIGTERM)

    patch.setattr(Laboratory, "note", asking)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "search"
    run(TINY, out, children=6, controller_lr=0.05)
    return out


@pytest.mark.parametrize(
    "stop", [dies_in_training, dies_before_noting, dies_while_noting, dies_after_noting, stops_on_a_signal]
)
def test_a_search_that_was_stopped_ends_as_one_that_was_not(
    stop: Any, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "search"
    with monkeypatch.context() as patch:
        stop(patch)
        with pytest.raises((Killed, Interrupted)):
            run(TINY, out, children=6, controller_lr=0.05)
    torch.manual_seed(99)  # another process has other numbers of its own
    children, experiment = [], Laboratory.experiment

    def counting(lab: Laboratory, **changes: Any) -> Any:
        assert len(list((lab.folder / "children").glob("*"))) <= 1  # those noted are gone
        children.append(1)
        return experiment(lab, **changes)

    monkeypatch.setattr(Laboratory, "experiment", counting)
    noted = len([line for line in (out / "trials.jsonl").read_text().splitlines() if line.endswith("}")])
    file = run(TINY, out, resume=True)
    assert len(children) == 6 - noted
    assert published.find(file) == published.find(whole / "policy.json")
    lines = [line for line in (out / "trials.jsonl").read_text().splitlines() if line.endswith("}")]
    for found, expected in zip(map(json.loads, lines), rows(whole), strict=True):
        assert found | {"seconds": 0} == expected | {"seconds": 0}


def test_rewards_change_what_is_proposed(whole: Path, tmp_path: Path) -> None:
    """A controller that does not learn proposes the same first child, and another one later."""
    run(TINY, tmp_path / "still", children=6, controller_lr=0.0)
    one, other = rows(whole), rows(tmp_path / "still")
    assert one[0]["decisions"] == other[0]["decisions"]
    assert one[5]["decisions"] != other[5]["decisions"]


def test_image_files_can_be_searched_on(tmp_path: Path) -> None:
    classes = {f"{part}/{kind}": count for part, count in (("train", 8), ("val", 3), ("test", 2)) for kind in "ab"}
    data = write_folder(tmp_path / "data", classes)
    recipe = replace(RECIPES["folder"](), method="autoaugment", network="small-cnn", size=16, batch=8, epochs=1)
    place = Place(data=data, out=tmp_path / "search", device="cpu", workers=0)
    file = search(KIND, recipe, Settings(children=2), place, QUIET)
    found = published.find(file)
    assert isinstance(found, SubPolicies)
    assert len(found.sub_policies) == 10  # of the two children there are


@pytest.mark.parametrize("name", RECIPES)
def test_a_trial_of_any_recipe_is_one_that_can_be_trained(name: str) -> None:
    recipe = trial(replace(RECIPES[name](), method="autoaugment"))
    validity.check(recipe)
    assert recipe.epochs <= 30
    assert recipe.copies == 1
    own = replace(RECIPES[name](), epochs=7, warmup_epochs=3, per_class=11)
    assert (trial(own).epochs, trial(own).warmup_epochs, trial(own).per_class) == (7, 3, 11)


def test_cifar_is_searched_on_4000_images() -> None:
    for name, classes in (("cifar10-wrn-40-2", 10), ("cifar100-wrn-40-2", 100)):
        assert (trial(RECIPES[name]()).per_class or 0) * classes == 4000


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"children": 0}, "--children is 0; it must be a whole number of at least 1"),
        ({"controller_lr": -1.0}, "--controller-lr is -1.0; it must be a number of 0 or more"),
        ({"controller_lr": float("nan")}, "--controller-lr is nan; it must be a number of 0 or more"),
        ({"controller_lr": float("inf")}, "--controller-lr is inf; it must be a number of 0 or more"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        run(TINY, tmp_path / "search", **settings)
    assert not (tmp_path / "search").exists()


def test_settings_have_names_of_their_own() -> None:
    taken = {field.name for kind in (Recipe, Place) for field in fields(kind)}
    assert not taken & {field.name for field in fields(Settings)}
