"""Runs the paper's tables: what is missing, side by side, within a time, and on from where it stopped."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from metaaugment.experiments import results
from metaaugment.experiments.export import learned_policy
from metaaugment.experiments.flags import flags
from metaaugment.experiments.paper import RECIPES
from metaaugment.experiments.place import Place
from metaaugment.experiments.tables import ROWS, Entry, Row
from metaaugment.sealed import write_atomically
from metaaugment.training import folder as run_folder
from metaaugment.training.interruption import Interrupted, Interruption
from metaaugment.training.machine import choose_device
from metaaugment.training.progress import duration

# Trainings that share a GPU: on an H200 four of WRN-40-2 took 0.65 of the time of one after the other.
AT_ONCE = {"cuda": 4, "cpu": 1}
LOOK = 0.2  # seconds between looks at those under way
NEWS = 60.0  # seconds between lines on how far they are
UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Where:
    """Folders of a reproduction: of the runs, which it goes on from, and of the results, which are kept."""

    runs: Path
    results: Path
    place: Place


@dataclass(frozen=True, eq=False)
class Job:
    """One run of an entry."""

    row: Row
    entry: Entry
    seed: int
    epochs: int | None
    where: Where

    @property
    def name(self) -> str:
        return f"{self.entry.name}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.where.runs / folder_name(self.row, self.epochs) / self.name

    @property
    def result(self) -> Path:
        return self.where.results / folder_name(self.row, self.epochs) / f"{self.name}.json"

    @property
    def policy(self) -> Path | None:
        """The file of the policy that it is trained under."""
        if self.entry.under is None:
            return None
        row, entry = self.entry.under
        return self.where.runs / folder_name(ROWS[row], self.epochs) / f"{entry}.safetensors"

    @property
    def begun(self) -> bool:
        return (self.folder / run_folder.RECIPE).exists()

    @property
    def finished(self) -> bool:
        return (self.folder / run_folder.RESULT).exists()

    def ready(self) -> bool:
        """Whether what it needs is there; the policy of another entry is exported as soon as that one is finished."""
        if self.policy is None or self.policy.exists():
            return True
        assert self.entry.under is not None
        source = self.where.runs / folder_name(ROWS[self.entry.under[0]], self.epochs) / f"{self.entry.under[1]}-seed0"
        if not (source / run_folder.RESULT).exists():
            return False
        learned_policy(source).save(self.policy, half=True)
        return True

    def start(self) -> "subprocess.Popen[bytes]":
        """The training in a process of its own, its output in a file beside the folder of the run."""
        recipe = self.row.run(self.entry, self.seed, self.epochs, self.policy)
        more = (
            ["--resume", str(self.folder)]
            if self.begun
            else ["--out", str(self.folder), *flags(recipe, RECIPES[recipe.name]())]
        )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "metaaugment", "train", recipe.name, *self.where.place.flags(), *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def keep(self, side_by_side: int) -> None:
        """The run's result as a file of its own."""
        result = run_folder.read_json(self.folder / run_folder.RESULT)
        self.result.parent.mkdir(parents=True, exist_ok=True)
        run_folder.write_json(self.result, result | {"entry": self.entry.name, "side_by_side": side_by_side})

    def epochs_done(self) -> int:
        log = self.folder / "log.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def last_words(self) -> str:
        lines = (self.folder.parent / f"{self.name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def folder_name(row: Row, epochs: int | None) -> str:
    """With the number of epochs where it is not the recipe's: such figures must not stand among the paper's."""
    return row.recipe if epochs in (None, RECIPES[row.recipe]().epochs) else f"{row.recipe}-{epochs}-epochs"


def seconds_of(budget: str) -> float:
    """Of 90s, 25m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--budget is {budget!r}; it must be a time such as 90s, 25m or 2h")
    return float(found[1]) * UNITS[found[2]]


def planned(rows: Sequence[Row], seeds: int, epochs: int | None, entries: Sequence[str], where: Where) -> list[Job]:
    """Runs whose result is missing: those begun first, then one seed after the other."""
    known = {entry.name for row in rows for entry in row.entries}
    if unknown := [name for name in entries if name not in known]:
        raise ValueError(f"--methods has {unknown[0]!r}; choose of {', '.join(sorted(known))}")
    jobs = [
        Job(row, entry, seed, epochs, where)
        for seed in range(seeds) for row in rows for entry in row.entries if not entries or entry.name in entries
    ]  # fmt: skip
    return sorted((job for job in jobs if not job.result.exists()), key=lambda job: not job.begun)


class Queue:
    """Trainings in processes, so many at once, until none is left or the time is over."""

    def __init__(self, jobs: Sequence[Job], at_once: int, console: Console) -> None:
        self.waiting, self.at_once, self.console = list(jobs), at_once, console
        self.live: dict[Job, subprocess.Popen[bytes]] = {}
        self.beside: dict[Job, int] = {}  # most trainings at a time while it was under way
        self.failed: list[Job] = []
        self.kept = 0

    def run(self, seconds: float | None) -> None:
        """Raises `Interrupted` after a signal. Trainings that are stopped keep their checkpoints."""
        began = told = time.monotonic()
        with Interruption() as interruption:
            try:
                while self._begin() or self.live:
                    time.sleep(LOOK)
                    self._collect()
                    now = time.monotonic()
                    if now - told > NEWS:
                        told = now
                        self._tell()
                    if interruption.signum is not None:
                        raise Interrupted(interruption.signum)
                    if seconds is not None and now - began > seconds:
                        return
            finally:
                self._stop()

    def _begin(self) -> bool:
        for job in list(self.waiting):
            if len(self.live) >= self.at_once:
                break
            if job.finished:  # and was not kept, because somebody was killed in between
                self.waiting.remove(job)
                self._keep(job, 1)
            elif job.ready():
                self.waiting.remove(job)
                self._say(f"{job.row.recipe} {job.name} {'goes on' if job.begun else 'begins'}")
                self.live[job] = job.start()
        for job in self.live:
            self.beside[job] = max(self.beside.get(job, 1), len(self.live))
        return bool(self.live)

    def _collect(self, stopped: bool = False) -> None:
        """Those that have ended: kept, or told as failures; unfinished ones that were stopped wait again."""
        for job, process in list(self.live.items()):
            if process.poll() is None:
                continue
            del self.live[job]
            if job.finished:
                self._keep(job, self.beside[job])
            elif stopped:
                self.waiting.insert(0, job)
            else:
                self.failed.append(job)
                self._say(f"{job.row.recipe} {job.name} failed: {job.last_words()}")

    def _keep(self, job: Job, beside: int) -> None:
        job.keep(beside)
        self.kept += 1
        result = run_folder.read_json(job.result)
        accuracy = result[results.judge(result)]
        self._say(f"{job.row.recipe} {job.name}: {accuracy:.2%}")

    def _stop(self) -> None:
        """Ask all to stop behind a checkpoint, and wait."""
        for process in self.live.values():
            process.send_signal(signal.SIGTERM)
        for process in self.live.values():
            process.wait()
        self._collect(stopped=True)

    def _tell(self) -> None:
        states = (f"{job.name} {job.epochs_done()}/{self._epochs(job)}" for job in self.live)
        self._say(f"{', '.join(states)}; {len(self.waiting)} waiting")

    def _epochs(self, job: Job) -> int:
        return job.epochs or RECIPES[job.row.recipe]().epochs

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, highlight=False, soft_wrap=True)


def reproduce(
    rows: Sequence[Row],
    seeds: int,
    budget: str | None,
    epochs: int | None,
    entries: Sequence[str],
    at_once: int | None,
    where: Where,
    report: Path,
    console: Console,
) -> None:
    """Run what is missing, keep each result as a file, and write the report."""
    if seeds < 1 or (at_once is not None and at_once < 1):
        raise ValueError(f"--seeds is {seeds} and --at-once {at_once}; both must be whole numbers of at least 1")
    seconds = None if budget is None else seconds_of(budget)
    jobs = planned(rows, seeds, epochs, entries, where)
    queue = Queue(jobs, at_once or AT_ONCE[choose_device(where.place.device)], console)
    began = time.monotonic()
    try:
        queue.run(seconds)
    finally:
        if where.results.exists():
            text = results.markdown(where.results)
            write_atomically(report, lambda part: part.write_text(text))
        left, took = len(queue.waiting), duration(time.monotonic() - began)
        console.print(
            f"{queue.kept} runs finished in {took}, {len(queue.failed)} failed, {left} left"
            + (": the same command goes on" if left else f"; {report}" if report.exists() else ""),
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if queue.failed:
        raise ValueError(
            f"{queue.failed[0].row.recipe} {queue.failed[0].name} failed: {queue.failed[0].last_words()}; "
            f"{queue.failed[0].folder}.log has all that it said"
        )
