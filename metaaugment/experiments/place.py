"""Where a run happens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Place:
    """Where a run happens and what it leaves; nothing that is part of the experiment."""

    data: Path | None = None
    """Folder of the data; $METAAUGMENT_DATA or ~/.cache/metaaugment if not given."""
    out: Path | None = None
    """Folder of the run, which must be new; runs/RECIPE-METHOD-seedN if not given."""
    resume: Path | None = None
    """Folder of a run to go on with, under the settings it began with."""
    device: str | None = None
    """cpu or cuda; cuda where there is one if not given."""
    precision: Literal["bf16", "float32"] | None = None
    """Of passes through the networks; bf16 on GPUs, float32 elsewhere if not given."""
    capture: bool = True
    """Whether steps on a GPU are replayed as CUDA graphs."""
    workers: int = 4
    """Processes that read image files."""
    corrupt: Literal["error", "skip"] = "error"
    """What happens to image files that cannot be read; those skipped are counted."""
    tensorboard: bool = False
    """Also write the log for TensorBoard, into the folder of the run."""
