"""The program as its users meet it: in a process of its own, through its output and exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import metaaugment as ma
from metaaugment import OPS
from metaaugment.report import operations


def metaaugment(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "metaaugment", *args], capture_output=True, text=True, cwd=cwd, env=wide
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ([], {"ops": "List the image functions", "bench": "Benchmark a part"}),
        (
            ["ops"],
            {"--space": "what a magnitude means", "--size": "Side of the image", "--picture": "Draw each function"},
        ),
        (["bench", "ops"], {"--seconds": "Seconds for each system", "--device": "cpu or cuda", "--out": "as JSON"}),
        (["bench", "step"], {"--networks": "task networks", "--batch": "Images in a mini-batch"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_help_explains_commands_and_flags(command: list[str], flags: dict[str, str]) -> None:
    done = metaaugment(*command, "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
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


def test_ops_piped_is_plain_names() -> None:
    done = metaaugment("ops")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [op.name for op in OPS]


def test_ops_of_a_space_is_its_level_table() -> None:
    done = metaaugment("ops", "--space", "faa", "--size", "100")
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in done.stdout.splitlines()}
    assert rows["function"][:11] == [str(m) for m in range(11)]
    assert rows["TranslateX"][:11] == ["-45", "-36", "-27", "-18", "-9", "0", "9", "18", "27", "36", "45"]


def test_ops_draws_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ops.png"
    done = metaaugment("ops", "--picture", str(file))
    assert done.returncode == 0
    assert done.stdout.strip() == str(file)
    with Image.open(file) as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 1000


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["ops", "--space", "nope"], "unknown space 'nope'; choose one of metaaugment,"),
        (["ops", "--size", "0"], "--size is 0; it must be 1 to 16383"),
        (["ops", "--image", "cat.png"], "only used with --picture"),
        (["ops", "--picture", "x.png", "--image", "no-such.png"], "no-such.png: No such file"),
        (["ops", "--picture", "x.png", "--image", __file__], "cannot be read as an image"),
        (["ops", "--spaces", "faa"], "Space that defines what a magnitude means"),  # the nearest flag, explained
        (["ops", "--size", "99999999999999999999"], "it must be 1 to 16383"),
        (["ops", "--picture", "noending"], "--picture noending is not a name for a picture"),
        (["ops", "--picture", "."], "is not a name for a picture"),
        (["bench", "ops", "--seconds", "inf"], "--seconds is inf"),
        (["bench", "ops", "--seconds", "nan"], "--seconds is nan"),
        (["bench", "step", "--batch", "1"], "--batch is 1; it must be at least 2"),
        (["bench", "step", "--seconds", "0"], "--seconds is 0; it must be above 0 and at most 3600"),
        (["bench", "ops", "--device", "tpu"], "--device is 'tpu'; choose cpu or cuda"),
        (["bench", "ops", "--seconds", "-1"], "--seconds is -1"),
        (["nonsense"], "nonsense"),
        ([], "subcommand"),
        (
            ["transfer", "a", "digits", "--policy", "b"],
            "transfer takes the policy file as its first argument; leave out --policy",
        ),
        (["transfer", "--epochs", "1", "a", "digits"], "transfer expects FILE and RECIPE first, but got --epochs 1;"),
        (["transfer", "a", "--epochs", "1", "digits"], "transfer expects FILE and RECIPE first, but got a --epochs;"),
        (
            ["transfer", "a", "digits", "--policy=b"],
            "transfer takes the policy file as its first argument; leave out --policy",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_sentence_and_status_2(args: list[str], sentence: str, tmp_path: Path) -> None:
    done = metaaugment(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [["transfer", "--help"], ["transfer", "a", "--help"], ["transfer", "a", "-h"]])
def test_help_of_transfer_is_its_own(args: list[str], tmp_path: Path) -> None:
    done = metaaugment(*args, cwd=tmp_path)
    assert done.returncode == 0
    assert "usage: metaaugment transfer" in done.stdout


def test_show_names_the_command_for_a_policy_that_looks_at_labels(tmp_path: Path) -> None:
    """Pictures have no labels; what it names makes a file that can be shown."""
    learner = ma.Learner(ma.network("small-cnn", 4), ma.TransformationSampler(), ma.LabelPolicy(128, num_classes=4))
    policy = ma.LearnedPolicy.from_learner(learner, "small-cnn", 4, [0] * 3, [1] * 3, 16)
    policy.save(tmp_path / "labels.safetensors")
    policy.sampler_only().save(tmp_path / "alone.safetensors")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    refused = metaaugment("show", "labels.safetensors", "red.png", cwd=tmp_path)
    assert refused.returncode == 2
    assert "metaaugment export RUN FILE --sampler-only" in refused.stderr
    assert "--sampler-only" in metaaugment("export", "--help").stdout
    assert metaaugment("show", "alone.safetensors", "red.png", cwd=tmp_path).returncode == 0
