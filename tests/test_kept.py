"""Files of an earlier version are read, continued and reported as that version itself did.

`kept/files.zip` was written by the program at commit 26f0c2a, and `kept/expected.json` is what that commit's code made
of these files. So that they shrink to little, networks and policies of the runs began with all but a few channels and
hidden units at zero, where training leaves them, and locks and spare checkpoints are left out, as is the checkpoint of
runs/trivialaugment; everything else is as users have it:

    runs/finished, runs/stopped                digits, jointly trained, to the end and to the middle of its third epoch
    runs/randaugment, runs/trivialaugment      what they are compared with
    policy, p, network .safetensors            exported from runs/finished: the policy, its p alone, and the network
    searches/finished, searches/stopped        of AutoAugment, with three children and with two of them
    learner.pt                                 a learner and its loop in the middle of an epoch, by torch.save

Numbers that a network computed differ in their last digits from one processor to another, which training amplifies;
they have a tolerance of several times as much. Everything else is exact.
"""

import hashlib
import html
import itertools
import json
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import metaaugment as ma

from commands import program
from endings import timeless

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "kept" / "expected.json").read_text())
DIGITS = ("train", "digits", "--device", "cpu")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with zipfile.ZipFile(HERE / "kept" / "files.zip") as archive:
        archive.extractall(folder)
    return folder


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def rows(file: Path) -> list[dict[str, Any]]:
    """Without their times."""
    return [timeless(json.loads(line)) for line in file.read_text().splitlines()]


def digits() -> tuple[Tensor, Tensor]:
    """The test images of the runs, which are eight pixels wide, and their labels."""
    split = ma.dataset("digits", size=8).test
    return split.images, split.labels


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The values of a tree of dictionaries and lists, by their places."""
    if not isinstance(tree, dict | list):
        return {path: tree}
    within = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {place: leaf for name, value in within for place, leaf in leaves(value, f"{path}/{name}").items()}


def holds(new: Any, old: Any) -> bool:
    """Whether a tree has all that an older one has; a later version may say more, as of settings that it added."""
    return leaves(old).items() <= leaves(new).items()


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=tolerance, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def assert_alike(row: dict[str, Any], other: dict[str, Any]) -> None:
    """A row of a log as another processor may have it; a later version may say more."""
    absolute = {"train_loss": 1e-4, "val_loss": 1e-4, "train_accuracy": 0.02, "val_accuracy": 0.02}
    found = leaves(row)
    for place, value in leaves(other).items():
        name = place.split("/")[1]
        tolerance = {"abs": absolute[name]} if name in absolute else {"rel": 2e-3}
        assert found[place] == pytest.approx(value, **tolerance), place


def figures(text: str) -> Counter[str]:
    """How often each number with a decimal point is said; version numbers, with two of them, are none."""
    return Counter(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", text))


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder, but for its lock."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# -- what was exported ------------------------------------------------------------------------------------------------


def effect(file: Path) -> dict[str, Any]:
    """What a policy file makes of digits."""
    policy = ma.LearnedPolicy.load(file)
    images, weights = policy.augment(digits()[0][:64], generator=torch.Generator().manual_seed(7))
    sha256 = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    return {"digest": policy.digest(), "images": sha256, "weights": weights.tolist()}


@pytest.mark.parametrize("name", ["policy", "p"])
def test_a_policy_augments_and_weighs_as_it_did(
    name: str, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, expected = kept / f"{name}.safetensors", EXPECTED[name]
    found = effect(file)
    assert all(found[key] == expected[key] for key in ("digest", "images"))
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    provenance, result = ma.LearnedPolicy.load(file).provenance, read(kept / "runs" / "finished" / "result.json")
    assert provenance["epoch"] == result["epochs"]
    assert all(provenance[key] == result[key] for key in provenance.keys() - {"epoch", "data"})
    assert provenance["data"] == result["data"]["fingerprint"]
    ma.LearnedPolicy.load(file).save(tmp_path / "again.safetensors")
    assert effect(tmp_path / "again.safetensors") == found
    assert program("inspect", file) == 0
    said = capsys.readouterr().out
    assert not Counter(expected["inspect"]) - figures(said)
    assert provenance["commit"] in said


def about(network: Path) -> dict[str, Any]:
    """What an exported network says of itself beside its weights."""
    with safe_open(network, "pt") as content:
        return {name: json.loads(value) for name, value in content.metadata().items()}


def recognised(file: Path) -> Tensor:
    """The logits of an exported network for the test images, by nothing but what its file says."""
    said = about(file)
    network = ma.network(said["network"], said["num_classes"], said["channels"])
    network.load_state_dict(load_file(file))
    mean, std = (torch.tensor(said[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        return network.eval()((digits()[0] / 255 - mean) / std)


def test_a_network_recognises_what_it_did(kept: Path, tmp_path: Path) -> None:
    """One that was exported then, and one that is exported now, by a run of another method."""
    assert program("export", kept / "runs" / "randaugment", tmp_path / "network.safetensors", "--network") == 0
    for folder, method in ((kept, "finished"), (tmp_path, "randaugment")):
        logits, result = recognised(folder / "network.safetensors"), read(kept / "runs" / method / "result.json")
        accuracy = float((logits.argmax(1) == digits()[1]).double().mean())
        assert accuracy == pytest.approx(result["test_accuracy"], abs=2 / 597)
        loss = float(nn.functional.cross_entropy(logits, digits()[1]))
        assert loss == pytest.approx(result["test_loss"], abs=1e-5)
        torch.testing.assert_close(logits[:8], torch.tensor(EXPECTED["logits"][method]), atol=1e-5, rtol=0)


def begun_with(kept: Path, out: Path) -> dict[str, Any]:
    """An epoch under the policy, of a network that begins with the weights that were exported."""
    given = ("--policy", kept / "policy.safetensors", "--pretrained", kept / "network.safetensors")
    small = ("--size", 8, "--per-class", 20, "--batch", 20, "--epochs", 1)
    assert program(*DIGITS, *given, *small, "--lr", 0.01, "--out", out) == 0
    (row,) = rows(out / "log.jsonl")
    return {name: value for name, value in row.items() if name != "probabilities"}


def test_another_run_begins_with_them_as_it_did(kept: Path, tmp_path: Path) -> None:
    assert_alike(begun_with(kept, tmp_path / "run"), EXPECTED["begun with"])
    assert EXPECTED["policy"]["digest"].startswith(read(tmp_path / "run" / "result.json")["policy_sha256"])


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_stopped_run_ends_where_it_would_have_ended(kept: Path, tmp_path: Path) -> None:
    """Within a few roundings of the run that the earlier version trained without a stop."""
    whole, out = kept / "runs" / "finished", tmp_path / "run"
    shutil.copytree(kept / "runs" / "stopped", out)
    stood = read(out / "checkpoint.json")
    assert (stood["epoch"], stood["step"]) == (2, 5)
    assert program(*DIGITS, "--resume", out) == 0
    resumed, wanted = rows(out / "log.jsonl"), rows(whole / "log.jsonl")
    assert resumed[:2] == wanted[:2]
    for row, other in zip(resumed, wanted, strict=True):
        assert_alike(row, other)
    result, before = timeless(read(out / "result.json")), timeless(read(whole / "result.json"))
    for key in before.keys() - {"machine", "test_accuracy", "test_top5", "test_loss", "val_accuracy"}:
        assert holds(result[key], before[key]), key
    assert result["test_loss"] == pytest.approx(before["test_loss"], abs=1e-4)
    assert result["test_accuracy"] == pytest.approx(before["test_accuracy"], abs=3 / 597)
    assert read(out / "result.json")["commit"][0] == read(whole / "result.json")["commit"]  # and then of this version
    for what, tolerance in (("policy", 1e-3), ("network", 1e-4)):
        file = tmp_path / f"{what}.safetensors"
        assert program("export", out, file, *(("--network",) if what == "network" else ())) == 0
        assert_close(load_file(file), load_file(kept / file.name), tolerance)


def test_a_finished_run_stays_as_it_is_and_is_exported_as_it_was(kept: Path, tmp_path: Path) -> None:
    """Bit for bit: nothing is computed."""
    run = kept / "runs" / "finished"
    before = hashes(run)
    for method in ("finished", "randaugment"):
        assert program(*DIGITS, "--resume", kept / "runs" / method) == 0
    for name, flags in {"policy": (), "p": ("--sampler-only",), "network": ("--network",)}.items():
        file = tmp_path / f"{name}.safetensors"
        assert program("export", run, file, *flags) == 0
        assert_close(load_file(file), load_file(kept / file.name), 0)
        if name != "network":
            one, other = ma.LearnedPolicy.load(file), ma.LearnedPolicy.load(kept / file.name)
            assert one.digest() == other.digest()
            assert holds(one.provenance, other.provenance)
        else:
            assert holds(about(file), about(kept / file.name))
    assert hashes(run) == before


def reported(runs: Path, page: Path) -> Counter[str]:
    """The figures on the page of a report, but for those within pictures."""
    assert program("report", runs, "--out", page) == 0
    text = re.sub(r"(?s)<(script|style|svg).*?</\1>|<[^>]+>", " ", page.read_text())
    return figures(html.unescape(text))


def test_a_report_has_all_figures_that_it_had(kept: Path, tmp_path: Path) -> None:
    """Of runs, of what their policies learned, of the samples that they saw, and of a diagnosis."""
    found = reported(kept / "runs", tmp_path / "report.html")
    assert not Counter(EXPECTED["report"]) - found
    for method in ("finished", "randaugment", "trivialaugment"):
        result = read(kept / "runs" / method / "result.json")
        assert found[f"{100 * result['test_accuracy']:.2f}"], method


def test_a_diagnosis_finds_what_it_found(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "runs" / "finished", tmp_path / "run")
    before = leaves(read(tmp_path / "run" / "diagnosis.json"))
    (tmp_path / "run" / "diagnosis.json").unlink()
    assert program("diagnose", tmp_path / "run", "--samples", 200, "--device", "cpu") == 0
    found = leaves(read(tmp_path / "run" / "diagnosis.json"))
    for place in before.keys() - {"/verdict"}:
        # The networks that predict stop at one of several epochs, and roundings may decide at which.
        tolerance = 0.05 if place.startswith("/predicted") else 0.005
        assert found[place] == pytest.approx(before[place], abs=tolerance), place


# -- searches ---------------------------------------------------------------------------------------------------------


def test_a_stopped_search_finds_what_it_would_have_found(kept: Path, tmp_path: Path) -> None:
    whole, out = kept / "searches" / "finished", tmp_path / "search"
    shutil.copytree(kept / "searches" / "stopped", out)
    assert len(rows(out / "trials.jsonl")) == 2
    assert program("search", "autoaugment", "digits", "--device", "cpu", "--resume", out) == 0
    trials, wanted = rows(out / "trials.jsonl"), rows(whole / "trials.jsonl")
    assert leaves(trials) == pytest.approx(leaves(wanted), abs=0.02)
    found, before = read(out / "policy.json"), read(whole / "policy.json")
    assert {**found, "search": None} == {**before, "search": None}
    assert holds(found["search"]["recipe"], before["search"]["recipe"])


# -- a loop of one's own ----------------------------------------------------------------------------------------------


class Loop:
    """Joint training without the program. In float64, where roundings hardly count."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        self.generator = torch.Generator().manual_seed(1)
        self.learner = ma.Learner(
            network.double(), ma.TransformationSampler(window=3), ma.PolicyNetwork(4, hidden=4).double(),
            generator=self.generator, alpha=0.5,
        )  # fmt: skip
        self.task = torch.optim.SGD(network.parameters(), 0.5, momentum=0.9)
        self.policy = torch.optim.Adam(self.learner.policy_parameters(), 0.05)

    def go(self, first: int, last: int) -> Iterator[list[float]]:
        """Losses and weights of these steps, of which four are an epoch, and then p."""
        images, labels = digits()
        validation = itertools.repeat((images[-50:], labels[-50:]))
        for step in range(first, last):
            batch = slice(16 * step, 16 * step + 16)
            seen = self.learner.step(images[batch], labels[batch], self.task, self.policy, validation)
            yield [*seen.losses.tolist(), *seen.weights.tolist()]
            if step % 4 == 3:
                self.learner.sampler.update()
        yield self.learner.sampler.probabilities.sum(0).tolist()

    def state(self) -> dict[str, Any]:
        parts = {"learner": self.learner, "network": self.learner.network, "task": self.task, "policy": self.policy}
        return {name: part.state_dict() for name, part in parts.items()} | {"draws": self.generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in {"network": self.learner.network, "learner": self.learner}.items():
            part.load_state_dict(state[name])
        self.task.load_state_dict(state["task"])
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["draws"])


def test_a_learner_goes_on_as_it_would_have(kept: Path) -> None:
    """Also before an epoch has ended, when its sampler has counted what its p does not show yet."""
    loop = Loop()
    loop.load(torch.load(kept / "learner.pt"))
    assert loop.learner.steps == 6
    assert leaves(list(loop.go(6, 12))) == pytest.approx(leaves(EXPECTED["learner"]), rel=1e-7)
