"""Fuzzes everything that the program reads from outside: bad files are refused in a sentence, and do no harm.

    python tests/fuzz.py --cases 100000 --seed 0          all targets, by their shares, in two processes
    python tests/fuzz.py --target image --cases 2000      one of them
    python tests/fuzz.py --replay FOLDER                  a case that was at fault, once more

Each case is a folder of files, made from valid ones by `spoiled.py` through Hypothesis. It is on disk before anything
reads it, so that a case that kills the process is known too. A reader may return, or raise a ValueError or OSError of
one sentence; the program may end with status 0 or 2. A case is at fault if a reader raises or says anything else, or

- takes more than 5 s of processor time, or 60 s by the clock;
- takes more than 1 GiB of memory: the largest resident set while the case is read (VmHWM, reset before each one) minus
  the resident set before it. Besides, the address space is limited to 4 GiB more than the process has at its beginning,
  and a failed allocation is a fault even if it is caught;
- starts a program, opens a socket, imports or compiles anything, has a pickle find a class, or writes anywhere but
  into the folder of the case, by Python's audit events. (Allowed are git, which says which commit this is, and code
  that is compiled from our own types for the command line and from the template of the page.)
"""

import argparse
import contextlib
import faulthandler
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.schema_check_mode
from hypothesis import HealthCheck, Phase, given, seed, settings
from PIL import Image, ImageCms  # noqa: F401 - the latter is imported for images in LAB

from harm import Account, Fault, Hang, Watch, clocked, judge, resident
from outside import TARGETS, Files, Seeds, build

ADDRESSES = 2**32  # bytes that a process's address space may grow by
CHUNK = 500


def fuzz(
    name: str, number: int, cases: int, seeds: Seeds, folder: Path, judged: Callable[[Account, int], None]
) -> Account:
    """So many cases of a target, determined by `number`; `judged` is called on each, with its files in `folder`."""
    account = Account()
    began = time.monotonic()

    once = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=cases, database=None, deadline=None, **once)
    @seed(number)
    @given(TARGETS[name].spoil(seeds))
    def one(files: Files) -> None:
        put(folder, files)
        judged(account, account.cases)
        account.cases += 1

    one()
    account.seconds = time.monotonic() - began
    return account


def put(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):  # names that clash
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def ready(seeds: Seeds, folder: Path) -> Watch:
    """Have readers import all that they import when first called, and set the limits."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["METAAUGMENT_DATA"] = str(folder)
    Image.init()
    for name in TARGETS:

        def first(account: Account, case: int, name: str = name) -> None:
            for reader in TARGETS[name].readers:
                with contextlib.suppress(Exception):
                    reader(folder)

        fuzz(name, 0, 1 if name in ("page", "command") else 20, seeds, folder, first)
    put(folder, {"recipe.json": seeds.file("run/recipe.json")})
    build(folder)  # all of the spoiled ones may be refused before their first step
    limit = resident("VmSize") + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return Watch()


def work(jobs: Connection, source: Path, folder: Path, faults: Path, done: Any) -> None:
    """The loop of a process that takes chunks of cases and answers with accounts."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seeds = Seeds(source)
    watch = ready(seeds, folder)
    jobs.send(None)
    known: set[tuple[str, str, str]] = set()
    while (job := jobs.recv()) is not None:
        name, number, cases = job

        def judged(account: Account, case: int, name: str = name, number: int = number) -> None:
            done.value = case
            for fault in judge(name, TARGETS[name], folder, watch, account):
                fault.seed, fault.case = number, case
                key = (fault.target, fault.where, fault.what[:40])
                if key not in known:
                    known.add(key)
                    fault.folder = str(keep(folder, faults, fault))
                account.note(fault)

        jobs.send(fuzz(name, number, cases, seeds, folder, judged))


def keep(folder: Path, faults: Path, fault: Fault) -> Path:
    """Keep the files of a case, and what they did."""
    kept = faults / f"{fault.target}-{fault.seed}-{fault.case}"
    shutil.copytree(folder, kept, dirs_exist_ok=True)
    (kept / "fault.txt").write_text(f"{fault.what}\n\n{fault.told}", errors="backslashreplace")
    return kept


Work = Callable[[Connection, Path, Path, Path, Any], None]


class Worker:
    """A process at work, as seen from outside."""

    def __init__(self, source: Path, folder: Path, faults: Path, work: Work) -> None:
        self.arguments = source, folder, faults, work
        self.folder, self.faults = folder, faults
        self.job: tuple[str, int, int] | None = None
        context = multiprocessing.get_context("spawn")
        self.done = context.Value("q", 0)
        self.jobs, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, source, folder, faults, self.done), daemon=True)
        self.process.start()
        theirs.close()

    def died(self) -> Fault:
        self.process.join()
        assert self.job is not None, "a worker died before it began"
        name, number, _ = self.job
        how = f"the process died with status {self.process.exitcode}"
        fault = Fault(name, how, "the process", seed=number, case=self.done.value)
        fault.folder = str(keep(self.folder, self.faults, fault))
        return fault


def chunks(targets: Sequence[str], cases: int, number: int) -> deque[tuple[str, int, int]]:
    """Cases distributed over targets, in chunks; targets take turns."""
    shares = {name: TARGETS[name].share for name in targets}
    pieces = []
    for place, (name, share) in enumerate(shares.items()):
        left, count = math.ceil(cases * share / sum(shares.values())), 0
        while left > 0:
            pieces.append((count, name, 1000 * (1000 * number + place) + count, min(CHUNK, left)))
            left, count = left - CHUNK, count + 1
    return deque((name, piece, size) for _, name, piece, size in sorted(pieces))


def fuzz_all(
    targets: Sequence[str],
    cases: int,
    number: int,
    workers: int,
    faults: Path,
    say: Callable[[str], None] = print,
    huge: bool = True,
    work: Work = work,
) -> dict[str, Account]:
    """The accounts of all targets; cases at fault are kept in `faults`. `huge`: whether to include huge images."""
    accounts = {name: Account() for name in targets}
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "seeds"
        source.mkdir()
        Seeds.make(source, huge)
        queue = chunks(targets, cases, number)
        total, told = sum(size for *_, size in queue), time.monotonic()
        team = [Worker(source, Path(place) / f"case{n}", faults, work) for n in range(min(workers, len(queue)))]
        while team:
            for connection in wait([worker.jobs for worker in team], 1.0):
                worker = next(worker for worker in team if worker.jobs is connection)
                try:
                    account = worker.jobs.recv()
                except EOFError:
                    fault = worker.died()
                    name, piece, size = worker.job or ("", 0, 0)
                    accounts[name].add(Account(cases=fault.case + 1, faults=[fault]))
                    if size > fault.case + 1:
                        queue.append((name, piece + 500_000, size - fault.case - 1))
                    team[team.index(worker)] = Worker(*worker.arguments)
                    continue
                if account is not None and worker.job is not None:
                    accounts[worker.job[0]].add(account)
                worker.job = queue.popleft() if queue else None
                worker.jobs.send(worker.job)
                if worker.job is None:
                    worker.process.join()
                    team.remove(worker)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                done = sum(account.cases for account in accounts.values())
                done += sum(worker.done.value for worker in team if worker.job)
                say(f"{done:,} of {total:,} cases, {sum(len(account.faults) for account in accounts.values())} faults")
    return accounts


def replay(folder: Path) -> list[Fault]:
    """Run a case that was kept, in this process."""
    name = folder.name.split("-")[0]
    with tempfile.TemporaryDirectory() as place:
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        files.pop("fault.txt", None)
        case = Path(place) / "case"
        put(case, files)
        for reader in TARGETS[name].readers:
            with contextlib.suppress(Exception, Hang), clocked():
                reader(case)  # imports what it imports the first time
        put(case, files)
        return judge(name, TARGETS[name], case, Watch(), Account())


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzing of all that the program reads from outside.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, action="append", help="all if not given")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--faults", type=Path, default=Path("fuzz-faults"), help="folder of the cases at fault")
    parser.add_argument("--replay", type=Path, help="folder of a case")
    asked = parser.parse_args()
    if asked.replay is not None:
        found = replay(asked.replay)
        for fault in found:
            print(f"{fault.told}\n{fault}")
        return int(bool(found))
    began = time.monotonic()
    accounts = fuzz_all(asked.target or list(TARGETS), asked.cases, asked.seed, asked.workers, asked.faults)
    print(f"\n{'target':12}{'cases':>8}{'read':>9}{'refused':>9}{'seconds':>9}{'slowest':>9}{'memory':>9}{'faults':>8}")
    whole = Account()
    for name, account in accounts.items():
        whole.add(account)
        print(_row(name, account))
    print(_row("all", whole))
    for fault in whole.faults:
        print(fault)
    took = time.monotonic() - began
    print(f"{whole.cases:,} cases by seed {asked.seed} in {took:,.0f} s, {len(whole.faults)} faults")
    return int(bool(whole.faults))


def _row(name: str, account: Account) -> str:
    counts = f"{account.cases:8,}{account.read:9,}{account.refused:9,}{account.seconds:9,.0f}"
    return f"{name:12}{counts}{account.slowest:8.2f}s{account.memory / 2**20:6,.0f}MiB{len(account.faults):8}"


if __name__ == "__main__":
    sys.exit(main())
