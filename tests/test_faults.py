"""Faults of the machine in the middle of a run: one sentence, nothing lost up to the last checkpoint, and a way on."""

import ast
import errno
import fcntl
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metaaugment.files import atomic, sealed
from metaaugment.guard.faults import full_memory, lost_reader
from metaaugment.lab.bench import ops
from metaaugment.lab.experiments import run
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training import checkpoint, folder, json_file
from metaaugment.lab.training.trainer import Trainer, Watcher

from commands import Captured, program, refused
from endings import Killed, assert_same, assert_same_end, final, rows
from trees import write_folder
from users import ordinary_user

PACKAGE = Path(__file__).parent.parent / "metaaugment"
# Three epochs of four steps.
DIGITS = ("train", "digits", "--size", "16", "--per-class", "20", "--batch", "50", "--epochs", "3", "--every", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert program(*DIGITS, "--out", out) == 0
    return out


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Has something happen behind a step, counted over all epochs, once."""

    class Once(Watcher):
        def __init__(self, step: int, happens: Callable[[], object]) -> None:
            self.step, self.left = step, [happens]

        def stepped(self, trainer: Trainer) -> None:
            if trainer.learner.steps == self.step and self.left:
                trainer.checkpoints.settle()  # whichever was due is on the disk
                self.left.pop()()

    def arrange(step: int, happens: Callable[[], object]) -> None:
        once = Once(step, happens)
        monkeypatch.setattr(run, "Lines", lambda console: once)

    return arrange


def advised(said: str) -> list[str]:
    """The command that a sentence ends in."""
    words = shlex.split(re.findall(r": metaaugment ([^;]*)", said)[-1])
    assert "--resume" in words
    return words


def raises(error: BaseException) -> Callable[[], object]:
    def raise_it() -> None:
        raise error

    return raise_it


# -- memory ------------------------------------------------------------------------------------------------------------

NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def capture() -> None:
    """As `torch.cuda.graph` ends: the capture that an error broke off cannot be ended either."""
    try:
        raise NO_ROOM
    finally:
        raise torch.AcceleratorError(
            "CUDA error: operation failed due to a previous error during capture\nSearch for `"
        )


FULL = {
    "torch's allocator on a GPU": raises(NO_ROOM),
    "the driver of a GPU": raises(torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAll")),
    "the driver of a GPU, of segments that grow": raises(RuntimeError("CUDA driver error: out of memory")),
    "Triton, which loads a kernel onto a GPU": raises(RuntimeError("Triton Error [CUDA]: out of memory")),
    "cuBLAS on a GPU": raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
    "cuDNN on a GPU": raises(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
    "a graph captured on a GPU": capture,
    "a thread that hands over to a GPU": raises(
        RuntimeError(f"Caught OutOfMemoryError in pin memory thread.\n{NO_ROOM}")
    ),
    # The words of these are those of the installed versions: more than any machine has is asked for.
    "torch on the CPU": lambda: torch.empty(2**60, dtype=torch.uint8),
    "NumPy": lambda: np.empty(2**60, np.uint8),
    "Python": lambda: bytearray(2**62),
    "a process that cannot be started": raises(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
}


@pytest.mark.parametrize("where", FULL)
def test_full_memory_is_one_sentence_and_the_run_goes_on(
    where: str, undisturbed: Path, tmp_path: Path, capsys: Captured, at: Any
) -> None:
    at(6, FULL[where])
    said = refused(capsys, *DIGITS, "--out", tmp_path / "run")
    memory = "the GPU" if "GPU" in where else "this machine"
    assert f"the memory of {memory} is full with --batch 50 and --policy-batch 100; everything up to the last" in said
    assert "or begin another run with less, and another --out" in said
    assert program(*advised(said)) == 0
    assert_same_end(tmp_path / "run", undisturbed)


def test_the_settings_that_take_memory_are_those_of_the_run(tmp_path: Path, capsys: Captured, at: Any) -> None:
    at(1, raises(MemoryError()))
    flags = ("--copies", "3", "--out", tmp_path / "run")
    assert "is full with --batch 50, --copies 3 and --policy-batch 100; " in refused(capsys, *DIGITS, *flags)
    at(1, raises(MemoryError()))
    flags = ("--method", "baseline", "--out", tmp_path / "run")
    assert "is full with --batch 50; " in refused(capsys, *DIGITS, *flags)
    at(1, raises(MemoryError()))
    flags = ("--method", "advaa", "--out", tmp_path / "run")  # which draws eight of each image, unasked
    assert "is full with --batch 50 and --copies 8; " in refused(capsys, *DIGITS, *flags)


def test_full_memory_at_the_first_step_leaves_the_folder_to_a_smaller_run(
    tmp_path: Path, capsys: Captured, at: Any
) -> None:
    at(1, raises(MemoryError()))
    said = refused(capsys, *DIGITS, "--out", tmp_path / "run")
    assert said.endswith("begin again with less: nothing was trained yet")
    assert program(*DIGITS, "--batch", "25", "--out", tmp_path / "run") == 0


@pytest.mark.parametrize("command", [("report", "RUN"), ("export", "RUN", "FILE")])
def test_full_memory_elsewhere(
    command: tuple[str, ...], undisturbed: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "load", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    names = {"RUN": undisturbed, "FILE": tmp_path / "policy"}
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *(names.get(word, word) for word in command))
    assert "the memory of this machine is full; free some, or use a machine with more" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("full", [FULL["a graph captured on a GPU"], FULL["the driver of a GPU"]])
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "ops", "--seconds", "0.01"),
        ("bench", "step", "--seconds", "0.01", "--batch", "2"),
        ("bench", "transfer", "--seconds", "0.01", "--batch", "2"),
        ("diagnose", "RUN", "--samples", "256"),
        ("show", "POLICY", "IMAGE"),
        ("search", "dada", "digits", "--epochs", "1", "--out", "search"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_full_memory_of_a_gpu_in_any_command(
    command: tuple[str, ...], full: Any, undisturbed: Path, tmp_path: Path, capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    names = {"RUN": undisturbed, "POLICY": tmp_path / "policy", "IMAGE": tmp_path / "image.png"}
    Image.new("RGB", (16, 16)).save(names["IMAGE"])
    assert program("export", undisturbed, names["POLICY"]) == 0
    monkeypatch.setattr(torch.nn.Conv2d, "forward", lambda *_: full())
    monkeypatch.setattr(ops, "apply", lambda *_, **__: full())
    said = refused(capsys, *(names.get(word, word) for word in command))
    assert said.startswith("metaaugment: the memory of the GPU is full; ")


def test_full_memory_in_a_search(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that was begun keeps its batch size, so that to continue with a smaller one is no way out."""
    monkeypatch.setattr(Laboratory, "trainer", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    words = ("search", "dada", "digits", "--epochs", "1", "--out", tmp_path / "search")
    assert "is full; begin again with a smaller --batch, --copies or --policy-batch" in refused(capsys, *words)


def test_a_fault_of_the_program_stays_one(tmp_path: Path, at: Any) -> None:
    """Its traceback is what it can be mended by."""
    at(6, raises(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        program(*DIGITS, "--out", tmp_path / "run")
    assert full_memory(ValueError("batch")) is lost_reader(RuntimeError("DataLoader")) is None


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["baseline", "metaaugment"])
def test_a_run_that_diverges_comes_to_its_end(method: str, tmp_path: Path, capsys: Captured) -> None:
    """Its log is JSON, which has no word for what is no number, and the report says what it was."""
    flags = ("--method", method, "--lr", "1e29", "--out", tmp_path / "run")
    with pytest.warns(UserWarning, match="a gradient is not finite and has no effect"):
        assert program(*DIGITS, *flags) == 0
    assert "loss not finite" in capsys.readouterr().out
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    log = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["epoch"] for row in log] == [1, 2, 3]
    assert log[-1]["train_loss"] is None
    assert log[-1]["skipped"] > 0
    json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=pytest.fail)
    assert program("report", tmp_path / "run", "--out", tmp_path / "report.html") == 0


# -- what a run reads --------------------------------------------------------------------------------------------------

# Three epochs of five steps.
FILES = ("--network", "small-cnn", "--size", "16", "--batch", "8", "--epochs", "3", "--every", "2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "mine", {"cat": 30, "dog": 30}, side=24)


@pytest.fixture(scope="module")
def undisturbed_files(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "files"
    assert program("train", "folder", "--data", images, *FILES, "--workers", "0", "--out", out) == 0
    return out


# The program, one of whose readers is killed behind the eighth step, as the kernel does where memory is short.
STRUCK = """
import multiprocessing, os, signal, sys, time
from metaaugment.lab import cli
from metaaugment.lab.training.trainer import Trainer

add = Trainer._add

def add_and_strike(trainer, seen):
    add(trainer, seen)
    if trainer.learner.steps == 8:
        trainer.checkpoints.settle()
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        while True:  # until its end is heard of
            time.sleep(0.1)

Trainer._add = add_and_strike
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), ""),
        (EOFError(), ""),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "was killed"),
        (RuntimeError("Caught RuntimeError in pin memory thread.\nDataLoader worker (pid(s) 7, 8) exited unexpectedly"),
         "is gone"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly with exit code 1. Details lost"), "is gone"),
    ],
)  # fmt: skip
def test_a_reader_that_is_lost_in_any_way_is_recognised(error: Exception, how: str) -> None:
    """By what torch was doing just then."""
    assert (lost_reader(error) or "").startswith(f"a process that reads images {how}")
    assert lost_reader(FileNotFoundError(2, "No such file", "a.png")) is None


def test_a_reader_that_is_killed_is_one_sentence(images: Path, undisturbed_files: Path, tmp_path: Path) -> None:
    words = [*FILES, "--data", str(images), "--workers", "2", "--out", str(tmp_path / "run")]
    ended = subprocess.run([sys.executable, "-c", STRUCK, "train", "folder", *words], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "a process that reads images was killed (Killed), as happens when memory is short; " in ended.stderr
    command = advised(ended.stderr)
    assert command[command.index("--workers") + 1] == "1"
    assert program(*command) == 0
    assert_same_end(tmp_path / "run", undisturbed_files)


def test_asking_whether_a_folder_is_locked_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked by locking it, which wiped out who had it last and could refuse a training that began just then."""
    assert not folder.is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with folder.locked(tmp_path, "the first launch"):
        assert folder.is_locked(tmp_path)
    assert not folder.is_locked(tmp_path)
    assert folder.last_locked(tmp_path) == "the first launch"
    asking = os.open(tmp_path / folder.LOCK, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(asking))
    with folder.locked(tmp_path):
        assert folder.is_locked(tmp_path)


def wait(ready: Connection) -> None:
    ready.send(True)
    ready.recv()


def test_readers_do_not_keep_the_folder_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """They are forked while it is locked, and live on for some seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with folder.locked(tmp_path):
        reader = context.Process(target=wait, args=(there,))
        reader.start()
        here.recv()
        with pytest.raises(ValueError, match="another process is training into"), folder.locked(tmp_path):
            pass
    with folder.locked(tmp_path):
        assert reader.is_alive()
    here.send(True)
    reader.join()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_images_that_are_gone_in_mid_run(
    workers: str, images: Path, undisturbed_files: Path, tmp_path: Path, capsys: Captured, at: Any
) -> None:
    """As with a disk that is unplugged; plugged in again, the run goes on."""
    away = images.with_name("away")
    # Within the second epoch, with readers that are ahead of it by less than what is left.
    at(6, lambda: images.rename(away))
    try:
        train = ("train", "folder", "--data", images, *FILES, "--workers", workers)
        said = refused(capsys, *train, "--out", tmp_path / "run")
    finally:
        away.rename(images)
    assert re.match(rf"metaaugment: {images}/\w+/\d+.png: No such file or directory; everything up to the ", said)
    assert program(*advised(said)) == 0
    assert_same_end(tmp_path / "run", undisturbed_files)


def test_without_its_images_a_run_does_not_go_on(images: Path, tmp_path: Path, capsys: Captured, at: Any) -> None:
    at(8, raises(MemoryError()))
    command = advised(refused(capsys, "train", "folder", "--data", images, *FILES, "--out", tmp_path / "run"))
    away = images.with_name("away")
    images.rename(away)
    try:
        assert str(images) in refused(capsys, *command)
    finally:
        away.rename(images)


# -- what a run writes to ----------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_sentence_and_the_run_goes_on(
    undisturbed: Path, tmp_path: Path, capsys: Captured, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at(6, lambda: patch.setattr(os, "fsync", lambda handle: raises(no_space)()))
        said = refused(capsys, *DIGITS, "--out", tmp_path / "run")
    kept = "everything up to the last checkpoint is kept; once that is fixed, continue with: "
    assert f"No space left on device; {kept}" in said
    assert not list((tmp_path / "run").glob(".*.part"))
    assert program(*advised(said)) == 0
    assert_same(final(tmp_path / "run"), final(undisturbed))


@pytest.mark.parametrize("early", [True, False], ids=["before it", "within it"])
def test_a_folder_that_cannot_be_written_to(
    early: bool, undisturbed: Path, tmp_path: Path, capsys: Captured, at: Any
) -> None:
    out = tmp_path / "run"
    if early:
        tmp_path.chmod(0o555)
    at(6, lambda: [path.chmod(0o555) if path.is_dir() else path.chmod(0o444) for path in (out, *out.iterdir())])
    with ordinary_user():
        said = refused(capsys, *DIGITS, "--out", out)
        assert f"metaaugment: {out}" in said
        assert "Permission denied" in said
        if not early:
            for path in (out, *out.iterdir()):
                path.chmod(0o755)
            assert program(*advised(said)) == 0
            assert_same(final(out), final(undisturbed))
    tmp_path.chmod(0o755)


def test_a_folder_that_is_removed_under_a_run(tmp_path: Path, capsys: Captured, at: Any) -> None:
    """There is nothing left to go on with, and nothing is said of it."""
    at(6, lambda: (tmp_path / "run").rename(tmp_path / "elsewhere"))
    said = refused(capsys, *DIGITS, "--out", tmp_path / "run")
    assert said.startswith(f"metaaugment: {tmp_path / 'run'}/")
    assert said.endswith(": No such file or directory")


@pytest.mark.parametrize("gone", ["log.jsonl", "look.safetensors", "checkpoint.json", ".lock", "checkpoint-before"])
def test_files_that_a_run_can_do_without(
    gone: str, undisturbed: Path, tmp_path: Path, capsys: Captured, at: Any
) -> None:
    at(10, raises(MemoryError()))
    command = advised(refused(capsys, *DIGITS, "--out", tmp_path / "run"))
    for file in (tmp_path / "run").glob(f"{gone}*"):
        file.unlink()
    assert program(*command) == 0
    assert_same_end(tmp_path / "run", undisturbed)
    names = {file.name for file in undisturbed.iterdir()}
    assert {file.name for file in (tmp_path / "run").iterdir()} == names


def test_without_its_recipe_a_folder_is_no_run(tmp_path: Path, capsys: Captured, at: Any) -> None:
    at(10, raises(MemoryError()))
    command = advised(refused(capsys, *DIGITS, "--out", tmp_path / "run"))
    (tmp_path / "run" / "recipe.json").unlink()
    assert "is not a run: it has no recipe.json" in refused(capsys, *command)


# -- killed between two writes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["look.safetensors", "checkpoint.json", checkpoint.LAST, "result.json"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_killed_at_a_file_of_the_last_checkpoint(
    file: str, done: bool, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was not written yet is written when it goes on: no later checkpoint would do it."""
    write, out = atomic.write_atomically, tmp_path / "run"

    def written(target: Path, content: Callable[[Path], object]) -> None:
        dies = target.name == file and len(rows(out)) == 3
        if done or not dies:
            write(target, content)
        if dies:
            raise Killed

    with monkeypatch.context() as patch:
        for module in (sealed, json_file):
            patch.setattr(module, "write_atomically", written)
        with pytest.raises(Killed):
            program(*DIGITS, "--out", out)
    assert program("train", "digits", "--resume", out) == 0
    assert_same_end(out, undisturbed)
    look, wanted = (sealed.load(one / "look.safetensors", "look") for one in (out, undisturbed))
    assert_same(look, wanted)
    stands, wanted = (json.loads((one / "checkpoint.json").read_text()) for one in (out, undisturbed))
    assert stands | dict.fromkeys(("seconds", "commit")) == wanted | dict.fromkeys(("seconds", "commit"))


def test_killed_while_a_checkpoint_is_put_aside(undisturbed: Path, tmp_path: Path) -> None:
    """Then the last one and the one before it are one file, which the system does not put in its own place."""
    for name in (checkpoint.LAST, checkpoint.BEFORE):
        os.link(undisturbed / checkpoint.LAST, tmp_path / name)
    checkpoint.put(tmp_path, {"epoch": 4}, {})
    assert (tmp_path / checkpoint.BEFORE).samefile(undisturbed / checkpoint.LAST)
    assert {file.name for file in tmp_path.iterdir()} == {checkpoint.LAST, checkpoint.BEFORE, "checkpoint.json"}


def test_a_long_epoch_has_checkpoints_within_it(
    undisturbed: Path, tmp_path: Path, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "WITHIN", 0.0)
    monkeypatch.setattr(checkpoint.Checkpoints, "due", lambda self: self.wait() is None)
    at(7, raises(Killed()))
    with pytest.raises(Killed):
        program(*DIGITS, "--out", tmp_path / "run")
    state = checkpoint.load(tmp_path / "run")
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 2), "only the step in flight is lost"
    assert program("train", "digits", "--resume", tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", undisturbed)


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_nothing(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Any
) -> None:
    """Back by a day at each look, as if somebody set it again and again; the run is stopped and goes on as well."""
    now = [time.time()]

    def jumping() -> float:
        now[0] -= 86_400
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    at(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert program(*DIGITS, "--out", tmp_path / "run") == 128 + signal.SIGTERM
    assert program("train", "digits", "--resume", tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", undisturbed)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert all(0 < row["seconds"] < 600 for row in log)


# Where the time of day is asked for: it stands at the foot of a page.
TIME_OF_DAY = {"lab/report/page.py"}


def test_nothing_is_decided_by_the_time_of_day() -> None:
    """Durations and patience are measured by clocks that nobody sets."""
    asks = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"))
    }
    assert asks == TIME_OF_DAY
