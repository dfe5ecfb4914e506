"""Results: one file per finished run, and RESULTS.md, which is made from files alone."""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from metaaugment.files.atomic import write_atomically
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.tables import COMPARISONS, ROWS, Entry, folder_name
from metaaugment.lab.training.folder import accuracy_key
from metaaugment.lab.training.json_file import damaged, is_number, read_json
from metaaugment.lab.training.log import FIGURES
from metaaugment.lab.training.machine import commits
from metaaugment.lab.words import duration

Result = dict[str, Any]
MADE_BY = "Made by `metaaugment reproduce`"  # at the beginning of what may be replaced


# -- what a result must be ---------------------------------------------------------------------------------------------


def _is_amount(value: object) -> bool:
    return is_number(value) and value >= 0


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _are_commits(value: object) -> bool:
    return value is None or all(isinstance(one, str) for one in (value if isinstance(value, list) else [value]))


# What a table needs of a result: by its key, whether a value will do, and what it must be.
SCHEMA: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "epochs": (_is_count, "a whole number of at least 1"),
    "side_by_side": (_is_count, "a whole number of at least 1"),
    "seconds": (_is_amount, "a number"),
    "images_per_second": (_is_amount, "a number"),
    "recipe": (lambda value: isinstance(value, dict), "an object of fields and values"),
    "machine": (lambda value: isinstance(value, dict) and "hardware" in value, "one that names its hardware"),
    "commit": (_are_commits, "a list of commits"),
}
ACCURACY = (lambda value: _is_amount(value) and value <= 1, "a share of 0 to 1")
EARLIEST = {"side_by_side": 1, "recipe": {}}  # which the earliest results do not say


def read_result(file: Path) -> Result:
    """The result in a file, which is refused unless it says all that a table needs."""
    result = EARLIEST | {key: value for key, value in read_json(file).items() if (key, value) != ("recipe", None)}
    for key, (fits, meant) in {accuracy_key(result): ACCURACY, **SCHEMA}.items():
        if key not in result or not fits(result[key]):
            raise damaged(file, f"its {key} is {str(result.get(key))[:40]!r}, not {meant}")
    return result


# -- which results belong together -------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    """The files of single runs; anything else in these folders is not a result."""
    return sorted(folder.glob("*/*-seed*.json"))


def read(folder: Path) -> dict[str, dict[str, list[Result]]]:
    """The results by row and entry, in the order of the paper's tables, then by name.

    Refused are files in another place than that of their run, and runs that make no mean, or no row, together.
    """
    rows: dict[str, dict[str, list[Result]]] = {}
    known: dict[tuple[str, ...], tuple[object, object]] = {}  # what is the same in several runs: who said it, and what
    for file in files(folder):
        row, entry = file.parent.name, file.stem.rsplit("-seed", 1)[0]
        result = read_result(file)
        _check_place(file, entry, result)
        for name, value in _meant(row, entry).items():
            known.setdefault((row, entry, name), (entry, value))
        for fact, value in _shared(row, entry, result):
            whose, other = known.setdefault(fact, (file, value))
            if value != other:
                raise ValueError(f"{file} has {fact[-1]} {value}, but {whose} has {other}; move it away")
        rows.setdefault(row, {}).setdefault(entry, []).append(result)
    in_order = sorted(rows, key=lambda row: (*_rank(_recipe(row), ROWS), row))
    return {row: dict(sorted(rows[row].items(), key=lambda item: _rank(item[0], _entries(row)))) for row in in_order}


def _check_place(file: Path, entry: str, result: Result) -> None:
    """Refuse a file whose folder and name are not those of its run; the earliest results say less of it."""
    recipe, seed = result["recipe"], result.get("seed")
    name = str(recipe.get("name"))
    row = folder_name(name, recipe.get("epochs")) if name in RECIPES else file.parent.name
    places = {f"{row}/{result.get('entry', entry)}-seed{one}.json" for one in (seed, recipe.get("seed", seed))}
    if places != {f"{file.parent.name}/{file.name}"}:
        raise ValueError(f"{file} holds the result of {' and '.join(sorted(places))}; move it there, or away")


def _meant(row: str, entry: str) -> dict[str, Any]:
    """What runs of a table's entry are trained with."""
    if entry not in _entries(row):
        return {}
    settings = ROWS[_recipe(row)].run(_entries(row)[entry], 0, None, None).to_json()
    return {name: value for name, value in settings.items() if name not in ("seed", "epochs", "policy")}


def _shared(row: str, entry: str, result: Result) -> Iterator[tuple[tuple[str, ...], object]]:
    """What runs of one entry have in common and, of the images, all of a row; the earliest results do not say all."""
    recipe, data = result["recipe"], result.get("data")
    for name, value in {**recipe, "epochs": result["epochs"], "measure": accuracy_key(result)}.items():
        if name not in ("seed", "policy"):
            yield (row, entry, name), value
    if (digest := result.get("policy_sha256")) is not None:
        yield (row, entry, "policy_sha256"), digest
    if isinstance(data, dict) and data.get("fingerprint") is not None:
        held_back = (str(recipe.get("held_back", 0.0)), str(recipe.get("held_back_from", "validation")))
        yield (row, *held_back, "images"), data["fingerprint"]


def _rank(name: str, known: Iterable[str]) -> tuple[int, str]:
    """What to sort a name by: its place among those that are known, or else behind them."""
    names = list(known)
    return (names.index(name) if name in names else len(names), name)


def _entries(row: str) -> dict[str, Entry]:
    """The entries of a row by their names; none for an unknown row."""
    return {entry.name: entry for entry in ROWS[_recipe(row)].entries} if _recipe(row) in ROWS else {}


def _recipe(row: str) -> str:
    """The recipe in the name of a row's folder, which ends in the number of epochs if that is not the recipe's."""
    return row.removesuffix("-epochs").rsplit("-", 1)[0] if row.endswith("-epochs") else row


# -- the course of a run -----------------------------------------------------------------------------------------------


def course_file(result: Path) -> Path:
    """The file with the course of the run whose result is in this file."""
    return result.parent / "courses" / result.name


def keep_course(log: Path, result: Path) -> None:
    """Write a log as columns, each figure over the epochs; a log that is damaged or not there is done without."""
    try:
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        columns = {figure: [_rounded(row[figure]) for row in rows] for figure in FIGURES}
    except (KeyError, OSError, TypeError, ValueError):
        return
    lines = ",\n".join(f"  {json.dumps(figure)}: {json.dumps(values)}" for figure, values in columns.items())
    file = course_file(result)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, lambda part: part.write_text(f"{{\n{lines}\n}}\n"))


def _rounded(figure: float | None) -> float | None:
    """To six digits; a log has null for what is not finite."""
    return None if figure is None else float(f"{figure:.6g}")


# -- RESULTS.md --------------------------------------------------------------------------------------------------------


def markdown(folder: Path) -> str:
    """The text of RESULTS.md, whose words are in results.md beside this file."""
    words = PackageLoader("metaaugment.lab.experiments", ".")
    page = Environment(loader=words, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    page.filters["cell"] = _cell
    tables = [table for row, entries in read(folder).items() for table in _tables(row, entries)]
    speeds = [_speeds(file) for file in sorted(folder.glob("bench/training-*.json"))]
    return page.get_template("results.md").render(
        made_by=MADE_BY, archive=(folder / "archive").is_dir(), tables=tables, speeds=speeds
    )


def _tables(row: str, entries: Mapping[str, Sequence[Result]]) -> Iterator[tuple[str, list[Sequence[str]]]]:
    """The heading and the lines of a row's own table, and of those that show some of its entries side by side."""
    recipe, known = _recipe(row), _entries(row)
    title = ROWS[recipe].table if recipe in ROWS else "not in the paper"
    apart = {name for name in entries if name in known and known[name].apart}
    held_back = {name for name, runs in entries.items() if accuracy_key(runs[0]) != "test_accuracy"} - apart
    tables = {
        f"## {row} ({title})": [name for name in entries if name not in apart | held_back],
        f"### {row}: accuracy on images that were held back": [name for name in entries if name in held_back],
        **{
            f"### {name}, {row}: {comparison.what}": comparison.entries
            for name, comparison in COMPARISONS.items()
            if comparison.row == recipe and apart.intersection(comparison.entries)
        },
    }
    for heading, names in tables.items():
        if lines := [_line(row, name, entries[name]) for name in names if name in entries]:
            yield heading, lines


def _line(row: str, name: str, results: Sequence[Result]) -> Sequence[str]:
    """A line of a table: runs that differ in their seed only."""
    shared = [result["side_by_side"] for result in results]
    least, most = min(shared), max(shared)
    beside = "" if most == 1 else f" ({most if least == most else f'{least}–{most}'} at once)"
    return (
        name,
        spread([100 * result[accuracy_key(result)] for result in results]),
        str(len(results)),
        paper(row, name) or "–",
        str(results[0]["epochs"]),
        duration(statistics.mean(result["seconds"] for result in results)) + beside,
        f"{statistics.mean(result['images_per_second'] for result in results):,.0f}",
        "; ".join(sorted({_where(result) for result in results})),
        ", ".join(sorted({_short(commit) for result in results for commit in commits(result["commit"])})),
    )


def _where(result: Result) -> str:
    """The machine and, but for the earliest results, which do not say it, the precision."""
    hardware = str(result["machine"]["hardware"])
    return f"{hardware}, {result['precision']}" if "precision" in result else hardware


def _short(commit: str) -> str:
    return commit[:7] + "+" * commit.endswith("+")


def _cell(text: str) -> str:
    """Text from a file, escaped so that it cannot end the cell or the line."""
    return " ".join(text.split()).replace("|", r"\|")


def spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def paper(row: str, name: str) -> str:
    """The paper's figure, if it has one; also for runs with another number of epochs."""
    entry = _entries(row).get(name)
    return entry.paper if entry is not None else ""


def _speeds(file: Path) -> tuple[int, str, Sequence[Sequence[str]]]:
    """What methods cost: whole training alone on a device, as measured by `benchmarks/training.py`."""
    measured = read_json(file)
    try:
        plain = {f["recipe"]: f["steps_seconds"] for f in measured["figures"] if f["what"] == "baseline"}
        rows = [
            (
                figure["recipe"],
                figure["what"],
                f"{figure['steps'] * RECIPES[figure['recipe']]().batch / figure['steps_seconds']:,.0f}",
                f"{figure['steps_seconds'] / plain[figure['recipe']]:.2f}",
                f"{figure['steps_over_bare']:.2f}",
                f"{figure['epoch_over_bare']:.2f}",
            )
            for figure in measured["figures"]
        ]
        machine = f"{measured['machine']['hardware']}, torch {measured['machine']['torch']}"
        if (at := measured.get("commit")) is not None:  # the first benches did not record it
            machine += f", commit {_short(at)}"
        return int(measured["epochs"]), machine, rows
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        raise damaged(file, "it was not written by benchmarks/training.py") from None
