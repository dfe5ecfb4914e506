"""`metaaugment train`, `recipes` and `data` as their users meet them."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import metaaugment as ma
from metaaugment import OPS
from metaaugment.files import sealed
from metaaugment.lab.baselines import published
from metaaugment.lab.data import augment, omniglot
from metaaugment.lab.data.files import ImageFiles
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.report import photos
from metaaugment.lab.training import progress
from metaaugment.lab.words import duration

from commands import Captured, program, refused
from trees import use_cifar, write_cifar10, write_folder, write_omniglot

QUICK = ("--size", "16", "--per-class", "20", "--batch", "50", "--epochs", "1")


def log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# -- what works -------------------------------------------------------------------------------------------------------


def test_the_first_line_says_what_is_trained(tmp_path: Path, capsys: Captured) -> None:
    assert program("train", "digits", *QUICK, "--every", "2", "--out", tmp_path / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "digits: metaaugment on the CPU; digits, 200 / 100 / 597 images in 10 classes; small-cnn"
    )
    assert re.match(r"epoch 1/1  loss \d\.\d{4}  validation \d+\.\d\d%  [\d,]+ images/s  0 s left", lines[3])
    assert re.match(r"test accuracy \d+\.\d\d% after 1 epoch in", lines[-1])


@pytest.mark.parametrize("name", ["y[/red]", "[bold]x[/bold]", ":smile:"])
def test_a_folder_may_be_called_what_it_will(name: str, tmp_path: Path, capsys: Captured) -> None:
    """One was a traceback, the others were named without their brackets."""
    assert program("train", "digits", *QUICK, "--method", "baseline", "--out", tmp_path / name) == 0
    said = capsys.readouterr().out
    assert f"into {tmp_path / name}" in said
    assert f"; {tmp_path / name / 'result.json'}" in said
    assert program("train", "digits", "--resume", tmp_path / name) == 0
    assert f"{tmp_path / name} is finished already." in capsys.readouterr().out


def test_the_last_lines_say_what_to_worry_about(tmp_path: Path, capsys: Captured) -> None:
    """A run on Omniglot whose weights had collapsed ended at 22 %, and not a word was said of why."""
    frozen = ("train", "digits", *QUICK, "--policy-lr", "0", "--out", tmp_path / "frozen")
    assert program(*frozen) == 0
    *_, accuracy, worry = capsys.readouterr().out.splitlines()
    assert accuracy.startswith("test accuracy")
    assert worry.startswith("Policy idle: it was never updated")
    assert worry.endswith("; --policy-lr is 0.")


@pytest.mark.parametrize("method", ["baseline", "randaugment", "trivialaugment", "metaaugment"])
def test_cifar_10_at_reduced_size(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's recipe, with fewer images, a smaller network and two epochs."""
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path / "data", records=40))
    reduced = ("--network", "small-cnn", "--epochs", "2", "--batch", "60", "--data", tmp_path / "data")
    assert program("train", "cifar10-wrn-40-2", *reduced, "--method", method, "--out", tmp_path / "run") == 0
    assert [row["epoch"] for row in log(tmp_path / "run")] == [1, 2]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"] | {"fingerprint": ""} == {"train": 180, "val": 20, "test": 20, "fingerprint": ""}
    moved = log(tmp_path / "run")[-1]["alpha"] != pytest.approx(0.1)
    assert moved == (method == "metaaugment")


def test_omniglot_with_its_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omniglot, "OMNIGLOT", write_omniglot(tmp_path / "data"))
    assert program("train", "omniglot-wrn-40-2", "--data", tmp_path / "data", "--epochs", "2", "--size", "16",
                   "--batch", "25", "--out", tmp_path / "run") == 0  # fmt: skip
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"] | {"fingerprint": ""} == {"train": 75, "val": 10, "test": 15, "fingerprint": ""}
    assert result["recipe"]["network"] == "wrn-40-2"


FOLDER = ("--network", "small-cnn", "--size", "32", "--batch", "8", "--epochs", "2", "--every", "2", "--workers", "0")


def test_the_policy_learns_from_validation_images_as_evaluation_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from random parts of them, as training images are seen."""
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20, "owl": 20}, side=48)
    backward, learned_from = ma.Learner.policy_backward, set[bytes]()

    def watched(learner: ma.Learner, seen: ma.Observation, images: torch.Tensor, labels: torch.Tensor) -> None:
        learned_from.update(image.numpy().tobytes() for image in images)
        backward(learner, seen, images, labels)

    monkeypatch.setattr(ma.Learner, "policy_backward", watched)
    assert program("train", "folder", "--data", root, *FOLDER, "--out", tmp_path / "run") == 0
    val = ma.dataset("folder", root, size=32).val
    assert isinstance(val, ImageFiles)
    assert learned_from == {val.image(place).numpy().tobytes() for place in range(len(val))}


def watched(patch: pytest.MonkeyPatch, channels: int = 3) -> set[bytes]:
    """The images that networks see from now on."""
    normalization, seen = augment.normalization, set[bytes]()

    def watching(*args: Any) -> augment.Augmentation:
        prepare = normalization(*args)

        def watch(images: torch.Tensor) -> torch.Tensor:
            seen.update(image[:channels].numpy().tobytes() for image in images)
            return prepare(images)

        return watch

    patch.setattr(augment, "normalization", watching)
    return seen


def test_with_an_area_of_1_a_run_sees_whole_images_from_training_to_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digits became unrecognizable, in every method: of each file only a part was ever seen."""
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20, "owl": 20})
    seen = watched(monkeypatch)
    flags = ("--method", "baseline", "--area-min", 1, "--no-flip", "--out", tmp_path / "run")
    assert program("train", "folder", "--data", root, *FOLDER, *flags) == 0
    whole = {
        np.asarray(Image.open(file).resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1).tobytes()
        for file in root.glob("*/*.png")
    }
    assert seen <= whole
    assert len(seen) > 0.8 * len(whole)  # an epoch leaves out training images that do not fill a mini-batch


def test_the_part_that_is_seen_belongs_to_a_run(tmp_path: Path, capsys: Captured) -> None:
    """A run of before the setting is one of 8 % and more."""
    root, out = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20}), tmp_path / "run"
    assert program("train", "folder", "--data", root, *FOLDER, "--method", "baseline", "--out", out) == 0
    again = ("train", "folder", "--data", root, "--workers", 0, "--resume", out)
    values = json.loads((out / "recipe.json").read_text())
    assert values.pop("area_min") == 0.08
    (out / "recipe.json").write_text(json.dumps(values))
    assert "--area-min is 1.0, but" in refused(capsys, *again, "--area-min", 1)
    assert program(*again) == 0
    assert program(*again, "--area-min", 0.08) == 0
    network = tmp_path / "network.safetensors"
    assert program("export", out, network, "--network") == 0
    with safe_open(network, "pt") as opened:
        assert opened.metadata()["area_min"] == "0.08"


def test_show_sees_pictures_as_the_run_did_that_learned_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, shown = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20}), []
    monkeypatch.setattr(photos, "copies", lambda images, *_: shown.append(images) or Figure())
    for area_min in (0.08, 1.0):
        out, file = tmp_path / f"run{area_min}", tmp_path / f"{area_min}.safetensors"
        assert program("train", "folder", "--data", root, *FOLDER, "--area-min", area_min, "--out", out) == 0
        assert program("export", out, file) == 0
        assert program("show", file, root / "cat" / "000.png", "--out", tmp_path / f"{area_min}.png") == 0
        val = ma.dataset("folder", root, size=32, area_min=area_min).val
        assert isinstance(val, ImageFiles)
        assert torch.equal(shown[-1][0], replace(val, names=("cat/000.png",)).image(0))
    assert not torch.equal(*shown)


def test_a_run_of_12_bits_says_which_white_keeps_their_levels(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it, every view has the levels of the images, up to those that a policy is shown on."""
    levels = np.random.default_rng(0).integers(0, 256, (40, 32, 32))
    for place, image in enumerate(levels):
        file = tmp_path / "mine" / "ab"[place % 2] / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((16 * image + 15).astype(np.uint16)).save(file)
    folder = ("train", "folder", "--data", tmp_path / "mine", *FOLDER, "--area-min", 1, "--no-flip")
    assert program(*folder, "--method", "baseline", "--out", tmp_path / "dim") == 0
    output = capsys.readouterr().out
    assert "is 4095, where 65535 is white: 16 of 256 levels are left" in output
    assert "begin anew with --white 4095" in output
    assert "--white is 4095, but" in refused(capsys, *folder, "--white", 4095, "--resume", tmp_path / "dim")
    assert "--white is 2047; " in refused(capsys, *folder, "--white", 2047, "--out", tmp_path / "low")
    with monkeypatch.context() as patch:
        seen = watched(patch, channels=1)
        assert program(*folder, "--white", 4095, "--method", "baseline", "--out", tmp_path / "bright") == 0
    assert "levels" not in capsys.readouterr().out
    assert seen <= {image.astype(np.uint8).tobytes() for image in levels}
    pictures = []
    monkeypatch.setattr(photos, "copies", lambda images, *_: pictures.append(images) or Figure())
    assert program(*folder, "--white", 4095, "--out", tmp_path / "run") == 0
    assert program("export", tmp_path / "run", tmp_path / "p.safetensors") == 0
    assert program("show", tmp_path / "p.safetensors", tmp_path / "mine/a/0.png", "--out", tmp_path / "p.png") == 0
    assert np.array_equal(pictures[0][0, 0], levels[0])


def test_a_run_says_what_every_image_goes_through_and_what_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20})
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path))
    cifar = ("cifar10-wrn-40-2", "--data", tmp_path, "--network", "small-cnn", "--batch", 10, "--epochs", 1)
    for number, (flags, said, unsaid) in enumerate((
        (("folder", "--data", root, *FOLDER), "8 to 100 % of its area, at 32 × 32, flipped", "padded"),
        (("folder", "--data", root, *FOLDER), "(turned off by --area-min 1 --no-flip); evaluation: the middle", "crop"),
        (("folder", "--data", root, *FOLDER, "--area-min", 1, "--no-flip"), "all of it, at 32 × 32;", "turned off"),
        (cifar, "flipped left and right half of the time, padded by 4 pixels", "area"),
        ((*cifar, "--no-flip", "--baseline-crop", 0), "image: as it is; evaluation: the whole image", "turned off"),
        ((*cifar, "--area-min", 1), "--area-min has no effect: only --dataset imagenet and folder are read", "% of"),
    )):  # fmt: skip
        out = tmp_path / str(number)
        assert program("train", *flags, "--method", "baseline", "--device", "cpu", "--out", out) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert said in output
        assert unsaid not in output.split("each training image: ")[1].split(" evaluation: ")[0]


def test_a_corrupt_image_is_named_or_skipped_and_counted(tmp_path: Path, capsys: Captured) -> None:
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20})
    broken = [root / "cat" / "003.png", root / "dog" / "007.png"]
    for file in broken:
        file.write_bytes(file.read_bytes()[:100])
    sentence = refused(capsys, "train", "folder", "--data", root, *FOLDER, "--out", tmp_path / "error")
    assert any(str(file) in sentence for file in broken)
    command = shlex.split(sentence.split("with: metaaugment ")[1])
    assert command[-2:] == ["--resume", str(tmp_path / "error")]
    assert program(*command) == 0, "what it advises works"
    capsys.readouterr()
    assert program("train", "folder", "--data", root, *FOLDER, "--corrupt", "skip", "--out", tmp_path / "run") == 0
    assert "skipped 2 image files that could not be read" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["unreadable_files"] == 2
    named = (tmp_path / "run" / "unreadable.txt").read_text().splitlines()
    assert len(named) == 2
    assert all(Path(file).exists() for file in named)


def test_what_could_not_be_read_is_not_forgotten_when_a_run_goes_on(tmp_path: Path, capsys: Captured) -> None:
    """Of the files that an earlier process had skipped, a run that was continued after its last epoch counted none."""
    counts = {f"{part}/{name}": n for part, n in (("train", 12), ("val", 4), ("test", 4)) for name in ("cat", "dog")}
    root, out = write_folder(tmp_path / "mine", counts), tmp_path / "run"
    broken = [root / part / "cat" / "001.png" for part in ("train", "val", "test")]
    for file in broken:
        file.write_bytes(b"no image at all")
    assert program("train", "folder", "--data", root, *FOLDER, "--corrupt", "skip", "--out", out) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["unreadable_files"] == 3

    def again(data: Path) -> list[str]:
        (out / "result.json").unlink()
        (out / "unreadable.txt").unlink()
        assert program("train", "folder", "--data", data, "--workers", 0, "--corrupt", "skip", "--resume", out) == 0
        assert json.loads((out / "result.json").read_text())["test_accuracy"] == result["test_accuracy"]
        return (out / "unreadable.txt").read_text().splitlines()

    assert sorted(again(root)) == sorted(map(str, broken))
    assert "skipped 3 image files that could not be read" in capsys.readouterr().out
    moved = root.rename(tmp_path / "moved")
    assert sorted(again(moved)) == sorted(str(moved / file.relative_to(root)) for file in broken)
    state = sealed.load(out / "checkpoint.safetensors", "checkpoint")
    del state["unreadable"]
    sealed.save(out / "checkpoint.safetensors", "checkpoint", state)
    assert again(moved) == [str(moved / "test" / "cat" / "001.png")], "all that an older checkpoint lets it know"


@pytest.mark.skipif(sys.platform == "darwin", reason="whose file names are text")
def test_an_unreadable_file_may_have_a_name_that_is_no_text(tmp_path: Path, capsys: Captured) -> None:
    """A run ended without its result when the list of such files was written."""
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20})
    names = [os.fsencode(root / "cat") + b"/caf\xe9.png", os.fsencode(root / "dog") + b"/\xff\xfe.png"]
    for name in names:
        Path(os.fsdecode(name)).write_bytes(b"no image at all")
    sentence = refused(capsys, "train", "folder", "--data", root, *FOLDER, "--out", tmp_path / "error")
    assert "cannot be read as an image" in sentence
    assert program("train", "folder", "--data", root, *FOLDER, "--corrupt", "skip", "--out", tmp_path / "run") == 0
    assert "skipped 2 image files" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["unreadable_files"] == 2
    assert sorted((tmp_path / "run" / "unreadable.txt").read_bytes().splitlines()) == sorted(names)


def test_a_file_may_be_called_what_it_will(policy: Path, tmp_path: Path, capsys: Captured) -> None:
    """Sentences were put together by cutting others at "; remove it", and at the first semicolon there is."""
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20})
    for file in (root / "cat").iterdir():
        file.rename(file.with_name(f"a; remove it; {file.name}")).write_bytes(b"no image at all")
    why = rf"metaaugment: {root}/cat/a; remove it; 0\d\d\.png cannot be read as an image \(not in a format [\w\s,]+\)"
    broken = min((root / "cat").iterdir())
    assert re.match(f"{why}; leave it out$", refused(capsys, "show", policy, broken, "--out", tmp_path / "grid.png"))
    flags = ("--data", root, *FOLDER, "--out", tmp_path / "out")
    assert re.match(f"{why}; leave it out .*with: metaaugment train", refused(capsys, "train", "folder", *flags))
    flags = ("--data", root, *FOLDER, "--out", tmp_path / "search")
    sentence = refused(capsys, "search", "dada", "folder", *flags)
    assert re.match(f"{why}; leave it out .*with: metaaugment search", sentence)


def test_only_a_policy_that_is_learned_needs_more_training_than_validation_images(
    policy: Path, tmp_path: Path, capsys: Captured
) -> None:
    """What learns none was refused too, and a folder of images even before it was known what for."""
    few = ("train", "digits", "--per-class", "5", "--batch", "10", "--epochs", "1")
    sentence = "the validation split has 100 images and the training split only 50; to learn a policy, train on more"
    assert sentence in refused(capsys, *few, "--out", tmp_path / "learned")
    for more in (("--method", "randaugment"), ("--policy", policy)):
        assert program(*few, *more, "--out", tmp_path / more[0]) == 0
    parts = {f"{part}/{name}": n for part, n in (("train", 5), ("val", 9), ("test", 3)) for name in ("cat", "dog")}
    root = write_folder(tmp_path / "mine", parts)
    folder = ("train", "folder", "--data", root, *FOLDER)
    assert "has 18 images and the training split only 10" in refused(capsys, *folder, "--out", tmp_path / "learned")
    assert program(*folder, "--method", "baseline", "--out", tmp_path / "folder") == 0
    data = json.loads((tmp_path / "folder" / "result.json").read_text())["data"]
    assert (data["train"], data["val"]) == (10, 18)


def test_tails_of_ones_own(tmp_path: Path, capsys: Captured) -> None:
    """Classes that only the training images have, others with one validation image, and fewer images of each class:
    each of these was refused, and so was the way out that was named."""
    heads = {f"{part}/{name}": n for part, n in (("train", 12), ("val", 4), ("test", 3)) for name in ("b", "d")}
    tail = {"train/a": 1, "train/c": 2, "train/e": 3, "val/c": 1, "val/e": 1, "test/c": 1}
    root = write_folder(tmp_path / "mine", heads | tail)
    flags = ("train", "folder", "--data", root, *FOLDER, "--held-back", "0.5")
    assert program(*flags, "--per-class", "5", "--out", tmp_path / "run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "16 / 5 / 5 images in 5 classes" in said
    assert "val has no images of class a; test has no images of class a, e; at most 5 training images" in said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data"]["val"] == 5
    allowed = "it must be 1 to 12, the size of the largest class"
    flags = (*flags, "--out", tmp_path / "none")
    assert f": --per-class is 13; {allowed}" in refused(capsys, *flags, "--per-class", "13")
    assert ": --size is 4; images of folder have 8 to" in refused(capsys, *flags, "--size", "4")


def test_pretrained_weights(tmp_path: Path, capsys: Captured) -> None:
    """With a learning rate of zero the network stays what it began with; other classes get a fresh last layer."""
    for classes in (10, 7):
        network = ma.network("small-cnn", classes)
        save_file(
            {name: value.contiguous() for name, value in network.state_dict().items()}, tmp_path / "w.safetensors"
        )
        out = tmp_path / str(classes)
        assert program("train", "digits", *QUICK, "--method", "baseline", "--lr", "0", "--weight-decay", "0",
                       "--pretrained", tmp_path / "w.safetensors", "--out", out) == 0  # fmt: skip
        state = sealed.load(out / "checkpoint.safetensors", "checkpoint")["network"]
        assert torch.equal(state["body.0.weight"], network.state_dict()["body.0.weight"])
        kept = state["output.weight"].shape == network.output.weight.shape
        assert kept == (classes == 10)
        assert ("its last layer is for other classes" in capsys.readouterr().out) == (classes == 7)


def test_pretrained_weights_are_needed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A run that goes on may name them as before, from the same folder, or from anywhere not at all."""
    monkeypatch.chdir(tmp_path)
    save_file(dict(ma.network("small-cnn", 7).state_dict()), "w.safetensors")
    assert program("train", "digits", *QUICK, "--pretrained", "w.safetensors", "--out", "run") == 0
    Path("run/result.json").unlink()
    capsys.readouterr()
    assert program("train", "digits", "--device", "cpu", "--pretrained", "w.safetensors", "--resume", "run") == 0
    assert "its last layer" not in capsys.readouterr().out  # which the checkpoint has
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("../run/result.json").unlink()
    assert program("train", "digits", "--device", "cpu", "--pretrained", "../w.safetensors", "--resume", "../run") == 0
    Path("../run/result.json").unlink()
    Path("../w.safetensors").unlink()
    assert program("train", "digits", "--device", "cpu", "--resume", tmp_path / "run") == 0
    assert program("diagnose", tmp_path / "run", "--samples", "256", "--device", "cpu") == 0


def test_the_command_that_goes_on_says_all_that_was_said_of_the_place(tmp_path: Path) -> None:
    """Read by the parser of the program it is the same place; --tensorboard and --no-capture were left out."""
    place = Place(
        tmp_path, None, tmp_path / "run", "cpu", "float64", deterministic=True, capture=False, workers=3,
        threads=2, corrupt="skip", tensorboard=True,
    )  # fmt: skip
    assert all(getattr(place, field.name) != field.default for field in fields(Place) if field.name != "out")
    words = shlex.split(place.command("digits", tmp_path / "run"))
    assert words[:3] == ["metaaugment", "train", "digits"]
    assert tyro.cli(Place, args=words[3:]) == place


@pytest.mark.parametrize(
    ("command", "names"),
    [("recipes", [*RECIPES]), ("bench", ["ops", "step", "transfer"]), ("ops", [op.name for op in OPS]),
     ("data", ["digits", "cifar10", "cifar100", "omniglot", "imagenet"])],
)  # fmt: skip
def test_lists_are_plain_names_where_there_is_no_terminal(
    command: str, names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Also where colors are asked for; on a terminal, each name is explained."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert program(command) == 0
    assert capsys.readouterr().out.splitlines() == names
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert program(command) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert shown.splitlines() != names


def test_data_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """On a terminal: a line on each, and one on how to get it."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path))
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(b"x")
    assert program("data", "--data", tmp_path) == 0
    said = re.sub(r"\n +", "  ", capsys.readouterr().out)
    lines = {line.split("  ")[0]: line.split("  ")[1:] for line in said.splitlines()}
    assert lines["digits"][0] == "complete"
    assert lines["cifar10"] == ["complete", str(tmp_path / "cifar-10-batches-bin")]
    assert lines["cifar100"][0].startswith("incomplete: ")
    assert lines["omniglot"][0] == "missing"
    assert "metaaugment data get omniglot" in lines["omniglot"][-1]


def test_a_flag_with_its_usual_value_is_no_less_said(tmp_path: Path, capsys: Captured) -> None:
    usual = RECIPES["digits"]()
    assert program("train", "digits", *QUICK, "--flip", "--out", tmp_path / "run") == 0
    again = ("train", "digits", "--resume", tmp_path / "run")
    said = refused(capsys, *again, "--epochs", usual.epochs)
    assert f"--epochs is {usual.epochs}, but {tmp_path / 'run'} was begun with 1; leave out the flag" in said
    assert "--flip is False, but" in refused(capsys, *again, "--no-flip")
    assert "--per-class is None, but" in refused(capsys, *again, "--per-class=None")
    assert program(*again, "--epochs", 1, "--flip") == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min")]
)
def test_durations_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_long_loop_says_how_far_it_is_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps of ten seconds each."""
    passed, said = 0.0, io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: passed)
    for _ in progress.counted(Console(file=said, width=120))(range(12), "passes"):
        passed += 10
    assert said.getvalue().splitlines() == [
        "passes: 3 of 12, 2 min left", "passes: 6 of 12, 60 s left", "passes: 9 of 12, 30 s left"
    ]  # fmt: skip
    assert passed == 120


# -- what was learned -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a short run's policy; the run is beside it."""
    folder = tmp_path_factory.mktemp("learned")
    assert program("train", "digits", *QUICK, "--out", folder / "run") == 0
    assert program("export", folder / "run", folder / "policy.safetensors") == 0
    return folder / "policy.safetensors"


def test_the_exported_policy_is_the_runs(policy: Path) -> None:
    state = sealed.load(policy.parent / "run" / "checkpoint.safetensors", "checkpoint")
    learned = ma.LearnedPolicy.load(policy)
    assert torch.equal(learned.probabilities, state["learner"]["sampler"]["probabilities"])
    assert learned.provenance["recipe"]["name"] == "digits"
    assert learned.provenance["test_accuracy"] is not None
    images, weights = learned.augment(torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8))
    assert images.shape == (5, 3, 16, 16)
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("command", ["train", "transfer"])
def test_training_under_a_policy(command: str, policy: Path, tmp_path: Path) -> None:
    """Another network, under the frozen policy: no validation image is asked for, no alpha moves, weights differ."""
    names = (policy, "digits") if command == "transfer" else ("digits", "--policy", policy)
    assert program(command, *names, *QUICK, "--network", "wrn-40-2", "--out", tmp_path / "run") == 0
    (row,) = log(tmp_path / "run")
    assert row["alpha"] == pytest.approx(0.1)
    assert row["effective_samples"] < 1


def test_policies_say_what_they_are(policy: Path, capsys: Captured) -> None:
    assert program("inspect", policy) == 0
    shown = capsys.readouterr().out
    assert "small-cnn" in shown
    assert "trivialaugment-wide" in shown


def test_a_policy_of_other_images_of_a_folder_is_noted(tmp_path: Path, capsys: Captured) -> None:
    """It may have seen some of the test images."""
    root, file = write_folder(tmp_path / "images", {"cat": 20, "dog": 20}), tmp_path / "policy.safetensors"
    assert program("train", "folder", "--data", root, *FOLDER, "--out", tmp_path / "run") == 0
    assert program("export", tmp_path / "run", file) == 0
    note = "was learned on other images than those of this run; if it has seen some of the test images"
    for number, sizes in enumerate(({"cat": 20, "dog": 20}, {"cat": 25, "dog": 20})):
        root = write_folder(tmp_path / f"images{number}", sizes)
        capsys.readouterr()
        flags = ("--policy", file, "--out", tmp_path / f"under{number}")
        assert program("train", "folder", "--data", root, *FOLDER, *flags) == 0
        assert (note in capsys.readouterr().out) == bool(number)


def test_show_draws_copies(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    root = write_folder(tmp_path, {"cat": 2})
    images = sorted((root / "cat").iterdir())
    assert program("show", policy, *images, "--copies", "3", "--out", tmp_path / "grid.png") == 0
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.width > picture.height > 100
    assert program("show", policy, *images, "--out", images[0]) == 2, "nothing is overwritten"
    assert f"--seed is {2**63}; it must be 0 to {2**63 - 1}" in refused(
        capsys, "show", policy, *images, "--seed", 2**63
    )
    assert f"{root / 'cat'} is a folder; name pictures, such as" in refused(capsys, "show", policy, root / "cat")
    found = published._FOLDER / "pba-cifar.json"
    sentence = refused(capsys, "show", found, *images, "--out", tmp_path / "found.png")
    assert "is a policy of pba; metaaugment ops --policy" in sentence
    monkeypatch.chdir(tmp_path)
    before = (tmp_path / "grid.png").read_bytes()
    for _ in range(2):
        assert program("show", policy, images[0], "--copies", "1") == 0
    assert {file.name for file in tmp_path.glob("*.png")} == {"grid.png", "grid-2.png", "grid-3.png"}
    assert (tmp_path / "grid.png").read_bytes() == before


def test_what_has_learned_nothing_is_not_exported(tmp_path: Path, capsys: Captured) -> None:
    assert "is not a run" in refused(capsys, "export", tmp_path, tmp_path / "p.safetensors")
    assert program("train", "digits", *QUICK, "--method", "baseline", "--out", tmp_path / "run") == 0
    sentence = refused(capsys, "export", tmp_path / "run", tmp_path / "p.safetensors")
    assert "was trained by baseline and has learned no policy" in sentence
    assert "export the trained network with --network" in sentence
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize("half", [False, True])
def test_the_exported_network_has_the_accuracy_of_the_run(half: bool, tmp_path: Path, capsys: Captured) -> None:
    """From the file alone, with torch and safetensors; also of a run that has learned no policy."""
    run, file = tmp_path / "run", tmp_path / "network.safetensors"
    assert program("train", "digits", *QUICK, "--method", "baseline", "--out", run) == 0
    assert program("export", run, file, "--network", *["--half"] * half) == 0
    with safe_open(file, "pt") as opened:
        about = {name: json.loads(text) for name, text in opened.metadata().items()}
    recipe, result = about["provenance"]["recipe"], json.loads((run / "result.json").read_text())
    data = ma.dataset("digits", size=recipe["size"], per_class=recipe["per_class"])
    assert about["classes"] == list(data.classes)
    network = ma.network(about["network"], about["num_classes"], about["channels"]).eval()
    network.load_state_dict(load_file(file))
    images = data.test.images / 255
    mean, std = (torch.tensor(about[name])[:, None, None] for name in ("mean", "std"))
    right = (network((images - mean) / std).argmax(1) == data.test.labels).double().mean().item()
    assert right == pytest.approx(result["test_accuracy"], abs=0.01 if half else 1e-9)
    capsys.readouterr()
    assert program("inspect", file) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "format       safetensors, an exported task network"
    assert "network      small-cnn" in said
    assert f"classes      {json.dumps(about['classes'])}" in said
    assert f"  test_accuracy: {result['test_accuracy']}" in said
    again = [*QUICK, "--pretrained", file, "--out", tmp_path / "again"]
    assert program("train", "digits", *again) == 0
    sentence = refused(capsys, "export", run, tmp_path / "other", "--network", "--sampler-only")
    assert "leave out one of the two" in sentence


def test_a_policy_for_grey_images_is_refused_before_the_run_has_a_folder(tmp_path: Path, capsys: Captured) -> None:
    learner = ma.Learner(ma.network("small-cnn", 10, 1), ma.TransformationSampler(), ma.PolicyNetwork(128))
    grey = ma.LearnedPolicy.from_learner(learner, "small-cnn", 10, [0], [1], 16)
    grey.save(tmp_path / "grey.safetensors")
    out = tmp_path / "run"
    sentence = refused(capsys, "train", "digits", *QUICK, "--policy", tmp_path / "grey.safetensors", "--out", out)
    assert "was learned on images of 1 channels, but digits has 3" in sentence
    assert not out.exists()


def test_files_that_are_no_policies(policy: Path, tmp_path: Path, capsys: Captured) -> None:
    weights = policy.parent / "weights.safetensors"  # those of another program
    save_file({"weight": torch.zeros(2)}, weights, {"format": "pt"})
    for file in (Path(__file__), policy.parent / "run" / "checkpoint.safetensors", tmp_path / "missing", weights):
        for command in (("inspect", file), ("train", "digits", "--policy", file), ("show", file, file)):
            assert str(file) in refused(capsys, *command)
    assert "exists already" in refused(capsys, "export", policy.parent / "run", policy)
    assert "cannot be read as an image" in refused(capsys, "show", policy, policy)
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "metaaugment", "train", "digits", *QUICK, "--out", str(tmp_path / "run")]
    subprocess.run(f"{shlex.join(command)} | true", shell=True, check=True)
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_output_that_lacks_a_character_does_not_end_a_run(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ASCII has no ×, Latin-1 no α, and UTF-8 no name of a file that is not text."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    run = tmp_path / os.fsdecode(b"caf\xff \xce\xb1")
    assert program("train", "digits", *QUICK, "--out", run) == 0
    out.flush()
    said = out.buffer.getvalue().decode(encoding)
    assert f" {'?' if encoding == 'ascii' else '×'} plain training" in said
    assert f"{tmp_path}/caf? {'α' if encoding == 'utf-8' else '?'}/result.json" in said
    assert program("train", "digits", *QUICK, "--out", run) == 2
    err.flush()
    assert "exists already" in err.buffer.getvalue().decode(encoding)


def test_an_output_that_is_no_stream_of_text_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    assert program("--version") == 0
    assert out.getvalue().strip() == ma.__version__


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--method", "randaugmnt"], "--method is 'randaugmnt' (did you mean randaugment?); choose one of baseline,"),
        (["--epochs", "0"], "--epochs is 0; it must be a whole number of at least 1"),
        (["--lr", "nan"], "--lr is nan; it must be a number of 0 or more"),
        (["--batch", "5000"], "--batch is 5000, but there are only 1100 training images"),
        (["--per-class", "5", "--batch", "10"], "the validation split has 100 images and the training split only 50"),
        (["--network", "resnet-5"], "--network is 'resnet-5' (did you mean resnet-50?); choose one of"),
        (["--device", "cuda"], "PyTorch finds no CUDA device"),
        (["--device", "tpu"], "--device is 'tpu'; choose cpu or cuda"),
        (["--space", "nope"], "--space is 'nope'; choose one of"),
        (["--resume", "no-such-run"], "no-such-run is not a run"),
        (["--pretrained", "no-such-file"], "no-such-file: No such file or directory"),
        (["--dataset", "cifar"], "--dataset is 'cifar' (did you mean cifar10?)"),
        (["--workers", "-1"], "--workers is -1; it must be 0 to 128"),
        (["--policy", "x", "--method", "baseline"], "--policy is x, which --method baseline does not use"),
        (["--seed", "-1"], "--seed is -1; it must be 0 or more"),
        (["--split-seed", "-1"], "seed is -1"),
        (["--epsilon", "2"], "--epsilon is 2.0; it must be a share in [0, 1]"),
        (["--random-epochs", "9", "--epochs", "9"], "--epochs is 9; it must be larger than --random-epochs plus"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    flags: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, "train", "digits", *flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in RECIPES if re.search("shake|pyramid|resnet-200", name)])
def test_rows_trained_by_transfer_ask_for_a_policy(name: str, capsys: Captured) -> None:
    sentence = refused(capsys, "train", name)
    assert sentence.startswith(f"metaaugment: {name} is trained under a policy that was learned before")
    assert "--policy FILE" in sentence


def test_missing_data_are_named_with_the_command_that_gets_them(tmp_path: Path, capsys: Captured) -> None:
    sentence = refused(capsys, "train", "cifar10-wrn-40-2", "--data", tmp_path, "--out", tmp_path / "run")
    assert str(tmp_path / "cifar-10-batches-bin") in sentence
    assert f"metaaugment data get cifar10 --data {tmp_path}" in sentence
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    sentence = refused(capsys, "train", "digits", *QUICK, "--out", tmp_path)
    assert "exists already; continue its run with --resume" in sentence
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unwritable_folder(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused(capsys, "train", "digits", *QUICK, "--out", tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ({"cat": 20}, "one class"),
        ({"cat": 20, "dog": 0}, "dog"),
        ({"train/cat": 6, "train/dog": 6, "val/cat": 9, "val/dog": 9}, "validation"),
        ({}, "no folder"),
    ],
    ids=["one class", "empty class", "larger validation", "nothing"],
)
def test_folders_that_cannot_be_trained_on(
    classes: dict[str, int], sentence: str, tmp_path: Path, capsys: Captured
) -> None:
    root = write_folder(tmp_path / "mine", classes)
    assert sentence in refused(capsys, "train", "folder", "--data", root, *FOLDER, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["a picture", "another network", "a pickle"])
def test_pretrained_weights_that_do_not_fit(file: str, tmp_path: Path, capsys: Captured) -> None:
    weights = tmp_path / "weights"
    if file == "a picture":
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(weights, "png")
    elif file == "another network":
        save_file(ma.network("wrn-40-2", 10).state_dict(), weights)
    else:
        torch.save({"a": torch.zeros(1)}, weights)
    sentence = refused(capsys, "train", "digits", *QUICK, "--pretrained", weights, "--out", tmp_path / "run")
    assert f"--pretrained {weights}" in sentence
    assert ("--network" if file == "another network" else "safetensors.torch.save_file") in sentence
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_optional(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    sentence = refused(capsys, "train", "digits", *QUICK, "--tensorboard", "--out", tmp_path / "run")
    assert "pip install tensorboard" in sentence
    assert not (tmp_path / "run").exists()
