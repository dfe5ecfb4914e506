"""A run does not depend on the number of its processes, nor on how often they are stopped, killed and started again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metaaugment.files import sealed
from metaaugment.lab.training import checkpoint, launch

from commands import program
from trees import write_folder

HERE = Path(__file__).parent
STRUCK = str(HERE / "struck.py")
PROGRAM = ("-m", "metaaugment")
# Three epochs of four steps, with a policy update on every second one, exact and in float64. 48 images go into
# 1, 2, 3, 4 and 8 processes; 100 validation images do not go into 3 and 8 evenly.
SMALL = (
    "--size", "8", "--per-class", "20", "--batch", "48", "--epochs", "3", "--every", "2", "--route", "forward",
    "--precision", "float64",
)  # fmt: skip
TIMES = ("seconds", "images_per_second")


def start(processes: int, *args: object, restarts: int = 0, **options: Any) -> subprocess.Popen[str]:
    """torchrun with so many processes; with one, the program itself."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", processes, "--max-restarts", restarts)
    command = [sys.executable, *(("-m", *torchrun) if processes > 1 else ()), *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    return subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


def run(processes: int, *args: object, restarts: int = 0) -> tuple[int, str, str]:
    """Exit status and output of what `start` starts."""
    with start(processes, *args, restarts=restarts) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def train(processes: int, out: Path, *args: object) -> Path:
    status, _, err = run(processes, *PROGRAM, "train", "digits", *SMALL, *args, "--out", out)
    assert status == 0, err
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(1, tmp_path_factory.mktemp("runs") / "alone")


def numbers(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All numbers of a tree of dictionaries and lists, by their place in it."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(tree, Tensor | int | float):
        yield path, torch.as_tensor(tree)


def learned(out: Path) -> dict[str, Tensor]:
    """All numbers that a run has come to, without its clock; drawn samples, of single precision, apart."""
    state = sealed.load(out / checkpoint.LAST, "checkpoint")
    result = json.loads((out / "result.json").read_text())
    tested = {key: value for key, value in result.items() if key.startswith("test_")}
    log = [{key: value for key, value in row.items() if key not in TIMES} for row in state["log"]]
    file = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert file == state["log"]
    parts = ("network", "learner", "optimizers", "generators", "look")
    return dict(numbers({**{name: state[name] for name in parts}, "log": log, "tested": tested}))


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = learned(found), learned(expected)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # The log rounds the weights of a look to five digits, and p to six.
        rounded = {"weights": 2e-5, "probabilities": 2e-6}
        tolerance = next((bound for name, bound in rounded.items() if f"/{name}/" in key and "log" in key), 1e-10)
        tolerance = 1e-5 if key.startswith("/look/") and value.dtype == torch.float32 else tolerance
        torch.testing.assert_close(
            ours[key], value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_come_to_the_same_numbers(processes: int, alone: Path, tmp_path: Path) -> None:
    assert_same(train(processes, tmp_path / "run"), alone)


WAYS: dict[str, tuple[object, ...]] = {
    "baseline": ("--method", "baseline"),
    "randaugment": ("--method", "randaugment", "--num-ops", 3, "--magnitude", 4),
    "advaa": ("--method", "advaa", "--copies", 2),
    "lagged, copies": ("--lagged", "--copies", 4, "--every", 1),
    "eyes of its own": ("--extractor", "own"),
    "phases": ("--random-epochs", 1, "--frozen-epochs", 1),
    "flips and Cutout": ("--flip", "--crop", 1, "--cutout", 3, "--clip", 1.0),
    "unrolled": ("--route", "unrolled"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_training_comes_to_the_same_numbers(way: str, tmp_path: Path) -> None:
    assert_same(train(2, tmp_path / "two", *WAYS[way]), train(1, tmp_path / "one", *WAYS[way]))


@pytest.mark.slow
def test_statistics_of_each_process_are_asked_for(alone: Path, tmp_path: Path) -> None:
    """They make it another run, which is the same each time; also where it is stopped in between."""
    local = ("--local-statistics",)
    whole = train(2, tmp_path / "whole", *local)
    assert not torch.allclose(learned(whole)["/network/output.weight"], learned(alone)["/network/output.weight"])
    out = tmp_path / "stopped"
    assert run(2, STRUCK, "SIGTERM", 1, 6, "train", "digits", *SMALL, *local, "--out", out)[0] != 0
    assert run(2, *PROGRAM, "train", "digits", "--precision", "float64", "--resume", out)[0] == 0
    ours, theirs = learned(out), learned(whole)
    for key in (key for key in theirs if key.startswith(("/network", "/learner")) and "running" not in key):
        assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.slow
def test_training_under_a_policy_comes_to_the_same_numbers(alone: Path, tmp_path: Path) -> None:
    status, _, err = run(1, *PROGRAM, "export", alone, tmp_path / "policy.safetensors")
    assert status == 0, err
    policy = ("--policy", tmp_path / "policy.safetensors")
    assert_same(train(2, tmp_path / "two", *policy), train(1, tmp_path / "one", *policy))


@pytest.mark.slow
def test_the_fast_route_comes_to_the_same_numbers_up_to_its_rounding(tmp_path: Path) -> None:
    fast = ("--route", "difference")
    one, two = (learned(train(processes, tmp_path / str(processes), *fast)) for processes in (1, 2))
    for key in (key for key in one if key.startswith(("/network", "/learner"))):
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processes", [2, *(pytest.param(many, marks=pytest.mark.slow) for many in (4, 8))])
def test_a_run_of_many_is_stopped_and_goes_on_with_three(processes: int, alone: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, by a signal that only one process gets."""
    out = tmp_path / "run"
    status, said, err = run(processes, STRUCK, "SIGTERM", processes - 1, 6, "train", "digits", *SMALL, "--out", out)
    assert status != 0
    assert said.count("stopped after epoch 1, step 2; nothing is lost") == 1
    assert err.count("exitcode  : 143") == processes, err
    status, said, err = run(3, *PROGRAM, "train", "digits", "--precision", "float64", "--resume", out)
    assert status == 0, err
    assert said.count("continuing after epoch 1, step 2") == 1
    assert_same(out, alone)


def test_a_killed_process_is_started_again_and_the_run_goes_on(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, said, err = run(2, STRUCK, "SIGKILL", 1, 10, "train", "digits", *SMALL, "--out", out, restarts=1)
    assert status == 0, err
    # From whichever epoch a checkpoint was due behind.
    assert len(re.findall(r"continuing after epoch [12], step 0", said)) == 1
    assert err.count("another process of this run is gone") <= 1
    assert_same(out, alone)


@pytest.mark.slow
def test_a_folder_of_another_run_is_not_gone_on_with(alone: Path) -> None:
    """torchrun tries again after every mistake; the second time is no licence to write into what was there before."""
    before = (alone / "checkpoint.json").stat().st_mtime_ns
    status, said, err = run(2, *PROGRAM, "train", "digits", *SMALL, "--out", alone, restarts=1)
    assert status != 0
    assert err.count("exists already; continue its run with --resume") == 2, "once for each time"
    assert "continuing" not in said
    assert (alone / "checkpoint.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(("--batch", "50"), "--batch is 50, which 3 processes cannot share evenly"), (("--bogus",), "--bogus")],
)
def test_a_mistake_is_said_once_and_all_processes_end_with_it(
    flags: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    status, _, err = run(3, *PROGRAM, "train", "digits", *SMALL, *flags, "--out", tmp_path / "run")
    assert status != 0
    # Not as often as torchrun's own report of the failure repeats the command.
    assert err.split("torch.distributed.elastic")[0].count(sentence) == 1
    # torchrun ends those that are still on their way when it sees the first one fail.
    assert "exitcode  : 2 " in err
    assert "exitcode  : 1 " not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [("search", "dada"), ("reproduce", "table-3")])
def test_what_is_no_work_for_several_is_refused(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert program(*command) == 2
    assert f"metaaugment {command[0]} was started 2 times" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_images_in_files_by_workers_and_a_signal(tmp_path: Path) -> None:
    """As Slurm and Kubernetes end jobs: torchrun hands it on to whole groups of processes, where others read ahead."""
    root = write_folder(tmp_path / "mine", {"cat": 20, "dog": 20, "owl": 20})
    recipe = ("train", "folder", "--data", root, "--network", "small-cnn", "--size", 16, "--batch", 8, "--epochs", 20,
              "--every", 2, "--workers", 2, "--precision", "float64", "--route", "forward")  # fmt: skip
    assert run(1, *PROGRAM, *recipe, "--out", tmp_path / "one")[0] == 0
    out = tmp_path / "two"
    with start(2, *PROGRAM, *recipe, "--out", out) as process:
        while not (out / "checkpoint.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, err = process.communicate()
    assert "nothing is lost, continue with" in said, err
    assert "DataLoader" not in err
    assert run(4, *PROGRAM, *recipe, "--resume", out)[0] == 0
    assert_same(out, tmp_path / "one")


def test_what_each_process_could_not_read_is_kept(tmp_path: Path) -> None:
    """Each reads its own files, and the first one alone writes the checkpoint."""
    counts = {f"{part}/{name}": 12 for part in ("train", "val", "test") for name in ("cat", "dog")}
    root, out = write_folder(tmp_path / "mine", counts), tmp_path / "run"
    for file in (file for part in ("train", "val") for file in (root / part).glob("*/00[0-3].png")):
        file.write_bytes(b"no image at all")
    recipe = ("train", "folder", "--data", root, "--network", "small-cnn", "--size", 16, "--batch", 8, "--epochs", 1,
              "--method", "baseline", "--workers", 0, "--corrupt", "skip")  # fmt: skip
    status, said, err = run(2, *PROGRAM, *recipe, "--out", out)
    assert status == 0, err
    assert said.count("skipped 16 image files") == 1
    (out / "result.json").unlink()
    status, said, err = run(1, *PROGRAM, *recipe, "--resume", out)
    assert status == 0, err
    assert said.count("skipped 16 image files") == 1


# -- how processes are started -----------------------------------------------------------------------------------------


def test_srun_says_what_torchrun_would() -> None:
    said = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
            "SLURM_JOB_ID": "40123", "MASTER_ADDR": "node-1"}  # fmt: skip
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1", "MASTER_PORT": "10123"}
    assert launch.of_slurm(said) == expected
    del said["MASTER_ADDR"]
    with pytest.raises(ValueError, match=r"MASTER_ADDR is not set.*scontrol show hostnames"):
        launch.of_slurm(said)
    assert launch.of_slurm({**said, "SLURM_NNODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    assert launch.of_slurm({**said, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    del said["SLURM_STEP_ID"]
    assert launch.of_slurm(said) == {}, "a batch script is no step of its job"


@pytest.mark.slow
def test_tasks_of_slurm_train_together(alone: Path, tmp_path: Path) -> None:
    out, tasks = tmp_path / "run", []
    for place in range(2):
        slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": place, "SLURM_LOCALID": place, "SLURM_STEP_NUM_TASKS": 2,
                 "SLURM_JOB_ID": os.getpid()}  # fmt: skip
        command = [sys.executable, *PROGRAM, "train", "digits", *SMALL, "--out", str(out)]
        environment = os.environ | {key: str(value) for key, value in slurm.items()}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        tasks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert "2 processes" in said[0]
    assert said[1] == ""
    assert_same(out, alone)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_who_was_started_again_knows_by_whom(variable: str) -> None:
    assert not launch.restarted({variable: "0"})
    assert launch.restarted({variable: "2"})
    assert launch.launch({"TORCHELASTIC_RUN_ID": "seven"}) == launch.launch({"TORCHELASTIC_RUN_ID": "seven"})
    assert launch.launch({"TORCHELASTIC_RUN_ID": "none"}) == launch.launch({}), "torchrun's name for none"
    assert launch.launch({"SLURM_JOB_ID": "1"}) != launch.launch({"SLURM_JOB_ID": "2"})


# -- determinism -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_bit_for_bit(tmp_path: Path) -> None:
    """Also in single precision, with several processes, and under the flag, which only a GPU needs."""
    single = ("--precision", "float32", "--route", "difference")
    one = learned(train(2, tmp_path / "one", *single))
    two = learned(train(2, tmp_path / "two", *single, "--deterministic"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert torch.equal(value, two[key]), key
