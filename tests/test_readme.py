"""What the README shows works, as it stands there."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from metaaugment.lab import cli
from metaaugment.lab.experiments import results

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


def test_what_the_commands_leave_in_a_clone_is_nothing_to_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page, the picture and the exported files were untracked files."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    cli.main(["train", "digits", "--epochs", "1", "--per-class", "20", "--size", "16", "--batch", "50"])
    run = "runs/digits-metaaugment-seed0"
    shown = re.findall(r"metaaugment ((?:report|export|ops --picture) [^`#\n]*)", README)
    assert {words.split()[0] for words in shown} == {"report", "export", "ops"}
    for words in shown:
        cli.main([run if word.startswith("runs/") else word for word in words.split()])
    status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert status.stdout.split() == ["??", ".gitignore"]


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
    for table in (shown, measured):
        table.pop("accuracy")  # the header
    assert len(measured) > 10
    assert shown == {name: cells[:3] for name, cells in measured.items()}


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


def test_the_figures_of_the_demo_are_those_of_their_file() -> None:
    accuracies = json.loads((ROOT / "results" / "digits" / "demo.json").read_text())["accuracies"]
    told = {name: results.spread([100 * one for one in values]) for name, values in accuracies.items()}
    assert rows(README, "`make demo` trains on")[told["baseline"]] == [told["randaugment"], told["metaaugment"]]


def figures(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["figures"]


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "Time and memory of one step"), ("docs/maths.md", "Cost of one step")]
)
def test_the_cost_of_a_step_is_that_of_its_file(page: str, heading: str) -> None:
    measured = {(figure["network"], figure["variant"]): figure for figure in figures("step-h200")}
    shown = rows((ROOT / page).read_text(), heading)
    memory = page == "README.md"
    for row, timed, weighed in (
        ("exact (Eq. 4 with a second backward pass)", "difference, exact, captured", "difference, exact"),
        ("`lagged=True`", "difference, lagged, captured", "difference, lagged"),
        ("`lagged=True, every=8`, on average", "difference, lagged, every 8, captured", None),
        ("double backward, not captured", "double backward, lagged", "double backward, lagged"),
    ):
        told = []
        for network in ("wrn-40-2", "wrn-28-10"):
            told.append(f"{measured[network, timed]['over_plain']:.2f}")
            told += [f"{measured[network, weighed]['memory_over_plain']:.2f}" if weighed else ""] if memory else []
        assert [cell for cell in shown[row] if cell] == [cell for cell in told if cell]


def test_the_speeds_of_the_image_functions_are_those_of_their_files() -> None:
    measured = {(f["device"], f["size"], f["n"], f["system"]): f for f in figures("ops-cpu") + figures("ops-h200")}
    shown = rows(README, "Images per second with two functions")
    for row, systems in {
        "**metaaugment**": ("metaaugment", "metaaugment, in a CUDA graph"),
        "Pillow, image by image (two processes)": ("Pillow, image by image", "Pillow, in two processes"),
        "torchvision v2, image by image, on Pillow images": ("torchvision v2 on Pillow",),
        "torchvision v2, image by image, on tensors": ("torchvision v2 on tensors",),
        "timm, image by image, on Pillow images": ("timm on Pillow",),
        "kornia, image by image": ("kornia",),
    }.items():
        for cell, place in zip(shown[row], (("cpu", 32, 512), ("cpu", 224, 64), ("cuda", 32, 4096)), strict=True):
            speeds = [measured[key]["images_per_second"] for system in systems if (key := (*place, system)) in measured]
            told = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", cell)]
            assert told == [pytest.approx(float(f"{speed:.3g}")) for speed in speeds]


def test_the_modules_of_the_map_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", README.split("\n## Where to look", 1)[1])
    assert len(named) > 10
    for name in named:
        assert (ROOT / "metaaugment" / name).exists() or (ROOT / name).exists(), name


def test_files_it_points_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
