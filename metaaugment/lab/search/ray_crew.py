"""Work shared among workers of Ray, on this machine or on a cluster. Only imported when Ray is asked for."""

import contextlib
import logging
import math
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

import metaaugment
from metaaugment.guard.faults import first_line
from metaaugment.lab.search.crew import MOMENT, Crew, Make, Work
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.folder import SEARCH

ANSWERS_WITHIN = 5.0  # seconds that a cluster may take
# Ray's servers speak HTTP/2: the connection preface and an empty SETTINGS frame, which they answer with their own.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class RayCrew(Crew):
    """Workers of Ray, `at_a_time` or as many as it has room for; each begins as soon as there is."""

    flag = "--ray-workers"

    def __init__(
        self,
        lab: Laboratory,
        number: int,
        make: Make,
        arguments: Sequence[Any],
        at_a_time: int | None,
        address: str | None,
    ) -> None:
        super().__init__(lab, min(number, at_a_time or number), make, arguments)
        self.at_a_time, self.address = at_a_time, address
        self._connection = contextlib.ExitStack()

    def __enter__(self) -> "RayCrew":
        self._connection.enter_context(connected(self.at_a_time, self.address))
        place, folder = replace(self.lab.place, out=None, resume=None), self.lab.folder.absolute()
        work = self.lab.recipe, place, self.lab.data, folder, Path.cwd(), self.make, self.arguments
        self.work = ray.put(cloudpickle.dumps(work))  # once for all workers: it has the data
        self.worker = ray.remote(**_resources(self.at_a_time, self.lab.device.type))(_worker())
        return self

    def __exit__(self, *what: object) -> None:
        with self._connection:
            super().__exit__(*what)

    def _hire(self, index: int) -> None:
        worker = self.worker.remote()
        self.busy[worker.begin.remote(metaaugment.__version__, [self.work])] = worker, None

    def _give(self, member: Any, piece: Any) -> Any:
        return member.do.remote(piece)

    def _told(self) -> Sequence[Any]:
        return ray.wait(list(self.busy), timeout=MOMENT)[0]

    def _answer(self, member: Any, told: Any) -> Any:
        try:
            return ray.get(told)
        except RayTaskError as error:
            way = f"continue with --resume {shlex.quote(str(self.lab.folder))}"
            return ValueError(f"a worker of Ray failed with: {first_line(error.cause)}; once that is fixed, {way}")
        except RayError as error:
            return self._bury(first_line(error).rstrip("."))

    def _dismiss(self, members: Sequence[Any]) -> None:
        for member in members:
            ray.kill(member)


def _worker() -> type:
    """The class of the workers: one that Ray sends by value, so that any version of this package can run it."""

    class Worker:
        def begin(self, version: str, work: list[Any]) -> Exception | None:
            import metaaugment

            if metaaugment.__version__ != version:
                return ValueError(
                    f"a machine of the Ray cluster has metaaugment {metaaugment.__version__}, but this one has "
                    f"{version}; install the same version on all of them"
                )
            from metaaugment.lab.search.crew import attempt
            from metaaugment.lab.search.ray_crew import begin

            self.attempt, self.work = attempt, attempt(begin, *cloudpickle.loads(ray.get(work[0])))
            return self.work if isinstance(self.work, Exception) else None

        def do(self, piece: Any) -> Any:
            return self.attempt(self.work, piece)

    return Worker


def begin(recipe: Any, place: Any, data: Any, folder: Path, here: Path, make: Make, arguments: Sequence[Any]) -> Work:
    """What does the pieces of work in a worker."""
    with contextlib.suppress(OSError):  # not there on another machine, where paths must be absolute
        os.chdir(here)
    if not (folder / SEARCH).exists():
        raise ValueError(
            f"a machine of the Ray cluster has no access to {folder}; choose a folder for --out that all have"
        )
    torch.set_num_threads(place.threads or 1)  # the workers share the cores already
    return make(Laboratory(recipe, place, data, folder, Console(quiet=True)), *arguments)


def _resources(workers: int | None, device: str) -> dict[str, Any]:
    """Of one worker, such that as many as asked for work at a time."""
    there = ray.cluster_resources()
    if device == "cuda":
        gpus = max(1, int(there.get("GPU", 1)))
        return {"num_cpus": 1, "num_gpus": 1 / math.ceil((workers or gpus) / gpus)}
    return {"num_cpus": max(1, int(there.get("CPU", 1)) // workers) if workers else 1}


@contextlib.contextmanager
def connected(workers: int | None, address: str | None) -> Iterator[None]:
    """Connected to Ray: the one this process already has, the cluster at `address`, or a new one on this machine."""
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports its usage over the network
    try:
        _connect(workers, address)
        yield
    finally:
        ray.shutdown()


def _connect(workers: int | None, address: str | None) -> None:
    search_path = [str(Path(metaaugment.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.pathsep.join(search_path)}}
    here: dict[str, Any] = {}
    if address is None:
        here = {"num_cpus": workers, "include_dashboard": False}
        # Ray hands it to a shell as it is, and waits for ever where its path has a space.
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
    """Refuse at once an address at which Ray itself would try for minutes."""
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
