"""What a reproduction is made of: runs of a table's entries, and searches for the policies that some of them need.

Each is done by a process of its own, in a folder of its own, from which it can be continued.
"""

import os
import shlex
import statistics
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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
from metaaugment.lab.training.launch import launch
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


@dataclass(frozen=True, eq=False)
class Task(ABC):
    """What a process does in a folder; `record` is the file that it writes there first, `outcome` the last one."""

    row: Row
    entry: Entry
    epochs: int | None
    where: Where

    record: ClassVar[str]
    outcome: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.row.recipe} {self.name}"

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its folder, among those of its row."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """All that it is done with, as JSON values."""

    @abstractmethod
    def words(self) -> list[str]:
        """The arguments that the program is called with."""

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

    def taken(self, before: str | None) -> bool:
        """Whether another process works in its folder, or has done so since it was `before` that was last to."""
        own = launch(launcher=os.getpid())
        return self.busy or run_folder.last_locked(self.folder) not in (before, own)

    def check(self) -> None:
        """Refuse a folder that holds other work than this."""
        if self.begun:
            self._compare(self.folder, read_json(self.folder / self.record), AWAY)
        elif self.finished:
            what = Path(self.outcome).stem
            raise ValueError(f"{self.folder} has a {what}, but no {self.record} that says of what; {AWAY}")

    def _compare(self, what: Path, record: Mapping[str, Any], way: str) -> None:
        """Refuse other settings than its own; a record may lack those of newer versions."""
        try:
            found = Recipe.from_json(record.get("recipe", record)).to_json() | record.get("settings", {})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what} cannot be understood: {error}; {way}") from None
        for name, meant in self.settings().items():
            if name in found and _written_alike(found[name]) != _written_alike(meant):
                raise ValueError(f"{what} was made with {flag(name)} {found[name]}, but {self} has {meant}; {way}")

    def start(self) -> "subprocess.Popen[bytes]":
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_name(f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "metaaugment", *self.words()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def last_words(self, status: int) -> str:
        """The last line of its output, without the program's name; of a process that was killed, the signal."""
        if status < 0:
            return f"killed by signal {-status}, as happens when memory is short; the same command continues it"
        lines = self.folder.with_name(f"{self.name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("metaaugment: ") if lines else "it printed nothing"

    @property
    def beside(self) -> Path:
        """The file with the largest number of processes at a time so far, for when this work is continued later."""
        return self.folder.with_name(f"{self.name}.beside")

    @property
    def side_by_side(self) -> int:
        text = self.beside.read_text(errors="replace").strip() if self.beside.exists() else ""
        return int(text) if text.isdecimal() else 1

    def shares(self, number: int) -> None:
        """Note that it is one of this many at a time."""
        if number > self.side_by_side:
            write_atomically(self.beside, lambda part: part.write_text(f"{number}\n"))


@dataclass(frozen=True, eq=False)
class Job(Task):
    """One run of an entry."""

    seed: int

    record, outcome = run_folder.RECIPE, run_folder.RESULT

    @property
    def name(self) -> str:
        return f"{self.entry.name}-seed{self.seed}"

    @property
    def makes(self) -> Path:
        return self.folder.with_name(f"{self.entry.name}.safetensors")

    @property
    def recipe(self) -> Recipe:
        return self.row.run(self.entry, self.seed, self.epochs, self.policy)

    def settings(self) -> Mapping[str, Any]:
        return self.recipe.to_json()

    def words(self) -> list[str]:
        recipe = self.recipe
        if self.begun:  # says where its policy lies now: folders may have been moved
            more = ["--resume", str(self.folder), *(["--policy", str(self.policy)] if self.policy else [])]
        else:
            more = ["--out", str(self.folder), *flags(recipe, RECIPES[recipe.name]())]
        return ["train", recipe.name, *self.where.place.flags(), *more]

    @property
    def result(self) -> Path:
        return self.where.results / folder_name(self.row.recipe, self.epochs) / f"{self.name}.json"

    @property
    def _kept(self) -> dict[Path, dict[str, Any]]:
        """The results of its entry so far, whatever their seed."""
        return {file: read_json(file) for file in sorted(self.result.parent.glob(f"{self.entry.name}-seed*.json"))}

    @property
    def usual_time(self) -> str:
        """In words, what the runs of its entry took so far, on average, and on which machines; empty for none."""
        if not (kept := self._kept.values()):
            return ""
        machines = sorted({str(result["machine"]["hardware"]) for result in kept})
        return f", about {duration(statistics.fmean(result['seconds'] for result in kept))} on {', '.join(machines)}"

    @property
    def source(self) -> "Work | None":
        """The work that finds or learns the policy it is trained under, if any."""
        if self.entry.search is not None:
            return Search(self.row, self.entry, self.epochs, self.where)
        if self.entry.under is None:
            return None
        row = ROWS[self.entry.under[0]]
        (entry,) = (entry for entry in row.entries if entry.name == self.entry.under[1])
        return Job(row, entry, self.epochs, self.where, 0)

    @property
    def policy(self) -> Path | None:
        """The file of that policy."""
        return self.source and self.source.makes

    @property
    def waits_for(self) -> "Work | None":
        """What must be finished before it can begin."""
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

    def check_policy(self) -> None:
        """Refuse a policy other than that of the entry's kept results; the earliest do not say which that was."""
        if self.source is None or not self.source.makes.exists():
            return
        said = {file: digest for file, kept in self._kept.items() if (digest := kept.get("policy_sha256")) is not None}
        own = digest_of(self.source.makes) if said else None
        for file, digest in said.items():
            if digest != own:
                raise ValueError(
                    f"{file} was trained under another policy than {self.source.makes} holds now; put that one back, "
                    f"or move the results of {self.entry.name} away"
                )

    def export(self) -> None:
        learned_policy(self.folder).save(self.makes, half=True)

    def keep(self) -> str:
        """Write its result to a file of its own and, if there is a log to read it from, its course beside it."""
        try:
            result = results.read_result(self.folder / run_folder.RESULT)
        except Damaged as error:
            raise Damaged(error.file, error.reason, "remove it, and the same command makes it again") from None
        self.result.parent.mkdir(parents=True, exist_ok=True)
        results.keep_course(self.folder / LOG, self.result)
        if self.policy is not None:  # by its row and entry: where folders lie on this machine is nobody's business
            name = str(Path(*self.policy.parts[-2:]))
            result |= {"policy": name, "recipe": {**result["recipe"], "policy": name}}
        write_json(self.result, result | {"entry": self.entry.name, "side_by_side": self.side_by_side})
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
class Search(Task):
    """The search for an entry's policy by its system, one for all seeds."""

    record, outcome = run_folder.SEARCH, run_folder.POLICY

    @property
    def name(self) -> str:
        return f"{self.entry.name}-search"

    @property
    def makes(self) -> Path:
        """The policy's file, among the results: it also says what the search cost."""
        return self.where.results / "searches" / f"{folder_name(self.row.recipe, self.epochs)}-{self.entry.name}.json"

    @property
    def system(self) -> str:
        return self.entry.changes["method"]

    def settings(self) -> Mapping[str, Any]:
        recorded = self.where.recorded(self.system, self.row.recipe, self.entry.search or {})
        return {**recorded["recipe"], **recorded["settings"]}

    def words(self) -> list[str]:
        folder = ["--resume" if self.begun else "--out", str(self.folder)]
        more = [] if self.begun else flags_of(self.entry.search or {})
        return ["search", self.system, self.row.recipe, *self.where.place.flags(), *folder, *more]

    waits_for, usual_time = None, ""

    def ready(self) -> bool:
        return True

    def check(self) -> None:
        """Refuse a folder that holds a different search, and a file among the results that is not of this one."""
        if self.makes.exists():
            self._check_policy(self.makes, "move the file away, or choose another --results")
            return
        super().check()
        if self.finished:
            self._check_policy(self.folder / run_folder.POLICY, AWAY)

    def _check_policy(self, file: Path, way: str) -> None:
        try:
            found, search = published.find(file).system, published.search_of(file)
        except ValueError as error:
            raise ValueError(f"{error}; {way}") from None
        if found != self.system:
            raise ValueError(f"{file} is a policy of {found}, but {self} needs one of {self.system}; {way}")
        if search:
            self._compare(file, search, way)

    def export(self) -> None:
        file = self.folder / run_folder.POLICY
        self._check_policy(file, AWAY)
        self.makes.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.makes, lambda part: part.write_bytes(file.read_bytes()))

    def keep(self) -> str:
        self.export()
        return f"policy found; {self.makes}"

    def progress(self) -> str:
        return f"{_lines(self.folder / run_folder.TRIALS)} trials"

    def made_by(self, report: Path) -> str:
        return f"{self}; make it with: {shlex.join(['metaaugment', *self.words()])}"


Work = Job | Search


def digest_of(policy: Path) -> str:
    """The digest of a policy that was learned or found, as in the results of runs under it."""
    return policy_digest(published.find(policy) if policy.suffix == ".json" else LearnedPolicy.load(policy))


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _written_alike(value: object) -> object:
    """The value, or of a policy's path row and entry only, which stay when folders are moved or named otherwise."""
    return Path(value).parts[-2:] if isinstance(value, str) else value
