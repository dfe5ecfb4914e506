"""Where a run happens, and what its folder remembers of that."""

import os
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from metaaugment.files.sealed import Damaged
from metaaugment.lab.data import DATASETS
from metaaugment.lab.data.entry import data_root
from metaaugment.lab.experiments.flags import flags, refuse
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training.folder import PLACE
from metaaugment.lab.training.json_file import read_as, write_json
from metaaugment.lab.training.machine import cores

MAX_WORKERS, MAX_THREADS = 128, 1024
MOST_READERS = 16  # unless --workers says how many


@dataclass(frozen=True)
class Place:
    """Where and how to run, and what to write; these settings are not part of the recipe."""

    data: Path | None = None
    """Folder of the data; by default that of what is resumed, or $METAAUGMENT_DATA or ~/.cache/metaaugment."""
    out: Path | None = None
    """Folder of the run or search, which must be new; by default named after recipe, method and seed."""
    resume: Path | None = None
    """Folder of a run or search to continue, with the settings it began with."""
    device: str | None = None
    """cpu or cuda; by default cuda if available."""
    precision: Literal["bf16", "float32", "float64"] | None = None
    """Precision of the networks; by default bf16 on a GPU, else float32. float64 is for comparing runs."""
    deterministic: bool = False
    """Use deterministic algorithms on a GPU where torch has them, which is slower; CPU runs are always reproducible."""
    capture: bool = True
    """Replay steps on a GPU as CUDA graphs; no effect with several processes or with --deterministic."""
    workers: int | None = None
    """Processes that read image files, and as many again during evaluation; by default one per core, at most 16."""
    threads: int | None = None
    """Threads of each process that compute on a CPU; by default one per core, and as many as before on --resume."""
    corrupt: Literal["error", "skip"] = "error"
    """What to do about image files that cannot be read: stop with an error, or skip and count them."""
    tensorboard: bool = False
    """Also write the log for TensorBoard, in the folder of the run."""

    def check(self) -> None:
        refuse("workers", self.workers, self.workers is None or 0 <= self.workers <= MAX_WORKERS, f"0 to {MAX_WORKERS}")
        check_threads(self.threads)

    @property
    def readers(self) -> int:
        if self.workers is not None:
            return self.workers
        return min(MOST_READERS, own_cores())

    def computing(self, begun_with: int | None = None) -> int:
        """The number of threads that compute: those asked for, or those that a run or a search was begun with.

        By default they do not depend on how busy the cores are: with another number, sums are rounded differently.
        """
        # torch's own number is that of all cores, or OMP_NUM_THREADS.
        return self.threads or begun_with or min(torch.get_num_threads(), own_cores())

    def folder(self, recipe: Recipe, among: str) -> Path:
        """The folder of a run or a search; if none is named, one in the folder `among`."""
        return self.resume or self.out or Path(among) / f"{recipe.name}-{recipe.method}-seed{recipe.seed}"

    def resumed(self, what: str, record: str) -> Path:
        """The folder to continue in, which must hold the record that a run or a search begins with."""
        folder = self.resume
        assert folder is not None
        if self.out is not None and self.out != folder:
            raise ValueError(f"--out is {self.out}, but --resume continues in {folder}; leave out --out")
        if not (folder / record).exists():
            raise ValueError(
                f"{folder} is not a {what}: it has no {record}; name the folder of one, or begin one with --out"
            )
        return folder

    def remember(self, folder: Path, dataset: str) -> None:
        """Note in the folder of a run or a search where its data lie, if that was said, for `recalled`."""
        if self.data is None or DATASETS[dataset].embedded:
            (folder / PLACE).unlink(missing_ok=True)
        else:
            write_json(folder / PLACE, {"data": os.path.abspath(data_root(self.data))})

    def recalled(self, folder: Path) -> "Place":
        """The place with the folder of data that a run or a search remembers, unless one is given."""
        if self.data is not None or not (folder / PLACE).exists():
            return self
        try:
            data = read_as(_Memory, folder / PLACE).data
        except Damaged as error:
            raise Damaged(error.file, error.reason, "remove it, and say where the data are with --data DIR") from None
        if not os.path.isdir(data):  # whatever the text: Path.is_dir raises for one that is too long
            raise ValueError(
                f"the data of {folder} were in {data}, which is no folder any more; say where they are now with "
                "--data DIR"
            )
        return replace(self, data=Path(data))

    def command(self, recipe: str, out: Path, **changed: Any) -> str:
        """The command that continues a run in `out` as it ran here."""
        return shlex.join(["metaaugment", "train", recipe, *replace(self, **changed).flags(), "--resume", str(out)])

    def flags(self) -> list[str]:
        """Its flags, but for the folder of the run, which differs from one run to the next."""
        return flags(self, Place(), (field.name for field in fields(self) if field.name not in ("out", "resume")))


@dataclass(frozen=True)
class _Memory:
    """What `Place.remember` writes."""

    data: str


def check_threads(number: int | None) -> None:
    good = number is None or (isinstance(number, int) and 1 <= number <= MAX_THREADS)
    refuse("threads", number, good, f"1 to {MAX_THREADS}")


def own_cores() -> int:
    """The share of the cores that a process has among those that train together on this machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # torchrun's
