"""AutoAugment's search: what it learns, what it finds, and that no moment to stop it changes either."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.controller import FUNCTIONS
from metaaugment.lab.baselines.found import Function, SubPolicies
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.run import train
from metaaugment.lab.search.auto_augment import Settings, policy, trial
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.seeds import CHILD, derived_seed
from metaaugment.lab.training.trainer import Trainer

from searches import QUIET, Moment, asked_to_stop, assert_goes_on, killed, rows, searched

# So few steps that hard policies leave a child behind: there is something to learn, and quickly.
SMALL = replace(RECIPES["digits"](), method="autoaugment", size=8, per_class=10, batch=10, epochs=3, lr=0.02, seed=2)
TINY = replace(SMALL, batch=50, epochs=2)


def run(recipe: Recipe, out: Path, resume: bool = False, **settings: Any) -> Path:
    return searched(recipe, Settings(**settings), out, resume)


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
    assert not (out / "children").exists()


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
    first, second = ({"seconds": 1.0, **row} for row in (first | {"objective": 1.0, "val_loss": None}, second))
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "search"
    run(TINY, out, children=6, controller_lr=0.05)
    return out


@pytest.mark.parametrize(
    "moment",
    [
        (Trainer, "_end_epoch", 6, False, killed),  # in the last epoch of the third child
        (Laboratory, "note", 3, False, killed),
        (Laboratory, "note", 3, True, killed),
        (Laboratory, "note", 3, True, asked_to_stop),
    ],
)
def test_a_search_that_was_stopped_ends_as_one_that_was_not(moment: Moment, whole: Path, tmp_path: Path) -> None:
    assert_goes_on(moment, TINY, Settings(children=6, controller_lr=0.05), whole, tmp_path / "search")
    assert not (tmp_path / "search" / "children").exists()


def test_rewards_change_what_is_proposed(whole: Path, tmp_path: Path) -> None:
    """A controller that does not learn proposes the same first child, and another one later."""
    run(TINY, tmp_path / "still", children=6, controller_lr=0.0)
    one, other = rows(whole), rows(tmp_path / "still")
    assert one[0]["decisions"] == other[0]["decisions"]
    assert one[5]["decisions"] != other[5]["decisions"]


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
