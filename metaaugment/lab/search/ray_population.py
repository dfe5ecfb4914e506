"""The same population with Ray Tune: trials train at the same time, on one machine or on a cluster.

Only imported when Ray is asked for. As in population based augmentation, each trial is compared with the others as soon
as it finishes an interval, so that no worker waits: which trial copies which depends on timing, and no two searches are
the same. A trial that copies one ahead of it moves ahead too, and skips intervals. Tune could wait for all trials
(`synch`), but after a restart it forgets which ones it waits for, and hangs.
"""

import contextlib
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from rich.console import Console

import metaaugment
from metaaugment.guard.faults import first_line
from metaaugment.lab.data import DataSet
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import population
from metaaugment.lab.search.evolution import QUANTILE, Functions, Policy, explore, intervals
from metaaugment.lab.search.laboratory import Laboratory
from metaaugment.lab.search.population import RAY_FOLDER
from metaaugment.lab.search.workbench import Trial, Workbench, lineage
from metaaugment.lab.training import checkpoint

ROOMS = "rooms"  # in the folder of a search: where workers train, each in a folder of its own
FAILURES = 3  # per trial: a worker that dies is restarted from its last checkpoint, but not forever
ANSWERS_WITHIN = 5.0  # seconds that a cluster may take
# Ray's servers speak HTTP/2: the connection preface and an empty SETTINGS frame, which they answer with their own.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# Unless told otherwise, Ray reports its usage over the network, writes logs for TensorBoard and changes the working
# directory. The search itself handles Ctrl-C.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
}


@dataclass(frozen=True)
class Task:
    """What a worker must know to train any trial."""

    recipe: Recipe
    place: Place
    data: DataSet
    folder: Path
    functions: Functions
    interval: int
    here: Path


class Worker(tune.Trainable):
    """A Ray process that trains one trial after another, one interval per step."""

    def setup(self, config: dict[str, Any], task: Task) -> None:  # type: ignore[override]  # Tune adds the task
        with contextlib.suppress(OSError):  # not there on another machine, where paths must be absolute
            os.chdir(task.here)
        self.lab = Laboratory(task.recipe, task.place, task.data, task.folder, Console(quiet=True))
        self.workbench = Workbench(self.lab, task.functions)
        self.generations = intervals(task.recipe.epochs, task.interval)
        self.room = self._new_room()

    def step(self) -> dict[str, Any]:
        generation, policy = self.iteration, self.config["policy"]
        epochs, trial = self.generations[generation], self._trial()
        objective, seconds = trial.advance(policy, epochs)
        self.lab.note(population.row(trial.number, generation, epochs, objective, seconds, policy))
        return {"objective": objective, "done": generation + 1 == len(self.generations)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        shutil.copyfile(self._trial().folder / checkpoint.LAST, Path(checkpoint_dir) / checkpoint.LAST)

    def load_checkpoint(self, checkpoint: Any) -> None:
        self._trial().go_on_from(Path(checkpoint))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Hand the worker to another trial: its checkpoint is loaded next, and nothing of the one before is left."""
        self.cleanup()
        self.room = self._new_room()
        return True

    def cleanup(self) -> None:
        self.room.cleanup()

    def _new_room(self) -> tempfile.TemporaryDirectory[str]:
        """Another one for each turn: a worker that was given up for dead may still write into its own."""
        rooms = self.lab.folder / ROOMS
        rooms.mkdir(exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f"trial-{self._number:02d}-", dir=rooms)

    @property
    def _number(self) -> int:
        return int(self.trial_id.rsplit("_", 1)[-1])

    def _trial(self) -> Trial:
        return Trial(self.workbench, self._number, Path(self.room.name))


@dataclass(frozen=True)
class RayPopulation:
    """Where trials train: `workers` at a time, on this machine or on the cluster at `address`."""

    workers: int | None
    address: str | None

    def evolve(self, lab: Laboratory, functions: Functions, number: int, interval: int) -> list[Policy]:
        """Like `population.evolve`; a killed worker costs the interval it was in."""
        folder = lab.folder.absolute()
        place = replace(lab.place, out=None, resume=None)
        task = Task(lab.recipe, place, lab.data, folder, functions, interval, Path.cwd())
        shutil.rmtree(folder / ROOMS, ignore_errors=True)  # of workers that were killed
        progress = population.Progress(lab, number, interval)
        with _session(self.workers, self.address, lab.device.type, place.threads or 1), _watched(lab, progress):
            share = _share(self.workers, lab.device.type)
            trainable = tune.with_resources(tune.with_parameters(Worker, task=task), share)
            results = _tuner(folder / RAY_FOLDER, trainable, functions, number).fit()
        shutil.rmtree(folder / ROOMS, ignore_errors=True)
        lab.stop_if_asked()
        if results.num_errors:
            reason = str(results.errors[0]).strip().splitlines()[-1]
            raise ValueError(
                f"{results.num_errors} of {number} trials failed in Ray, the first with: {reason}; once that is fixed, "
                f"continue with --resume {shlex.quote(str(lab.folder))}"
            )
        best = results.get_best_result("objective", "max").checkpoint
        assert best is not None
        with best.as_directory() as kept:
            return lineage(Path(kept))


def _tuner(folder: Path, trainable: Any, functions: Functions, number: int) -> tune.Tuner:
    """A new tuner, or the one of this folder, restored where it stopped."""
    space = {"policy": functions.start()}
    if tune.Tuner.can_restore(str(folder)) and any(folder.glob("experiment_state-*.json")):
        # Ray keeps no space, but begins trials anew that its last record did not have yet.
        return tune.Tuner.restore(str(folder), trainable, resume_errored=True, param_space=space)
    shutil.rmtree(folder, ignore_errors=True)
    scheduler = PopulationBasedTraining(
        "training_iteration", "objective", "max", perturbation_interval=1, quantile_fraction=QUANTILE,
        custom_explore_fn=_explore,
    )  # fmt: skip
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(num_samples=number, scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(
            folder.name,
            storage_path=str(folder.parent),
            failure_config=tune.FailureConfig(max_failures=FAILURES),
            # More than two: a checkpoint that another trial is about to continue from must still be there.
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4, checkpoint_frequency=1, checkpoint_at_end=True),
            verbose=0,
        ),
    )


def _explore(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"policy": explore(config["policy"], Random())}


def _share(workers: int | None, device: str) -> dict[str, float]:
    """Resources of one trial, such that as many trials as asked for train at a time."""
    there = ray.cluster_resources()
    if device == "cuda":
        gpus = max(1, int(there.get("GPU", 1)))
        return {"cpu": 1, "gpu": 1 / math.ceil((workers or gpus) / gpus)}
    return {"cpu": max(1, int(there.get("CPU", 1)) // workers) if workers else 1}


@contextlib.contextmanager
def _session(workers: int | None, address: str | None, device: str, threads: int = 1) -> Iterator[None]:
    """Connected to Ray: the one this process already has, the cluster at `address`, or a new one on this machine."""
    with _environment(QUIET):
        if ray.is_initialized():
            yield
            return
        if address is not None:
            _check_address(address)
        search_path = [str(Path(metaaugment.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(search_path), "RAY_CHDIR_TO_TRIAL_DIR": "0"}
        if device == "cpu":
            variables["OMP_NUM_THREADS"] = str(threads)  # by default 1: the trials share the cores already
        try:
            _connect(workers, address, variables)
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update({name: before[name] for name in variables if name in before})


def _connect(workers: int | None, address: str | None, variables: dict[str, str]) -> None:
    here: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
    environment: dict[str, Any] = {"env_vars": variables}
    if address is None:  # Ray hands it to a shell as it is, and waits for ever where its path has a space
        environment["py_executable"] = shlex.quote(sys.executable)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address or "local", runtime_env=environment, log_to_driver=False,
            logging_level=logging.CRITICAL, **here,
        )  # fmt: skip
    except (ConnectionError, TimeoutError, RuntimeError) as error:
        why = first_line(error).rstrip(".")
        if address is None:
            raise ValueError(f"Ray cannot start here: {why}; leave out --ray-workers to search without it") from None
        if address == "auto":
            raise ValueError(_nobody(address, why)) from None
        raise ValueError(
            f"--address is {address}, whose server refuses the connection ({why}); it must be the head of a Ray "
            "cluster, of the version that is installed here, and RAY_AUTH_TOKEN must be its token if it asks for one"
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own handler ends the process


def _check_address(address: str) -> None:
    """Refuse at once an address at which Ray itself would retry for minutes, or end the process."""
    if address == "auto":
        return
    if "://" in address:
        raise ValueError(
            f"--address is {address}, which is for Ray's client; run the search on a machine of the cluster, and name "
            "its head as HOST:PORT, or auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 2**16:
        raise ValueError(f"--address is {address!r}; it must be HOST:PORT, such as 10.0.0.1:6379, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN) as connection:
            connection.sendall(GREETING)
            answer = connection.recv(4)
    except OSError as error:
        raise ValueError(_nobody(address, error.strerror or str(error))) from None
    if answer[3:] != GREETING[-6:-5] and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ValueError(_nobody(address, "something else does"))


def _nobody(address: str, why: str) -> str:
    return (
        f"--address is {address}, where no Ray cluster answers ({why}); start one there with: ray start --head, or "
        "leave out the flag and use --ray-workers N"
    )


@contextlib.contextmanager
def _watched(lab: Laboratory, progress: population.Progress) -> Iterator[None]:
    """Report progress, and after a signal stop Tune such that it can resume: it saves its state on SIGUSR1."""
    ended, handler = threading.Event(), signal.getsignal(signal.SIGUSR1)

    def watch() -> None:
        over = False
        while not over:
            over = ended.wait(0.5)
            progress.look()
            if lab.interruption.signum is not None and not over:
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, handler)
