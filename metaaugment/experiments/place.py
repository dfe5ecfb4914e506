"""Where a run happens."""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from metaaugment.experiments.flags import flags

MAX_WORKERS = 128
MOST_READERS = 16  # where nobody says how many


@dataclass(frozen=True)
class Place:
    """Where a run happens and what it leaves; nothing that is part of the experiment."""

    data: Path | None = None
    """Folder of the data; $METAAUGMENT_DATA or ~/.cache/metaaugment if not given."""
    out: Path | None = None
    """Folder of the run, which must be new; named after recipe, method and seed if not given."""
    resume: Path | None = None
    """Folder of a run to go on with, under the settings it began with."""
    device: str | None = None
    """cpu or cuda; cuda where there is one if not given."""
    precision: Literal["bf16", "float32", "float64"] | None = None
    """Of passes through the networks; bf16 on GPUs, float32 elsewhere if not given. float64 is to compare runs by."""
    deterministic: bool = False
    """Whether a GPU gives the same run bit for bit, which takes longer; the CPU always does."""
    capture: bool = True
    """Whether steps on a GPU are replayed as CUDA graphs."""
    workers: int | None = None
    """Processes that read image files, and as many again during evaluation; one a core, at most 16, if not given."""
    corrupt: Literal["error", "skip"] = "error"
    """What happens to image files that cannot be read; those skipped are counted."""
    tensorboard: bool = False
    """Also write the log for TensorBoard, into the folder of the run."""

    def check(self) -> None:
        if self.workers is not None and not 0 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"--workers is {self.workers}; it must be 0 to {MAX_WORKERS}")

    @property
    def readers(self) -> int:
        if self.workers is not None:
            return self.workers
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's
        # Which cores a process may use not every system says.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(MOST_READERS, cores // processes))

    def command(self, recipe: str, out: Path, **changed: Any) -> str:
        """What goes on with a run in `out` as it was going on here."""
        return shlex.join(["metaaugment", "train", recipe, *replace(self, **changed).flags(), "--resume", str(out)])

    def flags(self) -> list[str]:
        """All but the folder of the run, which differs from one to the next."""
        return flags(self, Place(), ("data", "device", "precision", "deterministic", "workers", "corrupt"))
