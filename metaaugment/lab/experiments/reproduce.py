"""Runs what is missing of the paper's tables: several runs at once, within a time budget, continued after a stop."""

import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from rich.console import Console

from metaaugment.files.atomic import write_atomically
from metaaugment.lab.data.catalog import check_there
from metaaugment.lab.experiments import results
from metaaugment.lab.experiments.flags import refuse
from metaaugment.lab.experiments.jobs import Job, Search, Where, Work
from metaaugment.lab.experiments.tables import Row
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.machine import choose_device
from metaaugment.lab.words import duration, number_of

# Trainings that share a device: on an H200 four of WRN-40-2 at once took 0.65 of the time they take in turn.
AT_ONCE = {"cuda": 4, "cpu": 1}
LOOK_EVERY = 0.2  # seconds between looks at the trainings under way
NEIGHBOURS = 5.0  # seconds between looks for trainings that others started, which take some seconds to begin
NEWS = 60.0  # seconds between lines on how far the trainings are
Worries = Callable[[Path], Sequence[str]]  # sentences on what looks wrong in the run of a folder
ROOM = 2**20  # bytes; a result and its course take less
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(budget: str) -> float:
    """The seconds of a budget such as 90s, 25m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--budget is {budget!r}; it must be a time such as 90s, 25m or 2h")
    return float(found[1]) * UNITS[found[2]]


# -- the plan ----------------------------------------------------------------------------------------------------------


def planned(rows: Sequence[Row], seeds: int, epochs: int | None, entries: Sequence[str], where: Where) -> list[Work]:
    """Runs whose result is missing, row by row and seed by seed, each search before the first run that waits for it.

    What has begun comes first, and what the paper does not have comes last in its row. A folder that holds a different
    run or search is refused, and so is a policy of a different search.
    """
    known = {entry.name for row in rows for entry in row.entries}
    if unknown := [name for name in entries if name not in known]:
        choices = ", ".join(sorted(known))
        way = f"choose from {choices}" if known else "name the table or row that has it, such as table-3"
        raise ValueError(f"--methods has {unknown[0]!r}; {way}")
    jobs = [
        Job(row, entry, epochs, where, seed)
        for row in rows for stands_in in (False, True) for seed in range(seeds) for entry in row.entries
        if entry.stands_in == stands_in and (not entries or entry.name in entries)
    ]  # fmt: skip
    missing = [job for job in jobs if not job.result.exists()]
    sources = {source.folder: source for job in missing if (source := job.source) is not None}
    for work in (*missing, *sources.values()):
        work.check()
    for job in {(job.row.recipe, job.entry.name): job for job in missing}.values():
        job.check_policy()
    in_order: dict[Path, Work] = {}
    for job in missing:
        for work in (search, job) if isinstance(search := job.waits_for, Search) else (job,):
            in_order.setdefault(work.folder, work)
    return sorted(in_order.values(), key=lambda work: not work.begun)


def in_words(plan: Sequence[Work], report: Path) -> list[str]:
    """A plan, line by line, with the time that kept runs of the same entry took; then why others cannot begin."""
    why = obstacles(plan, {work.folder for work in plan}, report)
    begins = [work for work in plan if work not in why]
    lines = [f"{work}{', begun' if work.begun else ''}{work.usual_time}" for work in begins]
    return [*lines, f"{number_of('run', sum(isinstance(work, Job) for work in begins))} to do", *why.values()]


def obstacles(waiting: Iterable[Work], own: Container[Path], report: Path) -> dict[Work, str]:
    """Work that waits for something other than its turn, with the reason. `own`: folders of what is done beside it."""
    why = {}
    for work in waiting:
        if work.busy:
            training = f"another process is training into {work.folder}"
            why[work] = f"{work}: {training}; once that has ended, the same command keeps its result"
        elif work.waits_for is not None and work.waits_for.folder not in own:
            why[work] = f"{work} waits for the policy of {work.waits_for.made_by(report)}"
    return why


# -- the pool of processes ---------------------------------------------------------------------------------------------


class Queue:
    """Runs trainings in processes, `at_once` at a time, until none is left or the time is over."""

    def __init__(self, jobs: Sequence[Work], at_once: int, console: Console, worries: Worries | None = None) -> None:
        self.waiting, self.at_once, self.console = list(jobs), at_once, console
        self.worries = worries or (lambda folder: [])
        self.live: dict[Work, tuple[subprocess.Popen[bytes], str | None]] = {}  # and who was last in the folder before
        self.failed: dict[Work, str] = {}  # with the reason
        self.unkept: dict[Work, OSError] = {}  # finished, but could not be put among the results
        self.kept = 0

    def run(self, seconds: float | None) -> None:
        """Run the queue; raises `Interrupted` after a signal. Trainings that are stopped keep their checkpoints."""
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
                        states = (f"{job.name} {job.progress()}" for job in self.live)
                        self._say(f"{', '.join(states)}; {len(self.waiting)} waiting")
                    if interruption.signum is not None:
                        raise Interrupted(interruption.signum)
                    if seconds is not None and now - began > seconds:
                        return
            finally:
                self._stop()

    def _begin(self) -> bool:
        """Start as many as are allowed at once; returns whether any is under way."""
        begun = False
        for job in list(self.waiting):
            if len(self.live) >= self.at_once:
                break
            before = run_folder.last_locked(job.folder)
            if job.finished:  # but not kept: `reproduce` was killed in between
                self.waiting.remove(job)
                self._keep(job)
            elif not job.busy and self._ready(job):
                if not job.begun:
                    job.beside.unlink(missing_ok=True)  # left by a run that was moved away
                what = "continues" if job.begun else "begins"
                try:
                    self.live[job] = job.start(), before
                except OSError:  # memory or processes are short; there will be more when another training ends
                    if not self.live:
                        raise
                    break
                self.waiting.remove(job)
                self._say(f"{job} {what}")
                begun = True
        if begun:
            self._note_neighbours()
        return bool(self.live)

    def _ready(self, job: Work) -> bool:
        try:
            return job.ready()
        except (OSError, ValueError) as error:  # in the run whose policy it needs; others are not affected
            self.waiting.remove(job)
            self._fail(job, str(error))
            return False

    def _note_neighbours(self) -> None:
        """Note how many trainings there are at a time: our own, and those of others in the same folder of runs."""
        own = {job.folder for job in self.live}
        places = {job.where.runs for job in self.live}
        locks = (lock for runs in places for depth in ("*", "*/*") for lock in runs.glob(f"{depth}/{run_folder.LOCK}"))
        number = len(own) + sum(run_folder.is_locked(lock.parent) for lock in locks if lock.parent not in own)
        for job in self.live:
            job.shares(number)

    def _collect(self, stopped: bool = False) -> None:
        """Take in what has ended: results are kept, failures reported; what was stopped, or another does now, waits."""
        for job, (process, before) in list(self.live.items()):
            if process.poll() is None:
                continue
            del self.live[job]
            if job.finished:
                self._keep(job)
            elif stopped or job.taken(before):
                self.waiting.insert(0, job)
            else:
                self._fail(job, job.last_words(process.returncode))

    def _keep(self, job: Work) -> None:
        try:
            self._say(f"{job}: {job.keep()}")
        except ValueError as error:
            self._fail(job, str(error))
        except OSError as error:  # a full disk, say; what was trained is safe in its folder
            self.unkept[job] = error
            self._say(self._why_unkept(job))
        else:
            if isinstance(job, Job):
                self.kept += 1
                for sentence in self.worries(job.folder):
                    self._say(f"{job}: {sentence}")

    def _stop(self) -> None:
        """Ask all trainings to stop after a checkpoint, and wait for them."""
        for process, _ in self.live.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in self.live.values():
            process.wait()
        self._collect(stopped=True)

    def _fail(self, job: Work, words: str) -> None:
        self.failed[job] = words
        self._say(f"{job} failed: {words}")

    def _why_unkept(self, job: Work) -> str:
        reason = self.unkept[job]
        return (
            f"{job} is whole in {job.folder}, but cannot be kept: {reason.filename}: {reason.strerror}; once that is "
            "fixed, the same command keeps it"
        )

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True)

    @property
    def left(self) -> int:
        return len(self.waiting) + len(self.live) + len(self.unkept)

    def held_up(self, report: Path) -> dict[Work, str]:
        """Work that waits for something other than its turn, with the reason."""
        own = {job.folder for job in (*self.waiting, *self.failed, *self.unkept)}
        return {job: self._why_unkept(job) for job in self.unkept} | obstacles(self.waiting, own, report)


# -- all of it ---------------------------------------------------------------------------------------------------------


def check(seeds: int, budget: str | None, epochs: int | None, at_once: int | None, where: Where, report: Path) -> None:
    """Refuse, before hours of training and not after, what would keep a reproduction or its report from being made."""
    for name, value in {"seeds": seeds, "epochs": epochs, "at_once": at_once}.items():
        refuse(name, value, value is None or value >= 1, "a whole number of at least 1")
    if budget is not None:
        seconds_of(budget)
    choose_device(where.place.device)
    if report.is_dir():
        raise ValueError(f"--report is {report}, which is a folder; choose the name of a file")
    if report.exists() and results.MADE_BY not in report.read_text(errors="replace")[:200]:
        raise ValueError(f"{report} is not a report of reproduce; choose another name with --report, or move it away")
    for name, folder in (("--results", where.results), ("--runs", where.runs)):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{name} is {folder}, which is a file; choose a folder")
    results.markdown(where.results)


def _try_writing(folder: Path) -> None:
    """Refuse a folder of results that nothing can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
    except OSError as error:
        raise ValueError(
            f"no result can be written to {folder}: {error.strerror}; choose another folder with --results, or make "
            "that one writable"
        ) from None


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
    check(seeds, budget, epochs, at_once, where, report)
    jobs = planned(rows, seeds, epochs, entries, where)
    report.parent.mkdir(parents=True, exist_ok=True)
    queue = Queue(jobs, at_once or AT_ONCE[choose_device(where.place.device)], console, worries)
    held_up = queue.held_up(report)
    waiting = [job for job in jobs if job not in held_up and not job.finished]
    # What has begun with --data remembers that folder.
    needed = (job.dataset for job in waiting if where.place.recalled(job.folder) == where.place)
    check_there(needed, where.place.data)
    for folder in dict.fromkeys((job.result if isinstance(job, Job) else job.makes).parent for job in jobs):
        _try_writing(folder)
    began = time.monotonic()
    unwritten = None
    try:
        queue.run(None if budget is None else seconds_of(budget))
    finally:
        found = results.files(where.results)
        try:
            if found:  # an empty report would replace an existing one
                text = results.markdown(where.results)
                write_atomically(report, lambda part: part.write_text(text, encoding="utf-8"))
        except (OSError, ValueError) as error:  # must not hide an interruption
            unwritten = error
        left, took = queue.left, duration(time.monotonic() - began)
        held_up = queue.held_up(report)
        console.print(
            f"{number_of('run', queue.kept)} finished in {took}, {len(queue.failed)} failed, {left} left"
            + (": run the same command to continue" if left > len(held_up) else "")
            + (f"; {report} was not written: {unwritten}" if unwritten else "")
            + (f"; {report}" if found and not left and not unwritten else "")
            + ("" if found or left or queue.failed else f"; {where.results} holds no result"),
            *held_up.values(), sep="\n", soft_wrap=True, markup=False,
        )  # fmt: skip
    for job, words in queue.failed.items():
        raise ValueError(f"{job} failed: {words}; its full output is in {job.folder}.log")
    for error in (*queue.unkept.values(), unwritten):
        if error is not None:
            raise error
