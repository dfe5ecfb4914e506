"""What tests of searches share: a search that dies or is asked to stop at a moment, and what it has noted."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console

from metaaugment.lab.baselines import published
from metaaugment.lab.data import DataSet, dataset
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.run import SEARCHES, search
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.interruption import Interrupted

from endings import Killed

QUIET = Console(quiet=True)


def searched(recipe: Recipe, settings: Any, out: Path, resume: bool = False) -> Path:
    """The policy file of a search by the recipe's method, in a folder that it makes or goes on in."""
    place = Place(resume=out, device="cpu") if resume else Place(out=out, device="cpu")
    return search(SEARCHES[recipe.method], recipe, settings, place, QUIET)


def laboratory(folder: Path, recipe: Recipe, data: DataSet | None = None, device: str = "cpu") -> Laboratory:
    """What a search works with, without a search."""
    folder.mkdir(exist_ok=True)
    data = data or dataset(recipe.dataset, size=recipe.size, per_class=recipe.per_class)
    return Laboratory(recipe, Place(device=device), data, folder, QUIET)


def killed() -> NoReturn:
    raise Killed


def asked_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def dying(
    function: Callable[..., Any], call: int, after: bool = False, die: Callable[[], object] = killed
) -> Callable[..., Any]:
    """The function, but for its n-th call, which dies before it does anything, or after."""
    calls = iter(range(1, sys.maxsize))

    def instead(*arguments: Any, **named: Any) -> Any:
        now = next(calls) == call
        if now and not after:
            die()
        result = function(*arguments, **named)
        if now and after:
            die()
        return result

    return instead


def rows(out: Path) -> list[dict[str, Any]]:
    """Whole rows, without how long they took, which differs from time to time."""
    lines = [line for line in (out / "trials.jsonl").read_text().splitlines() if line.endswith("}")]
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def in_order(out: Path) -> list[dict[str, Any]]:
    """The rows in the order of a single process."""
    return sorted(rows(out), key=lambda row: (row.get("generation", 0), row["trial"]))


# A function's owner and name, which of its calls, whether after it or before, and what happens then.
Moment = tuple[Any, str, int, bool, Callable[[], object]]


def assert_goes_on(moment: Moment, recipe: Recipe, settings: Any, whole: Path, out: Path) -> None:
    """Killed or asked to stop, a search goes on by what it was begun with, and ends as one that was left in peace."""
    owner, name, call, after, die = moment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), call, after, die))
        with pytest.raises((Killed, Interrupted)):
            searched(recipe, settings, out)
    noted = rows(out)
    torch.manual_seed(99)  # another process has other numbers of its own
    file = searched(recipe, type(settings)(), out, resume=True)
    assert published.find(file) == published.find(whole / "policy.json")
    assert rows(out)[: len(noted)] == noted, "none of them is made again"
    assert in_order(out) == in_order(whole)
