"""What the README shows works, as it stands there."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from metaaugment import cli
from metaaugment.experiments import results

from commands import understood
from pages import blocks, commands

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = blocks(ROOT / "README.md")


@pytest.mark.parametrize("code", [block.text for block in BLOCKS if block.language == "python"])
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_commands_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [words for block in BLOCKS if block.language == "" for words in commands(block.text)]
    ours = [words[1:] for words in shown if words[0] == "metaaugment"]
    assert ours
    for words in ours:
        cli.main(words)


def test_long_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to what they would do, which takes too long here."""
    shown = [words for block in BLOCKS if block.language == "sh" for words in commands(block.text)]
    assert len(understood(shown, monkeypatch)) == len(shown) > 5


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert target in targets


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The first table behind a heading, by the first cell of each row."""
    table = page.split(heading, 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]
    return {first: rest for first, *rest in cells}


def test_results_are_those_of_results_md() -> None:
    shown = rows(README, "\n## Results")
    measured = rows((ROOT / "RESULTS.md").read_text(), "\n## omniglot-wrn-40-2 (table-3)")
    assert {name: cells for name, cells in shown.items() if "±" in cells[0]} == {
        name: cells[:3] for name, cells in measured.items() if "±" in cells[0]
    }


def test_the_other_rows_are_those_of_results_md() -> None:
    results = (ROOT / "RESULTS.md").read_text()
    (first, (*rest, _)), _, *shown = rows(README, "In the other rows").items()
    entries = [first, *rest]
    assert {name for name, _ in shown} == set(re.findall(r"^## (\S+) \(", results, re.MULTILINE)) - {
        "omniglot-wrn-40-2"
    }
    for name, (*accuracies, seeds) in shown:
        measured = rows(results, f"\n## {name} (")
        assert accuracies == [measured[entry][0] if entry in measured else "–" for entry in entries]
        assert "–".join(sorted({measured[entry][1] for entry in entries if entry in measured})) == seeds
        both = [float(measured[entry][0].split(" ± ")[0]) for entry in ("randaugment", "metaaugment-fast")]
        assert 0.05 < abs(both[0] - both[1]) < 0.35  # "differ by 0.1 to 0.3 points"


def difference(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Of two means, with its standard error."""
    error = math.sqrt(sum(statistics.variance(group) / len(group) for group in (ours, theirs)))
    return statistics.fmean(ours) - statistics.fmean(theirs), error


def test_what_is_said_of_the_results_follows_from_them() -> None:
    found = results.read(ROOT / "results")["omniglot-wrn-40-2"]
    accuracies = {name: [100 * run.get("test_accuracy", math.nan) for run in runs] for name, runs in found.items()}
    ours, theirs, under = (accuracies[name] for name in ("metaaugment-fast", "randaugment", "transfer-wrn-40-2"))
    ahead, error = difference(ours, theirs)
    said = " ".join(README.split())
    assert f"is ahead of RandAugment by {ahead:.2f} ± {error:.2f} points (standard error)" in said
    below, its_error = difference(ours, under)
    assert f"it ends {below:.2f} ± {its_error:.2f} points (standard error) below joint training" in said
    assert abs(difference(under, theirs)[0]) < 0.05  # "level with RandAugment"
    for system in ("faa", "pba", "dada"):
        search = json.loads((ROOT / "results" / "searches" / f"omniglot-wrn-40-2-{system}.json").read_text())["search"]
        assert f"[{search['cost']['seconds'] / 60:.0f}](results/searches/omniglot-wrn-40-2-{system}.json)" in said
    assert 1 < ahead / error < 2  # "on the verge"
    for name in ("faa", "pba", "dada", "advaa"):  # "none of the four ends above uniform sampling"
        assert statistics.fmean(accuracies[name]) < statistics.fmean(theirs)
    uniform = accuracies["fast-epsilon-1"]
    assert f"{statistics.fmean(uniform):.2f} ± {statistics.stdev(uniform):.2f} (three seeds)" in said
    assert statistics.fmean(uniform) > statistics.fmean(ours)  # "as good"
    gains = []
    for row in ("omniglot-wrn-40-2", "omniglot-wrn-28-10"):
        mean = {
            name: statistics.fmean(100 * run.get("test_accuracy", math.nan) for run in runs)
            for name, runs in results.read(ROOT / "results")[row].items()
        }
        gains += [mean[name] - mean["baseline"] for name in ("metaaugment", "metaaugment-fast") if name in mean]
    assert f"gains {min(gains):.1f} to {max(gains):.1f} points over no augmentation" in said
    mean = {name: float(row[0].split(" ± ")[0]) for name, row in rows(README, "\n## Results").items() if "±" in row[0]}
    assert max(mean, key=mean.__getitem__) == "trivialaugment"


def test_the_modules_of_the_map_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", README.split("\n## Where to look", 1)[1])
    assert len(named) > 10
    for name in named:
        assert (ROOT / "metaaugment" / name).exists() or (ROOT / name).exists(), name


def test_files_it_points_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
