"""Studies of Optuna that several processes, or machines, share; whoever is killed takes nothing with it."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from metaaugment.sealed import first_line

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

STUDIES = "studies.log"


def open_studies(folder: Path, url: str | None, names: Sequence[str]) -> "list[Study]":
    """By their names; those that are not there yet begin. The storage is a file of the folder, or a database."""
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "this search needs the package optuna; install it with: pip install 'metaaugment[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = _storage(folder, url)
    return [
        optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        for name in names
    ]


def _storage(folder: Path, url: str | None) -> "BaseStorage":
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url is None:
        file = folder / STUDIES
        return JournalStorage(JournalFileBackend(str(file), cast(Any, JournalLock(file))))
    try:
        return RDBStorage(url)
    except Exception as error:  # of SQLAlchemy, of the driver, of the database: each has its own
        # Without what stands before the @: it may hold a password.
        where = url.split("@")[-1]
        reason = first_line(error).replace(url, where)
        raise ValueError(
            f"--storage {where} cannot be opened ({reason}); check that it is there, or leave it out"
        ) from None


def finished(study: "Study") -> "dict[int, FrozenTrial]":
    """By their places, in order; of two at one place the first."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    by_place = {trial.user_attrs["place"]: trial for trial in reversed(trials)}
    return dict(sorted(by_place.items()))


def running(study: "Study") -> "list[FrozenTrial]":
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def give_up(trials: "Sequence[tuple[Study, FrozenTrial]]") -> None:
    """Those of processes that are no more: their places are free again."""
    from optuna.trial import TrialState

    for study, trial in trials:
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def value(trial: "FrozenTrial") -> float:
    assert trial.value is not None
    return trial.value


def claim(folder: Path, study: "Study", trials: int) -> "Trial | None":
    """A trial at the first place that nobody has; None where there is none.

    Processes of this folder wait for each other. Two machines may take the same place at once; it is then tried twice,
    and the first one counts.
    """
    from optuna.trial import TrialState

    with FileLock(folder / "claims.lock"):
        taken = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        free = set(range(trials)) - {trial.user_attrs.get("place") for trial in taken}
        if not free:
            return None
        trial = study.ask()
        trial.set_user_attr("place", min(free))
        return trial


class FileLock:
    """A file that one process holds at a time; what a killed process held is free at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._held: IO[bytes] | None = None

    def acquire(self) -> bool:
        self._held = self.file.open("ab+")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        assert self._held is not None
        self._held.close()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class JournalLock(FileLock):
    """Of Optuna's journal, on the journal itself.

    In place of Optuna's own ones, which a killed process leaves behind. A line that it left half written goes: Optuna
    would append to it, and could never read the file again.
    """

    def acquire(self) -> bool:
        super().acquire()
        assert self._held is not None
        if self._held.seek(0, os.SEEK_END) > 0:
            self._held.seek(-1, os.SEEK_END)
            if self._held.read() != b"\n":
                self._held.truncate(self.file.read_bytes().rfind(b"\n") + 1)
        return True
