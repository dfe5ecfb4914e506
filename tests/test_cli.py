"""The program as its users meet it: in a process of its own, through its output and exit status."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import metaaugment as ma
from metaaugment.__main__ import LABORATORY
from metaaugment.lab import parsing
from metaaugment.lab.report import operations

from commands import program

ROOT = Path(__file__).parent.parent
# Python without some packages, whoever installed them.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {missing} else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
Said = Callable[..., str]


def metaaugment(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    wide = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(
        [sys.executable, "-m", "metaaugment", *args], capture_output=True, text=True, cwd=cwd, env=wide
    )


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints, on wide paper."""
    monkeypatch.setenv("COLUMNS", "200")

    def said(*args: str) -> str:
        assert program(*args) == 0
        return capsys.readouterr().out

    return said


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What is said about a mistake: one sentence, at status 2, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)

    def said(*args: str) -> str:
        assert program(*args) == 2
        shown = capsys.readouterr()
        (line,) = shown.err.splitlines()
        assert line.startswith("metaaugment: ")
        assert not shown.out
        assert not list(tmp_path.iterdir())
        return line

    return said


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ([], {"ops": "List the image functions", "bench": "Benchmark a part"}),
        (["ops"], {"--space": "what a magnitude means", "--size": "Side of the image", "--picture": "Draw each f"}),
        (["bench", "ops"], {"--seconds": "Seconds for each system", "--device": "cpu or cuda", "--out": "as JSON"}),
        (["bench", "step"], {"--networks": "task networks", "--batch": "Images in a mini-batch"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_help_explains_commands_and_flags(command: list[str], flags: dict[str, str], printed: Said) -> None:
    lines = printed(*command, "--help").splitlines()
    for flag, explanation in flags.items():
        assert any(flag in line and explanation in line for line in lines), f"{flag} is not explained"


def test_the_level_table_of_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns no cell is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    operations.print_table("metaaugment", 32)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert re.search(r"Rotate +0 +7.5 +15 +22.5 +30 +± degrees to the left", shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_ops_of_a_space_is_its_level_table(printed: Said) -> None:
    lines = printed("ops", "--space", "faa", "--size", "100").splitlines()
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in lines}
    assert rows["function"][:11] == [str(m) for m in range(11)]
    assert rows["TranslateX"][:11] == ["-45", "-36", "-27", "-18", "-9", "0", "9", "18", "27", "36", "45"]


def test_ops_draws_a_picture(tmp_path: Path, printed: Said) -> None:
    file = tmp_path / "deep" / "ops.png"
    assert printed("ops", "--picture", str(file)).strip() == str(file)
    with Image.open(file) as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 1000


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["ops", "--space", "nope"], "unknown space 'nope'; choose one of metaaugment,"),
        (["ops", "--policy", "autoaugment-mnist"], "there is no policy autoaugment-mnist; name a file, or one of auto"),
        (["ops", "--size", "0"], "--size is 0; it must be 1 to 16383"),
        (["ops", "--image", "cat.png"], "only used with --picture"),
        (["ops", "--picture", "x.png", "--image", "no-such.png"], "no-such.png: No such file"),
        (["ops", "--picture", "x.png", "--image", __file__], "cannot be read as an image"),
        (["ops", "--spaces", "faa"], "ops has no flag '--spaces' (did you mean --space?); choose one of --space"),
        (["ops", "--size", "99999999999999999999"], "it must be 1 to 16383"),
        (["ops", "--picture", "noending"], "--picture noending is not a name for a picture"),
        (["ops", "--picture", "."], "is not a name for a picture"),
        (["bench", "ops", "--seconds", "inf"], "--seconds is inf"),
        (["bench", "ops", "--seconds", "nan"], "--seconds is nan"),
        (["bench", "step", "--batch", "1"], "--batch is 1; it must be at least 2"),
        (["bench", "step", "--seconds", "0"], "--seconds is 0; it must be above 0 and at most 3600"),
        (["bench", "ops", "--device", "tpu"], "--device is 'tpu'; choose cpu or cuda"),
        (["bench", "ops", "--seconds", "-1"], "--seconds is -1"),
        (["reprot"], "unknown command 'reprot' (did you mean report?); choose one of train, recipes,"),
        ([], "no command is named; choose one of train, recipes,"),
        (["transfer", "a", "digits", "--policy", "b"], "takes the policy file as its first argument; leave out --po"),
        (["transfer", "a", "digits", "--policy=b"], "takes the policy file as its first argument; leave out --policy"),
        (["transfer", "--epochs", "1", "a", "digits"], "transfer expects FILE and RECIPE first, but got --epochs 1;"),
        (["transfer", "a", "--epochs", "1", "digits"], "transfer expects FILE and RECIPE first, but got a --epochs;"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_sentence_and_status_2(args: list[str], sentence: str, refused: Said) -> None:
    assert sentence in refused(*args)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--epochs", "1"], "a command is expected before --epochs; choose one of train, recipes,"),
        (["ops", "--size", "x"], "--size is 'x'; it must be a whole number; see metaaugment ops --help"),
        (["ops", "--size"], "--size has no value; it must be a whole number; see metaaugment ops --help"),
        (["ops", "nope"], "ops does not take 'nope'; see metaaugment ops --help"),
        (["bench", "nope"], "unknown benchmark 'nope'; choose one of ops, step, transfer; see metaaugment bench --"),
        (["bench", "step", "--seconds", "soon"], "--seconds is 'soon'; it must be a number; see metaaugment bench s"),
        (["train"], "no recipe is named; choose one of digits, folder,"),
        (["train", "digit"], "unknown recipe 'digit' (did you mean digits?); choose one of digits, folder,"),
        (["train", "--resume", "runs/x"], "a recipe is expected before --resume; choose one of digits, folder,"),
        (["train", "digits", "--epochs", "x"], "--epochs is 'x'; it must be a whole number; see metaaugment train"),
        (["train", "digits", "--epochs=1.5"], "--epochs is '1.5'; it must be a whole number"),
        (["train", "digits", "--size", "x"], "--size is 'x'; it must be a whole number or None"),
        (["train", "digits", "--out", "--epochs", "1"], "--out has no value; give one after it"),
        (["train", "digits", "--nope", "3"], "train digits has no flag '--nope'"),
        (["train", "digits", "--label_smothing", "3"], "(did you mean --label-smoothing?); choose one of --dataset,"),
        (["train", "digits", "--flip=1"], "--flip is a switch and takes no value, but got '1'"),
        (["train", "digits", "--no-flop"], "train digits has no flag '--no-flop' (did you mean --no-flip?)"),
        (["train", "digits", "--precision", "flaot32"], "'flaot32' (did you mean float32?); choose one of bf16, fl"),
        (["train", "digits", "folder"], "train digits does not take 'folder'; see metaaugment train digits --help"),
        (["search"], "no system is named; choose one of faa, pba, dada, autoaugment; see metaaugment search --help"),
        (["search", "nope", "digits"], "unknown system 'nope'; choose one of faa, pba, dada, autoaugment;"),
        (["search", "pba", "digits", "--functions", "own"], "--functions is 'own'; choose one of paper, pba; see"),
        (["export"], "export needs RUN and FILE; see metaaugment export --help"),
        (["export", "runs/x"], "export needs FILE; see metaaugment export --help"),
        (["recipes", "--all"], "recipes has no flag '--all'; see metaaugment recipes --help"),
        (["transfer", "a"], "transfer needs RECIPE; see metaaugment transfer --help"),
        (["transfer", "a", "nope"], "unknown recipe 'nope'; choose one of digits, folder,"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_that_cannot_be_understood_are_one_sentence(args: list[str], sentence: str, refused: Said) -> None:
    said = refused(*args)
    assert sentence in said
    assert re.search(r"; see metaaugment( [a-z]+)* --help$", said)


def test_what_else_tyro_refuses_is_one_sentence_too(monkeypatch: pytest.MonkeyPatch, refused: Said) -> None:
    monkeypatch.setattr(parsing, "mistake", lambda *_: None)
    said = refused("train", "digits", "--epochs", "x")
    assert "--epochs: invalid literal for int() with base 10: 'x'" in said
    assert not re.search("[─-╿]", said)


def test_a_mistake_ends_the_process_with_status_2() -> None:
    done = metaaugment("reprot")
    assert done.returncode == 2
    assert done.stderr.startswith("metaaugment: unknown command 'reprot'")
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (["tyro"], "the program needs tyro, which is not installed; install it with: pip install 'metaaugment[lab]'"),
        (["rich", "tyro"], "the program needs rich, tyro, which are not installed; install it with: pip install"),
    ],
)
def test_without_the_packages_of_the_laboratory_it_says_what_to_install(
    missing: list[str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(missing=missing))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = metaaugment("ops", PYTHONPATH=path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"metaaugment: {sentence}")
    assert not done.stdout


def test_these_packages_are_those_that_the_extra_installs() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lab"]
    names = {re.split("[^a-z0-9-]", wish)[0] for wish in extra}
    assert set(LABORATORY) == {"sklearn" if name == "scikit-learn" else name for name in names}


@pytest.mark.parametrize("args", [["transfer", "--help"], ["transfer", "a", "--help"], ["transfer", "a", "-h"]])
def test_help_of_transfer_is_its_own(args: list[str], printed: Said) -> None:
    assert "usage: metaaugment transfer" in printed(*args)


def test_show_names_the_command_for_a_policy_that_looks_at_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures have no labels; what it names makes a file that can be shown."""
    learner = ma.Learner(ma.network("small-cnn", 4), ma.TransformationSampler(), ma.LabelPolicy(128, num_classes=4))
    policy = ma.LearnedPolicy.from_learner(learner, "small-cnn", 4, [0] * 3, [1] * 3, 16)
    policy.save(tmp_path / "labels.safetensors")
    policy.sampler_only().save(tmp_path / "alone.safetensors")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    monkeypatch.chdir(tmp_path)
    assert program("show", "labels.safetensors", "red.png") == 2
    assert "metaaugment export RUN FILE --sampler-only" in capsys.readouterr().err
    assert program("export", "--help") == 0
    assert "--sampler-only" in capsys.readouterr().out
    assert program("show", "alone.safetensors", "red.png") == 0


def test_it_says_its_version(printed: Said) -> None:
    assert printed("--version") == f"{ma.__version__}\n"
    assert "metaaugment --version" in printed("--help")


def test_files_are_utf8_in_any_locale(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    policy = {"system": "faa", "source": "Jürgen’s", "space": "faa", "max_level": 1,
              "sub_policies": [[["Invert", 1, None], ["Invert", 0.5, None]]]}  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(policy, ensure_ascii=False), encoding="utf-8")
    done = metaaugment("ops", "--policy", "mine.json", cwd=tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine.json: J?rgen?s")
    done = metaaugment("reproduce", "--results", f"{ROOT}/results", "--report", "R.md", cwd=tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "±" in (tmp_path / "R.md").read_text(encoding="utf-8")
