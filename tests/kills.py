"""Kills the program at random moments, again and again, and compares its final results with those of undisturbed runs.

    python tests/kills.py --kills 50 --seed 0

Training, export, report and search run in child processes that are forked after the imports, so that no kill is spent
on those. A kill comes at a moment drawn from the duration of the undisturbed command; every third one waits from there
until a file is being written. Then the same command is given again, and if it is refused, it continues as the sentence
says. After each kill, all files must be whole.
"""

import argparse
import contextlib
import json
import math
import mmap
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# What the children need is imported here, once.
import metaaugment.lab.search.run  # noqa: F401
from metaaugment import LearnedPolicy
from metaaugment.files import sealed
from metaaugment.lab import cli
from metaaugment.lab.baselines import published
from metaaugment.lab.data import dataset
from metaaugment.lab.experiments import export, paper, run  # noqa: F401
from metaaugment.lab.report.page import GENERATOR
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.trainer import Trainer
from metaaugment.observation import Observation

from endings import assert_same, final, rows, timeless

PLACES = ("before its first file", "between files", "in writing one")
STEPS = 4  # of an epoch of the size below
SMALL = ("--size", "16", "--per-class", "20", "--batch", "50", "--every", "2")
OLD_PAGE = f"<meta name=generator content='{GENERATOR}'>the page before\n"


@dataclass(frozen=True)
class Command:
    """A command that writes into a folder of its own.

    Args:
        words: the command, for a folder.
        outcome: its result there, to be compared with that of an undisturbed command.
        check: raises unless what is there after a kill is whole; also given the undisturbed outcome.
        kept: if it trains, the steps of training that would not be repeated.
        prepare: makes what is there before the command.
    """

    words: Callable[[Path], Sequence[object]]
    outcome: Callable[[Path], object]
    check: Callable[[Path, object], object]
    kept: Callable[[Path], int] | None = None
    prepare: Callable[[Path], object] = lambda folder: folder.mkdir()


@dataclass
class Tally:
    """What became of the kills of one command."""

    seconds: float
    places: Counter[str] = field(default_factory=Counter)
    ends: int = 0  # how often it finished, each time with the undisturbed outcome
    lost: list[int] = field(default_factory=list)  # steps that a kill cost

    @property
    def kills(self) -> int:
        return self.places.total()


# -- the four commands -------------------------------------------------------------------------------------------------


def training(folder: Path) -> Command:
    return Command(
        words=lambda out: ("train", "digits", *SMALL, "--epochs", 12, "--out", out),
        outcome=run_of,
        check=lambda out, wanted: [readable(file) for file in out.iterdir()],
        kept=steps_kept,
        prepare=lambda out: None,
    )


def exporting(folder: Path) -> Command:
    """The file is absent or whole: an existing policy is never overwritten."""

    def outcome(out: Path) -> object:
        LearnedPolicy.load(out / "policy.safetensors")
        return sealed.load(out / "policy.safetensors", "policy")

    def check(out: Path, wanted: object) -> None:
        if (out / "policy.safetensors").exists():
            assert_same(outcome(out), wanted)

    return Command(lambda out: ("export", a_run(folder), out / "policy.safetensors"), outcome, check)


def reporting(folder: Path) -> Command:
    """The page is the old one or the whole new one."""

    def outcome(out: Path) -> str:
        return re.sub(r"made [\d-]+ [\d:]+ by", "made by", (out / "report.html").read_text())

    def check(out: Path, wanted: object) -> None:
        assert outcome(out) in (OLD_PAGE, wanted), "half a page"

    def prepare(out: Path) -> None:
        out.mkdir()
        (out / "report.html").write_text(OLD_PAGE)

    return Command(lambda out: ("report", a_run(folder), "--out", out / "report.html"), outcome, check, None, prepare)


def searching_by_dada(folder: Path) -> Command:
    return Command(
        words=lambda out: ("search", "dada", "digits", *SMALL, "--epochs", 8, "--out", out),
        outcome=lambda out: (published.find(out / "policy.json"), trials(out), run_of(out / "training")),
        check=lambda out, wanted: [readable(file) for file in out.rglob("*")],
        kept=lambda out: steps_kept(out / "training"),
        prepare=lambda out: None,
    )


def searching_by_pba(folder: Path) -> Command:
    """Several trainings in turn, some of which continue from others."""
    sizes = ("--epochs", 4, "--trials", 4, "--interval", 2)
    return Command(
        words=lambda out: ("search", "pba", "digits", *SMALL, *sizes, "--out", out),
        outcome=lambda out: (published.find(out / "policy.json"), trials(out)),
        check=lambda out, wanted: [readable(file) for file in out.rglob("*")],
        prepare=lambda out: None,
    )


COMMANDS = {
    "train": training, "export": exporting, "report": reporting, "search dada": searching_by_dada,
    "search pba": searching_by_pba,
}  # fmt: skip


def a_run(folder: Path) -> Path:
    """The run that is exported and reported, trained once."""
    out = folder / "run"
    if not out.exists():
        assert attempt(("train", "digits", *SMALL, "--epochs", 3, "--out", out), folder / "run.out") == 0
    return out


def run_of(out: Path) -> dict[str, Any]:
    """Network, log and numbers of a run without its times."""
    found: dict[str, Any] = {"log": rows(out), checkpoint.LAST: final(out)}
    for file in (out / name for name in ("recipe.json", "checkpoint.json", "result.json")):
        found[file.name] = timeless(json.loads(file.read_text())) if file.exists() else None
    look = out / checkpoint.LOOK
    return found | {look.name: sealed.load(look, "look") if look.exists() else None}


def trials(out: Path) -> list[dict[str, Any]]:
    """The trials of a search; half a line that a kill left does not count."""
    rows = (out / "trials.jsonl").read_text().splitlines()
    return [timeless(json.loads(row)) for row in rows if row.endswith("}")]


def readable(file: Path) -> None:
    """Raises for a file that is not whole. A log may end in half a line, which does not count."""
    if file.suffix == ".json":
        json.loads(file.read_text())
    elif file.suffix == ".safetensors":
        sealed.load(file, "look" if file.name == checkpoint.LOOK else "checkpoint")


def steps_kept(out: Path) -> int:
    state = checkpoint.load(out) if out.exists() else None
    return 0 if state is None else state["epoch"] * STEPS + state["step"]


# -- children ----------------------------------------------------------------------------------------------------------

_made = mmap.mmap(-1, 8)  # steps of a child's training, which the child counts here


def counted(add: Callable[[Trainer, Observation], None]) -> Callable[[Trainer, Observation], None]:
    def add_and_count(trainer: Trainer, seen: Observation) -> None:
        add(trainer, seen)
        _made[:] = struct.pack("q", trainer.learner.steps)

    return add_and_count


def begin(words: Sequence[object], said: Path) -> int:
    """Call the program in a forked child, with its output in a file; returns the child's process id."""
    _made[:] = bytes(8)
    child = os.fork()
    if child == 0:
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        status: object = 1
        try:
            cli.main([str(word) for word in words])
            status = 0
        except SystemExit as end:
            status = end.code
        finally:
            sys.stdout.flush()
            os._exit(status if isinstance(status, int) else 1)
    return child


def attempt(words: Sequence[object], said: Path, killed: Callable[[float], bool] = lambda passed: False) -> int | None:
    """The exit status of a call; None if it was killed, which `killed` decides, given the seconds passed."""
    started, child = time.monotonic(), begin(words, said)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if killed(time.monotonic() - started):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.0002)


# -- the kills ---------------------------------------------------------------------------------------------------------


def torment(command: Command, kills: int, folder: Path, draw: random.Random) -> Tally:
    """Kill a command `kills` times; whenever it finishes nevertheless, compare its outcome and begin anew."""
    whole = folder / "whole"
    command.prepare(whole)
    words, started = command.words(whole), time.monotonic()
    assert attempt(words, folder / "said") == 0, (folder / "said").read_text()
    tally = Tally(time.monotonic() - started)
    wanted, files = command.outcome(whole), names(whole)
    while tally.kills < kills:
        out = folder / f"killed-{tally.ends}"
        command.prepare(out)
        to_the_end(command, out, kills, tally, wanted, draw)
        assert_same(command.outcome(out), wanted, str(out))
        assert names(out) == files, f"{out} holds {names(out)}, and {whole} {files}"
        tally.ends += 1
    return tally


def to_the_end(command: Command, out: Path, kills: int, tally: Tally, wanted: object, draw: random.Random) -> None:
    words, said = command.words(out), out.with_suffix(".said")
    while True:
        moment = draw.uniform(0, tally.seconds) if tally.kills < kills else math.inf
        before = unfinished(out)
        status = attempt(words, said, falling(out, moment, aimed=tally.kills % 3 == 2))
        if status is None:
            tally.places[place(out, bool(unfinished(out) - before))] += 1
            command.check(out, wanted)
            if command.kept is not None:
                tally.lost.append(max(0, struct.unpack("q", _made[:])[0] - command.kept(out)))
        elif status == 2 and (resumed := re.search(r"with --resume (\S+),", said.read_text())):
            words = [*words[: words.index("--out")], "--resume", resumed[1]]
        elif status == 2 and "exists already; choose another name" in said.read_text():
            return  # it was killed after its work
        else:
            assert status == 0, said.read_text()
            return


def falling(out: Path, moment: float, aimed: bool) -> Callable[[float], bool]:
    """For `attempt`, whether to kill: from a moment on, and if aimed, only while a file is being written."""
    before = unfinished(out)
    return lambda passed: passed >= moment and (not aimed or bool(unfinished(out) - before))


def unfinished(out: Path) -> set[tuple[Path, int, int]]:
    """Files that are being written, or were when a process was killed, each with its present state."""
    found = set()
    for part in out.rglob(".*.part") if out.exists() else ():
        with contextlib.suppress(FileNotFoundError):  # it is in place by now
            found.add((part, part.stat().st_ino, part.stat().st_mtime_ns))
    return found


def names(out: Path) -> list[str]:
    return sorted(str(file.relative_to(out)) for file in out.rglob("*"))


def place(out: Path, writing: bool) -> str:
    """Where a kill fell, relative to the files that a command writes."""
    begun = out.exists() and any(file.is_file() and not file.name.startswith(".") for file in out.rglob("*"))
    if (out / "report.html").exists():
        begun = (out / "report.html").read_text() != OLD_PAGE
    return PLACES[2] if writing else PLACES[1] if begun else PLACES[0]


def shares(kills: int, commands: Sequence[str]) -> dict[str, int]:
    """Kills of each command: equally many, and the remainder for the first ones."""
    return {name: kills // len(commands) + (at < kills % len(commands)) for at, name in enumerate(commands)}


def table(tallies: dict[str, Tally]) -> str:
    heads = ("command", "seconds", "kills", *PLACES, "ends compared", "steps lost, mean", "most")
    rows = [heads]
    for name, tally in tallies.items():
        lost = (f"{sum(tally.lost) / len(tally.lost):.1f}", str(max(tally.lost))) if tally.lost else ("–", "–")
        counts = (tally.kills, *(tally.places[one] for one in PLACES), tally.ends)
        rows.append((name, f"{tally.seconds:.1f}", *map(str, counts), *lost))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # children are forked, which would lose other threads
    Trainer._add = counted(Trainer._add)  # type: ignore[method-assign]
    dataset("digits", size=16)
    draw, tallies = random.Random(asked.seed), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, kills in shares(asked.kills, asked.commands).items():
            own = Path(folder) / name.replace(" ", "-")
            own.mkdir()
            tallies[name] = torment(COMMANDS[name](Path(folder)), kills, own, draw)
    print(table(tallies))
    print(f"{sum(tally.kills for tally in tallies.values())} kills; every end is the undisturbed one")


if __name__ == "__main__":
    main()
