"""Found policies as files: the published ones, which come with the package, and those of a search."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from metaaugment.files.atomic import write_atomically
from metaaugment.lab.baselines.found import FoundPolicy, Function, Schedule, Stage, SubPolicies
from metaaugment.lab.data import DATASETS
from metaaugment.ops import SPACES

_FOLDER = resources.files("metaaugment.lab.baselines") / "policies"
PUBLISHED: tuple[str, ...] = tuple(sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir()))
SYSTEMS = ("autoaugment", "faa", "pba", "dada")


def fitting(system: str, dataset: str) -> str:
    """Name of the published policy of a system that fits a data set best; one for CIFAR if there is none like it."""
    for name in (f"{system}-{DATASETS[dataset].like}", f"{system}-cifar10", f"{system}-cifar"):
        if name in PUBLISHED:
            return name
    raise ValueError(f"unknown system {system!r}; choose one of {', '.join(SYSTEMS)}")


def find(policy: Path | str) -> FoundPolicy:
    """A policy by its published name, or from a file."""
    if str(policy) in PUBLISHED:
        return decode(json.loads((_FOLDER / f"{policy}.json").read_text()))
    file = Path(policy)
    try:
        if file.is_char_device():
            raise ValueError("it is a device, not a file")
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except UnicodeDecodeError:
        raise ValueError(
            f"{file} is not a policy of a compared system, which is a JSON file; use a learned policy with the method "
            "metaaugment, and metaaugment inspect to see what is in it"
        ) from None
    except IsADirectoryError:
        inside = file / "policy.json"  # as a search names it
        way = f"name its file {inside}" if inside.exists() else f"name a file, or one of {', '.join(PUBLISHED)}"
        raise ValueError(f"{file} is a folder, not a policy; {way}") from None
    except FileNotFoundError:
        raise ValueError(f"there is no policy {policy}; name a file, or one of {', '.join(PUBLISHED)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a policy of a compared system: {error}") from None
    try:
        return decode(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def search_of(policy: Path | str) -> Mapping[str, Any]:
    """What the file of a policy says of the search that found it, such as its recipe and data; empty if nothing."""
    search = None if str(policy) in PUBLISHED else json.loads(Path(policy).read_text(encoding="utf-8")).get("search")
    return search if isinstance(search, dict) else {}


def system_of(policy: Path | str) -> str | None:
    """The system of a policy, given by its published name or as a file; None if it is not of a compared system."""
    try:
        return find(policy).system
    except (ValueError, OSError):
        return None


def decode(values: Mapping[str, Any]) -> FoundPolicy:
    """A policy from JSON; raises a ValueError that says what is wrong with it."""
    system = _field(values, "system", str)
    space = _field(values, "space", str)
    if system not in SYSTEMS:
        raise ValueError(f"its system is {system!r}; choose one of {', '.join(SYSTEMS)}")
    if space not in SPACES:
        raise ValueError(f"its space is {space!r}; choose one of {', '.join(SPACES)}")
    max_level = _number(_field(values, "max_level", (int, float)))
    if not 0 < max_level < float("inf"):
        raise ValueError(f"its max_level is {max_level!r}; it must be above 0")
    about = system, _field(values, "source", str), space, max_level
    if "log" in values:
        return Schedule(*about, _stages(values))
    return SubPolicies(*about, tuple(_pair(pair) for pair in _field(values, "sub_policies", list)))


def encode(policy: FoundPolicy) -> dict[str, Any]:
    """A policy to JSON; a schedule becomes a log in which one trial is its own successor."""
    about = {name: getattr(policy, name) for name in ("system", "source", "space", "max_level")}
    if isinstance(policy, SubPolicies):
        return about | {"sub_policies": [[_plain(function) for function in pair] for pair in policy.sub_policies]}
    assert isinstance(policy, Schedule)
    names = [function.name for function in policy.stages[0].functions]
    numbers = [
        [number for function in stage.functions for number in (10 * function.probability, function.level)]
        for stage in policy.stages
    ]
    log, epoch = [], 0
    for stage, before, after in zip(policy.stages, numbers, numbers[1:] or numbers, strict=False):
        epoch += stage.epochs if len(numbers) > 1 else 0
        log.append(["0", "0", epoch, epoch, before, after])
    return about | {"epochs": policy.epochs, "operations": names, "log": log}


def write(policy: FoundPolicy, file: Path, **about: Any) -> None:
    """Write a file that `find` reads; `about` is whatever else is known of how the policy was found."""
    values = encode(policy) | about
    lines = ",\n".join(f"  {json.dumps(key)}: {_lines(value)}" for key, value in values.items())
    write_atomically(file, lambda part: part.write_text(f"{{\n{lines}\n}}\n"))


def _lines(value: Any) -> str:
    """JSON as people read it: a list of lists with a line for each, everything else in one line."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
    return json.dumps(value)


def _plain(function: Function) -> list[Any]:
    return [function.name, function.probability, function.level if function.takes_level or function.level else None]


def _field(values: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    if name not in values:
        raise ValueError(f"its {name} is missing")
    if not isinstance(values[name], kind) or isinstance(values[name], bool):
        raise ValueError(f"its {name} is {values[name]!r}, which is not a valid value")
    return values[name]


def _pair(pair: Any) -> tuple[Function, Function]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"a sub-policy is {pair!r}; it must be a list of two functions")
    return _function(pair[0]), _function(pair[1])


def _function(values: Any) -> Function:
    if not isinstance(values, list) or len(values) != 3 or not isinstance(values[0], str):
        raise ValueError(f"a function is {values!r}; it must be a list of its name, probability and level")
    name, probability, level = values
    function = Function(name, _number(probability), 0.0 if level is None else _number(level))
    if level is None and function.takes_level:
        raise ValueError(f"{name} has no level; it needs one")
    return function


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e9:
        raise ValueError(f"{str(value)[:40]!r} is not a number of at most 1e9")
    return value


def _stages(values: Mapping[str, Any]) -> tuple[Stage, ...]:
    """The stages of a schedule, from the log of replacements that led to a population's best trial.

    Each line has the trial that was replaced, the one that replaced it, the epochs that the two were at, and the
    functions of the latter before and after their change. A stage ends at the epoch of the latter; the first line's
    "before" opens the schedule.
    """
    epochs, log = _field(values, "epochs", int), _field(values, "log", list)
    names = _field(values, "operations", list)
    if epochs < 1:
        raise ValueError(f"its schedule has {epochs} epochs; there must be at least one")
    if not log:
        raise ValueError("its log is empty; there must be at least one line")
    for line in log:
        if not isinstance(line, list) or len(line) != 6:
            raise ValueError(f"a line of its log is {str(line)[:60]}; it must have six entries")
    for before, after in pairwise(log):
        if before[0] != after[1]:
            raise ValueError(f"its log has a gap: trial {after[1]} follows a line about trial {before[0]}")
    bounds = [0, *(line[3] for line in log), epochs]
    if not all(type(bound) is int for bound in bounds):
        raise ValueError(f"the epochs of its log are {bounds[1:]}; they must be whole numbers")
    policies = [log[0][4], *(line[5] for line in log)]
    if any(later < earlier for earlier, later in pairwise(bounds)):
        raise ValueError(f"the epochs of its log are {bounds[1:]}; they must not decrease")
    stages = zip(bounds, bounds[1:], policies, strict=False)
    return tuple(Stage(int(end - begin), _functions(names, policy)) for begin, end, policy in stages if end > begin)


def _functions(names: Sequence[Any], numbers: Any) -> tuple[Function, ...]:
    """Functions from pairs of probability in tenths and level; the list of names is repeated as often as needed."""
    if not isinstance(numbers, list) or not names or not numbers or len(numbers) % (2 * len(names)):
        raise ValueError(f"a policy of its log is {str(numbers)[:60]}; it must have two numbers for each function")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return tuple(
        _function([names[place % len(names)], _number(tenths) / 10, level])
        for place, (tenths, level) in enumerate(pairs)
    )
