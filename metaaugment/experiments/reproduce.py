"""Runs the paper's tables: what is missing, side by side, within a time, and on from where it stopped."""

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from metaaugment.experiments import results
from metaaugment.experiments.export import learned_policy
from metaaugment.experiments.flags import flag, flags
from metaaugment.experiments.paper import RECIPES
from metaaugment.experiments.place import Place
from metaaugment.experiments.recipe import Recipe
from metaaugment.experiments.tables import ROWS, Entry, Row
from metaaugment.sealed import write_atomically
from metaaugment.training import folder as run_folder
from metaaugment.training.interruption import Interrupted, Interruption
from metaaugment.training.log import LOG
from metaaugment.training.machine import choose_device
from metaaugment.training.progress import duration, number_of

# Trainings that share a GPU: on an H200 four of WRN-40-2 took 0.65 of the time of one after the other.
AT_ONCE = {"cuda": 4, "cpu": 1}
LOOK_EVERY = 0.2  # seconds between looks at those under way
NEIGHBOURS = 5.0  # seconds between looks for trainings of others, which take some to begin
NEWS = 60.0  # seconds between lines on how far they are
Worries = Callable[[Path], Sequence[str]]  # what is to be worried about in the run of a folder
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

    def __str__(self) -> str:
        return f"{self.row.recipe} {self.name}"

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
    def source(self) -> "Job | None":
        """The run whose learned policy it is trained under."""
        if self.entry.under is None:
            return None
        row = ROWS[self.entry.under[0]]
        (entry,) = (entry for entry in row.entries if entry.name == self.entry.under[1])
        return Job(row, entry, 0, self.epochs, self.where)

    @property
    def policy(self) -> Path | None:
        """The file of that policy."""
        return self.source and self.source.folder.with_name(f"{self.source.entry.name}.safetensors")

    @property
    def recipe(self) -> Recipe:
        return self.row.run(self.entry, self.seed, self.epochs, self.policy)

    @property
    def begun(self) -> bool:
        return (self.folder / run_folder.RECIPE).exists()

    @property
    def finished(self) -> bool:
        return (self.folder / run_folder.RESULT).exists()

    @property
    def busy(self) -> bool:
        """Whether another process trains into its folder, as one does whose `reproduce` was killed."""
        return run_folder.is_locked(self.folder)

    def check(self) -> None:
        """Refuse a folder that holds another run than this one."""
        if not self.begun and not self.finished:
            return
        file = self.folder / run_folder.RECIPE
        way = "move the folder away, or choose another --runs"
        if not self.begun:
            raise ValueError(f"{self.folder} has a result, but no {run_folder.RECIPE} that says of what; {way}")
        try:
            recorded = Recipe.from_json(run_folder.read_json(file))
        except ValueError as error:
            raise ValueError(f"{file} cannot be understood: {error}; {way}") from None
        recipe = self.recipe
        for name in (field.name for field in fields(Recipe)):
            found, meant = getattr(recorded, name), getattr(recipe, name)
            if _written_alike(found) != _written_alike(meant):
                raise ValueError(f"{self.folder} was begun with {flag(name)} {found}, but {self} has {meant}; {way}")

    @property
    def waits_for(self) -> "Job | None":
        """The run that must be finished before it can begin."""
        source, policy = self.source, self.policy
        return None if source is None or policy is None or policy.exists() or source.finished else source

    def ready(self) -> bool:
        """Whether what it needs is there; the policy of another entry is exported as soon as that one is finished."""
        if self.waits_for is not None:
            return False
        if self.source is not None and self.policy is not None and not self.policy.exists():
            learned_policy(self.source.folder).save(self.policy, half=True)
        return True

    def made_by(self, report: Path) -> str:
        """Its name and the command that makes it."""
        epochs = [] if self.epochs is None else ["--epochs", str(self.epochs)]
        folders = ["--runs", str(self.where.runs), "--results", str(self.where.results), "--report", str(report)]
        what = [self.row.recipe, "--methods", self.entry.name, "--seeds", str(self.seed + 1), *epochs]
        command = shlex.join(["metaaugment", "reproduce", *what, *self.where.place.flags(), *folders])
        # A run whose result is kept is not made again.
        first = f", whose folder is gone: move {self.result} away" if self.result.exists() else ""
        return f"{self}{first}; make it with: {command}"

    def start(self) -> "subprocess.Popen[bytes]":
        """The training in a process of its own, its output in a file beside the folder of the run."""
        recipe = self.recipe
        if self.begun:  # with where its policy lies now, as folders may have been moved
            more = ["--resume", str(self.folder), *(["--policy", str(self.policy)] if self.policy else [])]
        else:
            more = ["--out", str(self.folder), *flags(recipe, RECIPES[recipe.name]())]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "metaaugment", "train", recipe.name, *self.where.place.flags(), *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def beside(self) -> Path:
        """The file of how many trainings there were at a time, at most; a run that goes on later has it from there."""
        return self.folder.parent / f"{self.name}.beside"

    @property
    def side_by_side(self) -> int:
        text = self.beside.read_text(errors="replace").strip() if self.beside.exists() else ""
        return int(text) if text.isdecimal() else 1

    def shares(self, number: int) -> None:
        """Note that it is one of so many trainings."""
        if number > self.side_by_side:
            write_atomically(self.beside, lambda part: part.write_text(f"{number}\n"))

    def keep(self) -> dict[str, Any]:
        """The run's result as a file of its own, and beside it its course, where there is a log to read it from."""
        result = results.read_result(self.folder / run_folder.RESULT)
        self.result.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            results.write_course(results.course(self.folder / LOG), results.course_file(self.result))
        if self.policy is not None:  # by its row and entry: where folders lie on this machine is nobody's business
            name = str(Path(*self.policy.parts[-2:]))
            result |= {"policy": name, "recipe": {**result.get("recipe", {}), "policy": name}}
        result |= {"entry": self.entry.name, "side_by_side": self.side_by_side}
        run_folder.write_json(self.result, result)
        return result

    def epochs_done(self) -> int:
        log = self.folder / LOG
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def last_words(self, status: int) -> str:
        """What it said last; of a process that was killed, by what."""
        if status < 0:
            return f"killed by signal {-status}, as happens when memory is short; the same command continues it"
        lines = (self.folder.parent / f"{self.name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _written_alike(value: object) -> object:
    """Of a policy its row and entry, which mean the same where folders were moved or are named from elsewhere."""
    return value.parts[-2:] if isinstance(value, Path) else value


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
    """Runs whose result is missing: those begun first, then one seed after the other; a folder of others is refused."""
    known = {entry.name for row in rows for entry in row.entries}
    if unknown := [name for name in entries if name not in known]:
        raise ValueError(f"--methods has {unknown[0]!r}; choose from {', '.join(sorted(known))}")
    jobs = [
        Job(row, entry, seed, epochs, where)
        for seed in range(seeds) for row in rows for entry in row.entries if not entries or entry.name in entries
    ]  # fmt: skip
    missing = [job for job in jobs if not job.result.exists()]
    for job in missing:
        job.check()
        if job.source is not None:
            job.source.check()
    return sorted(missing, key=lambda job: not job.begun)


class Queue:
    """Trainings in processes, so many at once, until none is left or the time is over."""

    def __init__(self, jobs: Sequence[Job], at_once: int, console: Console, worries: Worries | None = None) -> None:
        self.waiting, self.at_once, self.console = list(jobs), at_once, console
        self.worries = worries or (lambda folder: [])
        self.live: dict[Job, subprocess.Popen[bytes]] = {}
        self.failed: dict[Job, str] = {}  # with their last words
        self.kept = 0

    def run(self, seconds: float | None) -> None:
        """Raises `Interrupted` after a signal. Trainings that are stopped keep their checkpoints."""
        began = told = counted = time.monotonic()
        with Interruption() as interruption:
            try:
                while self._begin():
                    time.sleep(LOOK_EVERY)
                    self._collect()
                    now = time.monotonic()
                    if now - counted > NEIGHBOURS:
                        counted = now
                        self._note_neighbours()
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
        """Start as many as there may be; whether any is under way."""
        begun = False
        for job in list(self.waiting):
            if len(self.live) >= self.at_once:
                break
            if job.finished:  # and was not kept, because somebody was killed in between
                self.waiting.remove(job)
                self._keep(job)
            elif self._ready(job) and not job.busy:
                if not job.begun:
                    job.beside.unlink(missing_ok=True)  # of a run that was moved away
                what = "continues" if job.begun else "begins"
                try:
                    self.live[job] = job.start()
                except OSError:  # memory or processes are short; with one of the others there will be more
                    if not self.live:
                        raise
                    break
                self.waiting.remove(job)
                self._say(f"{job} {what}")
                begun = True
        if begun:
            self._note_neighbours()
        return bool(self.live)

    def _ready(self, job: Job) -> bool:
        try:
            return job.ready()
        except ValueError as error:  # of the run whose policy it needs, and not of the others
            self.waiting.remove(job)
            self._fail(job, str(error))
            return False

    def _fail(self, job: Job, words: str) -> None:
        self.failed[job] = words
        self._say(f"{job} failed: {words}")

    def _note_neighbours(self) -> None:
        """How many trainings there are at a time: its own, and those of others into the same folder of runs."""
        own = {job.folder for job in self.live}
        places = {job.where.runs for job in self.live}
        locks = (lock for runs in places for depth in ("*", "*/*") for lock in runs.glob(f"{depth}/{run_folder.LOCK}"))
        number = len(own) + sum(run_folder.is_locked(lock.parent) for lock in locks if lock.parent not in own)
        for job in self.live:
            job.shares(number)

    def _collect(self, stopped: bool = False) -> None:
        """Those that have ended: kept, or told as failures; unfinished ones that were stopped wait again."""
        for job, process in list(self.live.items()):
            if process.poll() is None:
                continue
            del self.live[job]
            if job.finished:
                self._keep(job)
            elif stopped:
                self.waiting.insert(0, job)
            else:
                self._fail(job, job.last_words(process.returncode))

    def _keep(self, job: Job) -> None:
        try:
            result = job.keep()
        except ValueError as error:
            return self._fail(job, str(error))
        self.kept += 1
        accuracy = result[results.accuracy_key(result)]
        self._say(f"{job}: {accuracy:.2%}")
        for sentence in self.worries(job.folder):
            self._say(f"{job}: {sentence}")

    def held_up(self, report: Path) -> dict[Job, str]:
        """Why those wait that wait for something else than their turn."""
        own = {job.folder for job in (*self.waiting, *self.failed)}
        why = {}
        for job in self.waiting:
            if job.busy:
                why[job] = (
                    f"{job}: another process trains into {job.folder}; the same command keeps its result once that "
                    "one has ended"
                )
            elif job.waits_for is not None and job.waits_for.folder not in own:
                why[job] = f"{job} waits for the policy of {job.waits_for.made_by(report)}"
        return why

    def _stop(self) -> None:
        """Ask all to stop behind a checkpoint, and wait."""
        for process in self.live.values():
            process.send_signal(signal.SIGTERM)
        for process in self.live.values():
            process.wait()
        self._collect(stopped=True)

    def _tell(self) -> None:
        states = (f"{job.name} {job.epochs_done()}/{job.recipe.epochs}" for job in self.live)
        self._say(f"{', '.join(states)}; {len(self.waiting)} waiting")

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True)


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
    worries: Worries | None = None,
) -> None:
    """Run what is missing, keep each result as a file, and write the report."""
    if seeds < 1 or (at_once is not None and at_once < 1):
        name, value = ("--seeds", seeds) if seeds < 1 else ("--at-once", at_once)
        raise ValueError(f"{name} is {value}; it must be a whole number of at least 1")
    if epochs is not None and epochs < 1:
        raise ValueError(f"--epochs is {epochs}; it must be a whole number of at least 1")
    seconds = None if budget is None else seconds_of(budget)
    # What would be in the way of the report is better known before hours of training than after.
    if report.is_dir():
        raise ValueError(f"--report is {report}, which is a folder; choose the name of a file")
    for name, folder in (("--results", where.results), ("--runs", where.runs)):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{name} is {folder}, which is a file; choose a folder")
    report.parent.mkdir(parents=True, exist_ok=True)
    results.markdown(where.results)
    jobs = planned(rows, seeds, epochs, entries, where)
    queue = Queue(jobs, at_once or AT_ONCE[choose_device(where.place.device)], console, worries)
    began = time.monotonic()
    unwritten: Exception | None = None
    try:
        queue.run(seconds)
    finally:
        found = results.files(where.results)
        try:
            if found:  # a report of nothing would take the place of another
                text = results.markdown(where.results)
                write_atomically(report, lambda part: part.write_text(text))
        except (OSError, ValueError) as error:  # must not take the place of an interruption
            unwritten = error
        left, took = len(queue.waiting), duration(time.monotonic() - began)
        held_up = queue.held_up(report)
        console.print(
            f"{number_of('run', queue.kept)} finished in {took}, {len(queue.failed)} failed, {left} left"
            + (": run the same command to continue" if left > len(held_up) else "")
            + (f"; {report} was not written: {unwritten}" if unwritten else "")
            + (f"; {report}" if found and not left and not unwritten else "")
            + ("" if found or left or queue.failed else f"; {where.results} holds no result"),
            *held_up.values(), sep="\n", soft_wrap=True, markup=False,
        )  # fmt: skip
    if queue.failed:
        job, words = next(iter(queue.failed.items()))
        raise ValueError(f"{job} failed: {words}; {job.folder}.log has all that it said")
    if unwritten is not None:
        raise unwritten
