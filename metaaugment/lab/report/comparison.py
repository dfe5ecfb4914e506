"""Runs compared: seeds of one recipe as mean ± deviation, their cost, and how alike the learned policies are."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import numpy as np

from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.results import spread
from metaaugment.lab.report.runs import Run
from metaaugment.lab.training.log import FIGURES
from metaaugment.lab.words import duration, printable

# What runs must share for their times to be comparable.
SAME_WORK = ("name", "dataset", "network", "batch", "size", "per_class")
# Which images of a data set a run uses. NONE puts a value of None, the data set's own, into words.
IMAGES = ("size", "area_min", "white", "per_class", "split_seed", "held_back", "held_back_from")
NONE = {"size": "own size", "per_class": "all images"}
DEFAULTS = {one.name: one.default for one in fields(Recipe) if one.default is not MISSING}


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one recipe on the same data, one per seed; `again` holds other runs of the same seeds."""

    label: str
    runs: list[Run]
    again: list[Run] = field(default_factory=list)


def groups(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of the runs.

    Labels name the settings that tell groups of one recipe and method apart, unless they have the recipe's own value.
    """
    members = [_by_seed(group) for group in _by(_key, runs)]
    counted = [group for group, _ in members]
    return [Group(_label(group, counted), group, again) for group, again in members]


def _by(key: Callable[[Run], str], runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with the same key together, in the order of their firsts."""
    found = defaultdict(list)
    for run in runs:
        found[key(run)].append(run)
    return list(found.values())


def _by_seed(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """One run per seed, the first of those that got furthest, and all others: they are no further evidence."""
    counted = [max(same, key=lambda run: len(run.rows)) for same in _by(_seed, runs)]
    return counted, [run for run in runs if run not in counted]


def _seed(run: Run) -> str:
    return printable(run.recipe.get("seed", "?"))


def _key(run: Run) -> str:
    """Everything about a run but its seed; unfinished runs do not say which images they use, only their recipe."""
    if not run.recipe:
        return str(run.folder)
    return json.dumps([{**run.recipe, "seed": None}, _fingerprint(run)], sort_keys=True, default=str)


def _fingerprint(run: Run) -> Any:
    return run.told("data").get("fingerprint")


def _label(group: Sequence[Run], members: Sequence[Sequence[Run]]) -> str:
    run = group[0]
    if not run.recipe:
        return printable(run.folder.name)
    firsts = [other[0] for other in members if other[0].recipe]
    like = [other for other in firsts if (other.name, other.method) == (run.name, run.method)]
    beside = [other for other in firsts if other.dataset == run.dataset]  # in one table, whatever the method
    keys = [
        key for key in run.recipe
        if key == "policy"  # always named if there is one
        or (key != "seed" and _differ([run, *like, *(beside if key in (*IMAGES, "epochs") else ())], key))
    ]  # fmt: skip
    own = _own(run)
    settings = [_setting(run, key) for key in keys if key not in own or run.recipe[key] != own[key]]
    alone = len(like) > 1 and not keys  # then the images differ, or are not known
    if alone or any(_other_images(run, other) and not _differ([run, other], *IMAGES) for other in beside):
        settings.append("unfinished" if run.result is None else f"data {printable(_fingerprint(run))}")
    return " · ".join([run.name, run.method, *settings])


def _own(run: Run) -> dict[str, Any]:
    """The named recipe's own values, which need no mention; for an unknown name, the defaults of all recipes."""
    return RECIPES[run.name]().to_json() if run.name in RECIPES else DEFAULTS


def _setting(run: Run, key: str) -> str:
    value, name = run.recipe[key], key.replace("_", " ")
    if value is None or value is False:
        return NONE.get(key, f"no {name}")
    return name if value is True else f"{name} {printable(value)}"


def _differ(runs: Sequence[Run], *keys: str) -> bool:
    """Whether runs differ in any of these fields; fields that older runs lack have their defaults."""
    one, *others = ([run.recipe.get(key, DEFAULTS.get(key)) for key in keys] for run in runs)
    return any(other != one for other in others)


def _other_images(run: Run, other: Run) -> bool:
    """Whether both runs say which images they use, and the images differ."""
    return None not in (one := _fingerprint(run), two := _fingerprint(other)) and one != two


def repeated(together: Sequence[Group]) -> list[str]:
    """Which runs have the seed of another one of their group, and so are not counted."""
    return [
        f"{printable(run.folder)} is not counted: it has seed {_seed(run)} of {group.label}, like "
        f"{printable(other.folder)}, " + ("with the same figures." if _same(run, other) else "but with other figures.")
        for group in together for run in group.again for other in group.runs if _seed(other) == _seed(run)
    ]  # fmt: skip


def _same(run: Run, other: Run) -> bool:
    """Whether two runs are the same as far as both have got."""
    ends = {(one.accuracy("test"), one.accuracy("held_back")) for one in (run, other) if one.result is not None}
    shared = min(len(run.rows), len(other.rows))
    one, two = (np.array([each.values(key)[:shared] for key in FIGURES]) for each in (run, other))
    return np.array_equal(one, two, equal_nan=True) and len(ends) <= 1


def unlike(together: Sequence[Group]) -> list[str]:
    """Why the figures of groups on one data set are not comparable: other images, other numbers of epochs."""
    runs = [group.runs[0] for group in together if group.runs[0].recipe]
    if not runs:
        return []
    known = [run for run in runs if _fingerprint(run) is not None]
    images = _differ(runs, *IMAGES) or any(_other_images(known[0], run) for run in known)
    differences = ["on the same images"] if images else []
    differences += ["for the same number of epochs"] if _differ(runs, "epochs") else []
    said = f"These runs were not trained {', nor '.join(differences)}: their figures may differ for that reason alone."
    return [said] if differences else []


@dataclass(frozen=True)
class Line:
    """A line of the table of results, in words; `why` is the reason for a dash."""

    label: str
    accuracy: str
    validation: str
    seeds: str
    epochs: str
    time: str
    cost: str
    why: str


def table(together: Sequence[Group]) -> list[Line]:
    lines = []
    for group in together:
        runs = group.runs
        test, held_back = (
            [100 * share for run in runs if (share := run.accuracy(images)) is not None]
            for images in ("test", "held_back")
        )
        last = [100 * values[-1] for run in runs if len(values := _finite(run.values("val_accuracy")))]
        cost, why = _cost(group, together)
        seconds = _seconds(runs)
        lines.append(
            Line(
                group.label,
                spread(test) if test else f"none; {spread(held_back)} on held-back images" if held_back else "–",
                spread(last) if last else "–",
                str(len(runs)),
                _epochs(runs),
                _short(statistics.mean(seconds)) if seconds else "–",
                cost,
                why,
            )
        )
    return lines


def _epochs(runs: Sequence[Run]) -> str:
    """Epochs done, and while a run is under way also those planned."""
    words = {
        str(len(run.rows)) if run.result is not None or run.planned is None else f"{len(run.rows)} of {run.planned}"
        for run in runs
    }
    return ", ".join(sorted(words))


def _short(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _cost(group: Group, together: Sequence[Group]) -> tuple[str, str]:
    """Time per epoch as a multiple of that of plain training, or a dash and its reason."""
    places = {_place(run) for run in group.runs if _place(run) is not None}
    seconds = _seconds(group.runs)
    if not seconds or len(places) != 1:
        return "–", "its machine is known once it is finished" if not places else "its runs used different machines"
    work = {key: group.runs[0].recipe.get(key) for key in SAME_WORK}
    plain = [
        run for other in together for run in other.runs
        if run.method == "baseline" and run.recipe.get("copies", 1) == 1 and _place(run) in places
        and {key: run.recipe.get(key) for key in SAME_WORK} == work and _seconds([run])
    ]  # fmt: skip
    if not plain:
        return "–", "no run with --method baseline of this recipe and machine is in the report"
    same = _seconds([run for run in plain if _fingerprint(run) == _fingerprint(group.runs[0])])
    if not same:
        return "–", "the runs with --method baseline of this recipe and machine use other images"
    return f"{statistics.mean(seconds) / statistics.mean(same):.2f} ×", ""


def _place(run: Run) -> str | None:
    """What a run ran on."""
    result, machine = run.result or {}, run.told("machine")
    if "hardware" not in machine:
        return None
    return printable(f"{machine['hardware']}, {machine.get('threads')} threads, {result.get('precision')}")


def _seconds(runs: Sequence[Run]) -> list[float]:
    """Seconds per epoch of each run that logs them: the median, because the first epoch warms up."""
    told = (_finite(run.values("seconds")) for run in runs)
    return [float(np.median(seconds)) for seconds in told if len(seconds)]


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


@dataclass(frozen=True)
class Likeness:
    """How alike two groups' distributions over pairs of functions are, averaged over all pairs of their runs.

    `correlation` is that of the probabilities, over pairs that at least one of them draws; `shared` is the share of
    draws that both distributions make alike, 1 − Σ|p − q| / 2.
    """

    one: str
    other: str
    correlation: float
    shared: float
    pairs: int


def likeness(p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """Correlation and shared draws of two distributions; a uniform one correlates with nothing, which gives NaN."""
    p, q = p.flatten() / p.sum(), q.flatten() / q.sum()
    shared = 1 - float(np.abs(p - q).sum()) / 2
    drawn = (p > 0) | (q > 0)  # samplers of single functions never draw most pairs, which is no agreement
    p, q = p[drawn], q[drawn]
    if min(p.std(), q.std()) < 1e-9:
        return math.nan, shared
    return float(np.corrcoef(p, q)[0, 1]), shared


def alike(together: Sequence[Group]) -> list[Likeness]:
    """Likeness of every two groups with a learned distribution, and, for scale, of the seeds within each."""
    last = [[run.distributions[1][-1] for run in group.runs if len(run.distributions[0])] for group in together]
    found = []
    for (one, ps), (other, qs) in combinations_with_replacement(zip(together, last, strict=True), 2):
        pairs = combinations(ps, 2) if one is other else product(ps, qs)
        if each := [likeness(p, q) for p, q in pairs]:
            correlation, shared = np.mean(each, axis=0)
            label = "its other seeds" if one is other else other.label
            found.append(Likeness(one.label, label, float(correlation), float(shared), len(each)))
    return found
