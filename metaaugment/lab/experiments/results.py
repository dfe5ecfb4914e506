"""Results: one file per finished run, and RESULTS.md, which is made from files alone."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaaugment.files.atomic import write_atomically
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.tables import COMPARISONS, GONE, ROWS, Entry, folder_name
from metaaugment.lab.training.folder import accuracy_key
from metaaugment.lab.training.json_file import damaged, is_number, read_json
from metaaugment.lab.training.log import FIGURES
from metaaugment.lab.training.machine import single
from metaaugment.lab.words import duration

Result = dict[str, Any]
Course = dict[str, list[float | None]]


def files(folder: Path) -> list[Path]:
    """The files of single runs; anything else in these folders is not a result."""
    return sorted(folder.glob("*/*-seed*.json"))


def read(folder: Path) -> dict[str, dict[str, list[Result]]]:
    """The results by row and entry, in the order of the paper's tables, then by name."""
    rows: dict[str, dict[str, list[Result]]] = {}
    images: dict[tuple[object, ...], tuple[Path, object]] = {}
    for file in files(folder):
        entry = file.stem.rsplit("-seed", 1)[0]
        results = rows.setdefault(file.parent.name, {}).setdefault(entry, [])
        results.append(read_result(file))
        _check_named(file, results[-1])
        _check_settings(file, entry, results[-1])
        _check_alike(file, results[0], results[-1])
        _check_policy(file, results)
        _check_images(file, images, results[-1])
    known = list(ROWS)
    order = sorted(rows, key=lambda row: (known.index(r) if (r := _recipe(row)) in known else len(known), row))
    return {row: dict(sorted(rows[row].items(), key=lambda item: _place(row, item[0]))) for row in order}


def read_result(file: Path) -> Result:
    """The result in a file, which is refused unless it says all that a table needs."""
    result = read_json(file)
    accuracy = accuracy_key(result)
    for key in (accuracy, "epochs", "seconds", "images_per_second"):
        value = result.get(key)
        if not is_number(value) or value < 0:
            raise damaged(file, f"its {key} is {str(value)[:40]!r}, not a number")
    if result[accuracy] > 1:
        raise damaged(file, f"its {accuracy} is {result[accuracy]}, not a share of 0 to 1")
    for key in ("epochs", "side_by_side"):
        value = result.get(key, 1)
        if type(value) is not int or value < 1:
            raise damaged(file, f"its {key} is {str(value)[:40]!r}, not a whole number of at least 1")
    if not isinstance(result.get("recipe") or {}, dict):
        raise damaged(file, "its recipe is not an object of fields and values")
    machine = result.get("machine")
    known = isinstance(machine, dict) and "hardware" in machine and "commit" in result
    if not (known and isinstance(result["commit"], str | None)):
        raise damaged(file, "it does not say on which machine and commit the run was made")
    return result


def _check_named(file: Path, result: Result) -> None:
    """Refuse a file whose name or folder does not match its run; the earliest do not say entry or recipe."""
    entry, seed = file.stem.rsplit("-seed", 1)
    if str(result.get("seed")) != seed or result.get("entry", entry) != entry:
        raise ValueError(
            f"{file} holds {result.get('entry', 'a run')} with seed {result.get('seed')}; rename it to match, or "
            "move it away"
        )
    recipe = result.get("recipe") or {}
    if recipe.get("seed", result["seed"]) != result["seed"]:
        raise ValueError(f"{file} says seed {result['seed']}, but its recipe {recipe['seed']}; move it away")
    if str(recipe.get("name")) in RECIPES:
        folder = folder_name(recipe["name"], recipe.get("epochs"))
        if file.parent.name != folder:
            raise ValueError(
                f"{file} holds a run of {recipe['name']} with {recipe.get('epochs')} epochs; move it to the folder "
                f"{folder}, or away"
            )


def _check_settings(file: Path, name: str, result: Result) -> None:
    """Refuse a run with other settings than its entry has; the earliest do not say all of them."""
    entry, said = _entries(file.parent.name).get(name), result.get("recipe") or {}
    if entry is None or not said:
        return
    meant = ROWS[_recipe(file.parent.name)].run(entry, 0, None, None).to_json()
    for key in sorted((said.keys() & meant.keys()) - {"seed", "epochs", "policy"}):
        if said[key] != meant[key]:
            raise ValueError(f"{file} was trained with {key} {said[key]}, but {name} has {meant[key]}; move it away")


def _check_alike(file: Path, first: Result, result: Result) -> None:
    """Refuse a mean over runs with different settings."""
    one, other = accuracy_key(result), accuracy_key(first)
    if one != other:
        raise ValueError(f"{file} has a {one}, but the first file of its entry has a {other}; move it away")
    ours, theirs = _settings(result), _settings(first)
    for key in sorted((ours.keys() & theirs.keys()) - {"seed", "policy"}):
        if ours[key] != theirs[key]:
            raise ValueError(
                f"{file} was trained with {key} {ours[key]}, but the first file of its entry with {theirs[key]}; "
                "move it away"
            )


def _settings(result: Result) -> dict[str, Any]:
    """What a run was trained with; the earliest results have no recipe."""
    return (result.get("recipe") or {}) | {"epochs": result["epochs"]}


def _check_policy(file: Path, results: Sequence[Result]) -> None:
    """Refuse a mean over runs under different policies; the earliest results do not say which policy it was."""
    known = [digest for result in results if (digest := result.get("policy_sha256")) is not None]
    if known and known[-1] != known[0]:
        raise ValueError(
            f"{file} was trained under the policy of SHA-256 {known[-1]}, but others of its entry under that of "
            f"{known[0]}; move it away"
        )


def _check_images(file: Path, images: dict[tuple[object, ...], tuple[Path, object]], result: Result) -> None:
    """Refuse a row over different images, such as those of an incomplete data set; those held back are kept apart."""
    recipe, data = result.get("recipe") or {}, result.get("data")
    found = data.get("fingerprint") if isinstance(data, dict) else None
    if found is None:
        return
    held_back = (str(recipe.get("held_back", 0.0)), str(recipe.get("held_back_from", "validation")))
    first, other = images.setdefault((file.parent, *held_back), (file, found))
    if found != other:
        raise ValueError(f"{file} is about other images than {first} ({found}, not {other}); move one of them away")


def course(log: Path) -> Course:
    """A log as columns: each figure over the epochs. ValueError if it is damaged."""
    try:
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        return {figure: [_rounded(row[figure]) for row in rows] for figure in FIGURES}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{log} is damaged: {error}") from None


def _rounded(figure: float | None) -> float | None:
    """To six digits; a log has null for what is not finite."""
    return None if figure is None else float(f"{figure:.6g}")


def course_file(result: Path) -> Path:
    """The file with the course of the run whose result is in this file."""
    return result.parent / "courses" / result.name


def write_course(course: Course, file: Path) -> None:
    """Write a course as JSON, one line per figure."""
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(figure)}: {json.dumps(values)}" for figure, values in course.items())
    write_atomically(file, lambda part: part.write_text(f"{{\n{lines}\n}}\n"))


MADE_BY = "Made by `metaaugment reproduce`"  # at the beginning of what may be replaced


def markdown(folder: Path) -> str:
    """The text of RESULTS.md."""
    lines = [
        "# Results",
        "",
        f"{MADE_BY} from the files under `results/`, one per run; nothing is typed by hand.",
        "Accuracy in percent after the last epoch, on the test images except in rehearsals, as mean ± standard",
        "deviation over seeds. Time is that of training; “4 at once” means that up to 4 runs shared the device, so",
        "that it is not the time of a run alone. Each copy of an image counts in images/s: advaa has eight, mt four.",
        "The paper's figures are those of its own number of epochs, also beside shorter runs. A + behind a commit",
        "means that files were changed since.",
    ]
    for row, entries in read(folder).items():
        title = ROWS[_recipe(row)].table if _recipe(row) in ROWS else "not in the paper"
        if own := {name: results for name, results in entries.items() if not _apart(row, name)}:
            lines += ["", f"## {row} ({title})", "", *_table(row, own)]
        for name, comparison in COMPARISONS.items():
            compared = {entry: entries[entry] for entry in comparison.entries if entry in entries}
            if comparison.row == _recipe(row) and any(_apart(row, entry) for entry in compared):
                lines += ["", f"### {name}, {row}: {comparison.what}", "", *_table(row, compared)]
    return "\n".join((*lines, *_speeds(folder))) + "\n"


def _speeds(folder: Path) -> list[str]:
    """What methods cost: whole training alone on a device, as measured by `benchmarks/training.py`."""
    lines = []
    for file in sorted(folder.glob("bench/training-*.json")):
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
            table = _lines(("", "", "images/s", "× baseline", "× bare steps", "epoch × bare steps"), rows)
            machine = f"{measured['machine']['hardware']}, torch {measured['machine']['torch']}"
            if (at := measured.get("commit")) is not None:  # the first benches did not record it
                machine += f", commit {_short(at)}"
            epochs = f"{measured['epochs']:d}"
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
            raise damaged(file, "it was not written by benchmarks/training.py") from None
        lines += [
            "",
            f"## Speed of training ({_cell(machine)})",
            "",
            f"Trained one after the other for {epochs} epochs in one run of `benchmarks/training.py`, each alone on",
            "the device. Speed is that of the steps; their time is given as a multiple of the baseline's and of that",
            "of bare steps of their kind, and the time of a whole epoch, with validation, log and checkpoint, as a",
            "multiple of the latter. Each is the median over the epochs after the first; the last one includes what a",
            "run does once: its last checkpoint and, if a policy is learned, a look at many samples.",
            "",
            *table,
        ]
    return lines


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    first, *others = (f"| {' | '.join(map(_cell, cells))} |" for cells in (header, *rows))
    return [first, "|" + "---|" * len(header), *others]


def _table(row: str, entries: dict[str, list[Result]]) -> list[str]:
    header = ("", "accuracy", "seeds", "paper", "epochs", "time", "images/s", "on", "commit")
    rows = []
    for name, results in entries.items():
        shared = [result.get("side_by_side", 1) for result in results]
        least, most = min(shared), max(shared)
        beside = "" if most == 1 else f" ({most if least == most else f'{least}–{most}'} at once)"
        cells = (
            name,
            spread([100 * result[accuracy_key(result)] for result in results]),
            str(len(results)),
            paper(row, name) or "–",
            str(results[0]["epochs"]),
            duration(statistics.mean(result["seconds"] for result in results)) + beside,
            f"{statistics.mean(result['images_per_second'] for result in results):,.0f}",
            "; ".join(sorted(set(map(_where, results)))),
            ", ".join(sorted({_short(commit) for r in results for commit in single(r["commit"])})),
        )
        rows.append(cells)
    return _lines(header, rows)


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


def _apart(row: str, name: str) -> bool:
    entry = _entries(row).get(name)
    return name in GONE or (entry is not None and entry.apart)


def _place(row: str, name: str) -> tuple[int, str]:
    names = list(_entries(row))
    return names.index(name) if name in names else len(names), name


def _entries(row: str) -> dict[str, Entry]:
    """The entries of a row by their names; none for an unknown row."""
    return {entry.name: entry for entry in ROWS[_recipe(row)].entries} if _recipe(row) in ROWS else {}


def _recipe(row: str) -> str:
    """The recipe in the name of a row's folder, which ends in the number of epochs if that is not the recipe's."""
    return row.removesuffix("-epochs").rsplit("-", 1)[0] if row.endswith("-epochs") else row
