"""What the README shows works, as it stands there."""

import json
import math
import re
import shutil
import statistics
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


def test_the_lead_where_augmentation_costs_accuracy_follows_from_its_file() -> None:
    accuracies: dict[str, list[float]] = {}
    for figure in sorted(figures("departures-cpu"), key=lambda figure: figure["seed"]):
        accuracies.setdefault(figure["variant"], []).append(100 * figure["accuracy"])
    plain, uniform, joint = (accuracies[name] for name in ("baseline", "randaugment", "metaaugment"))
    gains = [one - other for one, other in zip(joint, uniform, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5
    below = statistics.fmean(plain) - statistics.fmean(uniform)
    assert (
        f"RandAugment is {below:.2f} points below the baseline, and MetaAugment {statistics.fmean(gains):.2f} ± "
        f"{error:.2f} points (standard error) above RandAugment (five seeds,"
    ) in " ".join(README.split())


def of_the_demo(name: str) -> dict[str, str]:
    accuracies = json.loads((ROOT / "results" / "digits" / name).read_text())["accuracies"]
    percent = {name: [100 * one for one in values] for name, values in accuracies.items()}
    return {name: f"{statistics.fmean(each):.2f} ± {statistics.stdev(each):.2f}" for name, each in percent.items()}


def test_the_figures_of_the_demo_are_those_of_their_files() -> None:
    told, longer = of_the_demo("demo.json"), of_the_demo("demo-600-epochs.json")
    assert rows(README, "`make demo` trains on")[told["baseline"]] == [told["randaugment"], told["metaaugment"]]
    said = " ".join(README.split())
    assert f"three seeds gave {longer['metaaugment']} (MetaAugment) against {longer['randaugment']} (" in said


def test_how_sample_aware_the_example_is_follows_from_its_file() -> None:
    found = json.loads((ROOT / "results" / "examples" / "sample-aware.json").read_text())["figures"]
    assert [figure["seed"] for figure in found] == list(range(9))
    areas = [figure["sample_aware"] for figure in found]
    (chosen, others) = (f"{min(part):.2f} to {max(part):.2f}" for part in (areas[:3], areas[3:]))
    said = " ".join(README.split())
    assert f"AUC {chosen} on the three seeds of the test, and {others} on six seeds that were not used" in said


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


def test_the_costs_in_its_sentences_are_those_of_their_files() -> None:
    said = " ".join(README.split())
    training = {(f["recipe"], f["what"]): f["steps_seconds"] for f in figures("training-h200")}
    over = [
        f"{training[row, 'metaaugment lagged every 8'] / training[row, 'baseline']:.2f}"
        for row in ("omniglot-wrn-40-2", "omniglot-wrn-28-10")
    ]
    assert (
        "takes {} times as long per step as plain training with WRN-40-2 on one H200, and {} times with".format(*over)
        in said
    )
    assert "in whole trainings `every=8` takes {} and {})".format(*over) in said
    assert max(figure["steps_over_bare"] for figure in figures("training-h200")) < 1.05  # "at most 5 % longer"
    plain, joint = (
        next(f["images_per_second"] for f in figures("imagenet-h200") if (f["source"], f["what"]) == ("memory", what))
        for what in ("baseline", "lagged every 8")
    )
    assert f"trains on {joint:,.0f} images/s jointly, against {plain:,.0f} with plain training" in said
    _, policy, alone, _, swapped, swapped_alone = (f"{figure['over_plain']:.2f}" for figure in figures("transfer-h200"))
    assert f"from WRN-40-2 takes {policy} times as long as a plain step, and {alone} times" in said
    assert f"as in the paper, it takes {swapped} and {swapped_alone} times" in said
    least, most = sorted(f"{f['over_plain']:.2f}" for f in figures("step-h200") if "every 8" in f["variant"])
    assert f"{least} to {most} times a plain step on one H200" in " ".join((ROOT / "docs/loop.md").read_text().split())


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


def test_how_accurate_the_difference_is_follows_from_its_file() -> None:
    found = json.loads((ROOT / "results" / "bench" / "step-length-h200.json").read_text())
    moments = ("start", *(moment for moment in found if moment not in ("settings", "start", "end")), "end")

    def told(route: str, precision: str) -> list[float]:
        return [found[moment][f"{precision} the route {route}"]["lowest correlation"] for moment in moments]

    decisions = " ".join((ROOT / "docs/decisions.md").read_text().split())
    for precision, said in (
        ("float32", "0.9985, 0.99998, 0.99997 in float32"), ("tf32", "0.61, 0.9991, 0.9986 in tf32"),
        ("bf16", "0.30, 0.992, 0.988 under bf16"),
    ):  # fmt: skip
        assert said in decisions
        for number, correlation in zip(
            re.findall(r"[\d.]+(?=[, ])", said), told("difference", precision), strict=False
        ):
            assert float(number) == round(correlation, len(number) - 2)
    _, midway, end = told("forward", "bf16")
    assert f"({midway:.4f} and {end:.4f} with `forward`)" in " ".join(README.split())
    assert f"under bf16 even `forward` reaches only {told('forward', 'bf16')[0]:.2f}." in " ".join(README.split())


def test_the_modules_of_the_map_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", README.split("\n## Where to look", 1)[1])
    assert len(named) > 10
    for name in named:
        assert (ROOT / "metaaugment" / name).exists() or (ROOT / name).exists(), name


def test_files_it_points_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
