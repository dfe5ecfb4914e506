"""Optuna studies that several processes or machines share; a process that is killed leaves them intact."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from metaaugment.files.lock import FileLock
from metaaugment.guard.faults import first_line
from metaaugment.lab.search.trials import understood

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

STUDIES = "studies.log"
MOMENT = 1.0  # seconds


def open_studies(folder: Path, url: str | None, names: Sequence[str]) -> "list[Study]":
    """The studies of these names, created if missing, in a file of the folder or in the database at `url`."""
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
        # Optuna accepts a last line of anything, and fails once another one follows.
        with JournalLock(file), understood(file):
            for line in file.read_text().splitlines():
                json.loads(line)
        return JournalStorage(JournalFileBackend(str(file), cast(Any, JournalLock(file))))
    try:
        with suppress(Exception):
            return RDBStorage(url)
        # Another machine may have been creating the tables of a new database at that moment.
        time.sleep(MOMENT)
        return RDBStorage(url)
    except Exception as error:  # SQLAlchemy, the driver and the database each raise their own
        # Without what comes before the @, which may hold a password.
        where = url.split("@")[-1]
        reason = first_line(error).replace(url, where)
        raise ValueError(
            f"--storage {where} cannot be opened ({reason}); check that it is there, or leave it out"
        ) from None


def finished(study: "Study") -> "dict[int, FrozenTrial]":
    """Finished trials by place, in order; of two at one place, the first."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    by_place = {trial.user_attrs["place"]: trial for trial in reversed(trials)}
    return dict(sorted(by_place.items()))


def running(study: "Study") -> "list[FrozenTrial]":
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def give_up(trials: "Sequence[tuple[Study, FrozenTrial]]") -> None:
    """Mark trials of dead processes as failed, which frees their places."""
    from optuna.trial import TrialState

    for study, trial in trials:
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def value(trial: "FrozenTrial") -> float:
    assert trial.value is not None
    return trial.value


def claim(folder: Path, study: "Study", trials: int) -> "Trial | None":
    """Begin a trial at the first free place; None if there is none.

    Processes that share this folder take turns. Two machines may take the same place at once; it is then tried twice,
    and the first trial counts.
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


class JournalLock(FileLock):
    """The lock of Optuna's journal, held on the journal itself.

    It replaces Optuna's own locks, which a killed process leaves behind. A half-written line is removed: Optuna would
    append to it, and could never read the file again.
    """

    def acquire(self) -> bool:
        super().acquire()
        assert self._held is not None
        if self._held.seek(0, os.SEEK_END) > 0:
            self._held.seek(-1, os.SEEK_END)
            if self._held.read() != b"\n":
                self._held.truncate(self.file.read_bytes().rfind(b"\n") + 1)
        return True
