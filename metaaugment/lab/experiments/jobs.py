"""What a reproduction is made of: runs of a table's entries, and searches for the policies that some of them need.

Each is done by a process of its own, in a folder of its own, from which it can be continued.
"""

import contextlib
import shlex
import statistics
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from metaaugment.files.atomic import write_atomically
from metaaugment.files.sealed import Damaged
from metaaugment.lab.baselines import published
from metaaugment.lab.experiments import results
from metaaugment.lab.experiments.experiment import policy_digest
from metaaugment.lab.experiments.export import learned_policy
from metaaugment.lab.experiments.flags import flag, flags, flags_of
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.tables import ROWS, Entry, Row, folder_name
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.folder import accuracy_key
from metaaugment.lab.training.json_file import read_json, write_json
from metaaugment.lab.training.log import LOG
from metaaugment.lab.words import duration
from metaaugment.learned.policy import LearnedPolicy

AWAY = "move the folder away, or choose another --runs"


@dataclass(frozen=True)
class Where:
    """What all work of a reproduction shares: the folder of the runs, to continue from, and that of the results."""

    runs: Path
    results: Path
    place: Place
    # What a search records when it begins, by its system, its recipe and what it sets otherwise than by default. It is
    # handed in from above: searches are built on experiments.
    recorded: Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]


class Work(ABC):
    """What a process does in a folder: a run or a search."""

    row: Row
    epochs: int | None
    where: Where
    record: str  # the file that it writes first
    outcome: str  # the file that it writes last

    def __str__(self) -> str:
        return f"{self.row.recipe} {self.name}"

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its folder, among those of its row."""

    @abstractmethod
    def check(self) -> None:
        """Refuse a folder that holds other work than this."""

    @abstractmethod
    def words(self) -> list[str]:
        """The arguments that the program is called with."""

    @property
    @abstractmethod
    def makes(self) -> Path:
        """The file of the policy that it learns or finds, if any."""

    @abstractmethod
    def export(self) -> None:
        """Write that file, once the work is finished."""

    @abstractmethod
    def digest(self) -> str:
        """The digest of the policy in that file, as in the results of runs under it."""

    @abstractmethod
    def keep(self) -> str:
        """Put its outcome among the results; returns what to say about it."""

    @abstractmethod
    def progress(self) -> str:
        """How far it is."""

    @abstractmethod
    def made_by(self, report: Path) -> str:
        """Its name and the command that makes it."""

    @property
    def waits_for(self) -> "Work | None":
        """What must be finished before it can begin."""
        return None

    def ready(self) -> bool:
        """Whether what it needs is there."""
        return True

    @property
    def folder(self) -> Path:
        return self.where.runs / folder_name(self.row.recipe, self.epochs) / self.name

    @property
    def dataset(self) -> str:
        return RECIPES[self.row.recipe]().dataset

    @property
    def begun(self) -> bool:
        return (self.folder / self.record).exists()

    @property
    def finished(self) -> bool:
        return (self.folder / self.outcome).exists()

    @property
    def busy(self) -> bool:
        """Whether another process works in its folder, such as one that outlived the `reproduce` that started it."""
        return run_folder.is_locked(self.folder)

    def start(self) -> "subprocess.Popen[bytes]":
        """Start its process, with the output in a file beside the folder."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "metaaugment", *self.words()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def last_words(self, status: int) -> str:
        """The last line of its output, without the program's name; of a process that was killed, the signal."""
        if status < 0:
            return f"killed by signal {-status}, as happens when memory is short; the same command continues it"
        lines = (self.folder.parent / f"{self.name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("metaaugment: ") if lines else "it printed nothing"

    def taken(self, words: str) -> bool:
        """Whether another process works in its folder, or did so when its own process ended with these words."""
        return self.busy or (self.begun and any(refusal in words for refusal in run_folder.refusals(self.folder)))

    @property
    def beside(self) -> Path:
        """The file with the largest number of processes at a time so far, for when this work is continued later."""
        return self.folder.parent / f"{self.name}.beside"

    @property
    def side_by_side(self) -> int:
        text = self.beside.read_text(errors="replace").strip() if self.beside.exists() else ""
        return int(text) if text.isdecimal() else 1

    def shares(self, number: int) -> None:
        """Note that it is one of this many at a time."""
        if number > self.side_by_side:
            write_atomically(self.beside, lambda part: part.write_text(f"{number}\n"))


@dataclass(frozen=True, eq=False)
class Job(Work):
    """One run of an entry."""

    row: Row
    entry: Entry
    seed: int
    epochs: int | None
    where: Where

    record, outcome = run_folder.RECIPE, run_folder.RESULT

    @property
    def name(self) -> str:
        return f"{self.entry.name}-seed{self.seed}"

    @property
    def result(self) -> Path:
        return self.where.results / folder_name(self.row.recipe, self.epochs) / f"{self.name}.json"

    @property
    def _kept(self) -> list[Path]:
        """The results of its entry so far, whatever their seed."""
        return sorted(self.result.parent.glob(f"{self.entry.name}-seed*.json"))

    @property
    def usual_time(self) -> str:
        """What training took in the runs of its entry so far, on average, and on which machines; empty for none."""
        if not (kept := [read_json(file) for file in self._kept]):
            return ""
        machines = sorted({str(result["machine"]["hardware"]) for result in kept})
        return f"{duration(statistics.fmean(result['seconds'] for result in kept))} on {', '.join(machines)}"

    @property
    def source(self) -> "Work | None":
        """The work that finds or learns the policy it is trained under, if any."""
        if self.entry.search is not None:
            return Search(self.row, self.entry, self.epochs, self.where)
        if self.entry.under is None:
            return None
        row = ROWS[self.entry.under[0]]
        (entry,) = (entry for entry in row.entries if entry.name == self.entry.under[1])
        return Job(row, entry, 0, self.epochs, self.where)

    @property
    def policy(self) -> Path | None:
        """The file of that policy."""
        return self.source and self.source.makes

    @property
    def recipe(self) -> Recipe:
        return self.row.run(self.entry, self.seed, self.epochs, self.policy)

    def check(self) -> None:
        """Refuse a folder that holds a different run."""
        if not self.begun and not self.finished:
            return
        file = self.folder / run_folder.RECIPE
        if not self.begun:
            raise ValueError(f"{self.folder} has a result, but no {run_folder.RECIPE} that says what was run; {AWAY}")
        try:
            begun_with = Recipe.from_json(read_json(file))
        except ValueError as error:
            raise ValueError(f"{file} cannot be understood: {error}; {AWAY}") from None
        recipe = self.recipe
        for name in (field.name for field in fields(Recipe)):
            found, meant = getattr(begun_with, name), getattr(recipe, name)
            if _written_alike(found) != _written_alike(meant):
                raise ValueError(f"{self.folder} was begun with {flag(name)} {found}, but {self} has {meant}; {AWAY}")

    def check_policy(self) -> None:
        """Refuse a policy other than that of the entry's kept results; the earliest do not say which that was."""
        if self.source is None or not self.source.makes.exists():
            return
        kept = {file: read_json(file).get("policy_sha256") for file in self._kept}
        own = self.source.digest() if any(kept.values()) else None
        for file, digest in kept.items():
            if digest not in (None, own):
                raise ValueError(
                    f"{file} was trained under another policy than {self.source.makes} holds now; put that one back, "
                    f"or move the results of {self.entry.name} away"
                )

    @property
    def waits_for(self) -> "Work | None":
        source = self.source
        return None if source is None or source.makes.exists() or source.finished else source

    def ready(self) -> bool:
        """Whether what it needs is there; exports the policy that it needs once the work that makes it is finished."""
        if self.waits_for is not None:
            return False
        if self.source is not None and not self.source.makes.exists():
            self.source.export()
        self.check_policy()
        return True

    def words(self) -> list[str]:
        recipe = self.recipe
        if self.begun:  # says where its policy lies now: folders may have been moved
            more = ["--resume", str(self.folder), *(["--policy", str(self.policy)] if self.policy else [])]
        else:
            more = ["--out", str(self.folder), *flags(recipe, RECIPES[recipe.name]())]
        return ["train", recipe.name, *self.where.place.flags(), *more]

    @property
    def makes(self) -> Path:
        return self.folder.with_name(f"{self.entry.name}.safetensors")

    def export(self) -> None:
        learned_policy(self.folder).save(self.makes, half=True)

    def digest(self) -> str:
        return policy_digest(LearnedPolicy.load(self.makes))

    def keep(self) -> str:
        """Write its result to a file of its own and, if there is a log to read it from, its course beside it."""
        try:
            result = results.read_result(self.folder / run_folder.RESULT)
        except Damaged as error:
            raise Damaged(error.file, error.reason, "remove it, and the same command makes it again") from None
        self.result.parent.mkdir(parents=True, exist_ok=True)
        course = None
        with contextlib.suppress(OSError, ValueError):
            course = results.course(self.folder / LOG)
        if course is not None:
            results.write_course(course, results.course_file(self.result))
        if self.policy is not None:  # by its row and entry: where folders lie on this machine is nobody's business
            name = str(Path(*self.policy.parts[-2:]))
            result |= {"policy": name, "recipe": {**result.get("recipe", {}), "policy": name}}
        result |= {"entry": self.entry.name, "side_by_side": self.side_by_side}
        write_json(self.result, result)
        return f"{result[accuracy_key(result)]:.2%}"

    def progress(self) -> str:
        return f"{_lines(self.folder / LOG)}/{self.recipe.epochs}"

    def made_by(self, report: Path) -> str:
        epochs = [] if self.epochs is None else ["--epochs", str(self.epochs)]
        folders = ["--runs", str(self.where.runs), "--results", str(self.where.results), "--report", str(report)]
        what = [self.row.recipe, "--methods", self.entry.name, "--seeds", str(self.seed + 1), *epochs]
        command = shlex.join(["metaaugment", "reproduce", *what, *self.where.place.flags(), *folders])
        # A run whose result is kept is not made again.
        first = f", whose folder is gone: move {self.result} away first" if self.result.exists() else ""
        return f"{self}{first}; make it with: {command}"


@dataclass(frozen=True, eq=False)
class Search(Work):
    """The search for an entry's policy by its system, one for all seeds."""

    row: Row
    entry: Entry
    epochs: int | None
    where: Where

    record, outcome = run_folder.SEARCH, run_folder.POLICY

    @property
    def name(self) -> str:
        return f"{self.entry.name}-search"

    @property
    def makes(self) -> Path:
        """The policy's file, among the results: it also says what the search cost."""
        return self.where.results / "searches" / f"{folder_name(self.row.recipe, self.epochs)}-{self.entry.name}.json"

    def words(self) -> list[str]:
        folder = ["--resume" if self.begun else "--out", str(self.folder)]
        more = [] if self.begun else flags_of(self.changes)
        return ["search", self.system, self.row.recipe, *self.where.place.flags(), *folder, *more]

    @property
    def system(self) -> str:
        return self.entry.changes["method"]

    @property
    def changes(self) -> Mapping[str, Any]:
        """What it sets otherwise than by default."""
        return self.entry.search or {}

    def check(self) -> None:
        """Refuse a folder that holds a different search, and a file among the results that is not of this one."""
        if self.makes.exists():
            self._check_policy(self.makes, "move the file away, or choose another --results")
            return
        record = self.folder / run_folder.SEARCH
        if self.begun:
            self._check_settings(self.folder, _read(record, AWAY), AWAY)
        if self.finished:
            if not self.begun:
                raise ValueError(f"{self.folder} has a policy, but no {record.name} that says of which search; {AWAY}")
            self._check_policy(self.folder / run_folder.POLICY, AWAY)

    def _check_policy(self, file: Path, way: str) -> None:
        self._check_system(file, way)
        search = _read(file, way).get("search")
        if search is not None:
            self._check_settings(file, search, way)

    def _check_system(self, file: Path, way: str) -> None:
        try:
            found = published.find(file).system
        except ValueError as error:
            raise ValueError(f"{error}; {way}") from None
        if found != self.system:
            raise ValueError(f"{file} is a policy of {found}, but {self} needs one of {self.system}; {way}")

    def _check_settings(self, what: Path, search: Any, way: str) -> None:
        """Refuse a search with other settings; like a search that is continued, it may lack those of newer versions."""
        try:
            found = Recipe.from_json(search["recipe"]).to_json() | search["settings"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what} cannot be understood: {error}; {way}") from None
        wanted = self.where.recorded(self.system, self.row.recipe, self.changes)
        for name, meant in {**wanted["recipe"], **wanted["settings"]}.items():
            if name in found and found[name] != meant:
                raise ValueError(
                    f"{what} is of a search with {flag(name)} {found[name]}, but {self} has {meant}; {way}"
                )

    def export(self) -> None:
        file = self.folder / run_folder.POLICY
        self._check_system(file, AWAY)
        self.makes.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.makes, lambda part: part.write_bytes(file.read_bytes()))

    def digest(self) -> str:
        return policy_digest(published.find(self.makes))

    def keep(self) -> str:
        self.export()
        return f"policy found; {self.makes}"

    def progress(self) -> str:
        return f"{_lines(self.folder / run_folder.TRIALS)} trials"

    def made_by(self, report: Path) -> str:
        return f"{self}; make it with: {shlex.join(['metaaugment', *self.words()])}"


def _read(file: Path, way: str) -> dict[str, Any]:
    try:
        return read_json(file)
    except ValueError as error:
        raise ValueError(f"{error}; {way}") from None


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _written_alike(value: object) -> object:
    """The value, or of a policy's path row and entry only, which stay when folders are moved or named otherwise."""
    return value.parts[-2:] if isinstance(value, Path) else value
