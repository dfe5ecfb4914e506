"""How the processes of one run, started by torchrun, Kubernetes or srun, find each other and end together."""

import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

from metaaugment.distributed import rank, world_size
from metaaugment.guard.faults import first_line

Environment = MutableMapping[str, str]
# How long a process waits for the others: as long as the slowest may take to read, evaluate or write.
PATIENCE = timedelta(minutes=30)
MISTAKE = 2  # the exit status after a mistake of the user's
# Seconds that a process ending on such a mistake waits for the others to end on it too.
FAREWELL = 5.0
_store: dist.Store | None = None


def join(environment: Environment = os.environ) -> None:
    """Meet the other processes that were started with this one; with one process nothing happens."""
    global _store
    if "RANK" not in environment:
        environment.update(of_slurm(environment))
    if "RANK" not in environment or int(environment.get("WORLD_SIZE", 1)) < 2:
        return
    environment.setdefault("MASTER_PORT", "29500")
    # A backend for each device: the run's is not known yet.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        shared, place, size = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))
        _store = fresh(shared, place, size)
        dist.init_process_group(backend, store=_store, rank=place, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        address, port = environment.get("MASTER_ADDR"), environment["MASTER_PORT"]
        raise ValueError(
            f"process {environment['RANK']} cannot connect to the others at {address}:{port} ({first_line(error)}); "
            f"start all {environment['WORLD_SIZE']} of them, as torchrun does"
        ) from None


def check_alone(command: str, environment: Environment = os.environ) -> None:
    """Refuse a command that a launcher has started several times: each process would do all of the work."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environment else "1"
    size = environment.get("WORLD_SIZE", tasks)
    if size != "1":
        raise ValueError(
            f"metaaugment {command} was started {size} times (WORLD_SIZE is {size}), and each would do all of the "
            "work; start it once, without torchrun: it starts what it needs by itself"
        )


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ends a process that is one of several with `os._exit` once its work is done.

    gloo's threads may still run while Python shuts down, which would abort the process.
    """
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if world_size() == 1:
            raise
    except BaseException as error:
        if world_size() == 1:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
    if world_size() > 1:
        if status == MISTAKE:
            _take_leave()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def fresh(store: dist.Store, place: int, size: int) -> dist.Store:
    """A part of a store that only the processes of this start share.

    When torchrun restarts processes it keeps the store, and gloo would take the addresses that it finds there for those
    of living processes. So each process comes with a new random name, and the first one keeps telling the others its
    own, under which they meet, until all have answered.
    """
    own = uuid.uuid4().hex
    if place > 0:
        store.set(f"hello {place}", own)
        name = store.get(f"welcome {own}").decode()
        store.set(f"here {name} {place}", "")
        return dist.PrefixStore(name, store)
    missing, until = set(range(1, size)), time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"hello {other}"]):
                store.set(f"welcome {store.get(f'hello {other}').decode()}", own)
            if store.check([f"here {own} {other}"]):
                missing.remove(other)
        if time.monotonic() > until:
            raise RuntimeError(f"process {min(missing)} did not connect")
        time.sleep(0.02)
    return dist.PrefixStore(own, store)


def of_slurm(environment: Environment) -> dict[str, str]:
    """torchrun's environment variables, from srun's; none outside of srun.

    A batch script has a SLURM_PROCID too, but is not a step of the job.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return {}
    size = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if size == "1":
        return {}
    nodes = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    if "MASTER_ADDR" not in environment and nodes != "1":
        raise ValueError(
            "MASTER_ADDR is not set, so processes on several nodes cannot find each other; before srun, run: "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1"),
        # Jobs that share a node must not meet each other.
        "MASTER_PORT": environment.get("MASTER_PORT", str(10_000 + int(environment.get("SLURM_JOB_ID", 0)) % 20_000)),
    }


def own_device(kind: str) -> torch.device:
    """The device of this process; of several processes each has a GPU of its own."""
    if kind != "cuda" or world_size() == 1:
        return torch.device(kind)
    place, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if place >= count:
        raise ValueError(
            f"there are more than {count} processes on this machine, but only {count} GPUs, and each process needs one "
            f"of its own; start {count} processes, or use --device cpu"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def speaks() -> bool:
    """Whether this process is the first with something to say about why the run ends."""
    if _store is None:
        return True
    try:
        return _store.add("spoken", 1) == 1
    except RuntimeError:  # the process that hosts the store is gone
        return rank() == 0


def restarted(environment: Environment = os.environ) -> bool:
    """Whether a launcher has started these processes again, after some were lost."""
    return any(int(environment.get(f"{who}_RESTART_COUNT", 0)) > 0 for who in ("TORCHELASTIC", "SLURM"))


def launch(environment: Environment = os.environ, launcher: int | None = None) -> str:
    """A name for the launcher of this process, or for another one; it stays the same when the process is restarted."""
    if "SLURM_JOB_ID" in environment:
        return f"job {environment['SLURM_JOB_ID']} of Slurm"
    given = environment.get("TORCHELASTIC_RUN_ID", "none")
    return f"torchrun {given}" if given != "none" else f"process {launcher or os.getppid()} on {socket.gethostname()}"


def _take_leave() -> None:
    """Wait a moment for the others: a launcher kills them as soon as one fails, even if they have yet to say why."""
    assert _store is not None
    with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
        until, gone = time.monotonic() + FAREWELL, _store.add("gone", 1)
        while gone < world_size() and time.monotonic() < until:
            time.sleep(0.05)
            gone = _store.add("gone", 0)
