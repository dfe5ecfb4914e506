"""Set up before anything is imported: shapes in signatures are checked; without a GPU, Triton runs interpreted.

Besides the tests this folder holds what they share:

- `commands`: calls of the program, and what they end in
- `endings`: runs that are killed, and whether two runs come to the same end
- `images`: images that have tripped an implementation, and Pillow as the judge
- `small`: small images, networks and learners
- `searches`: small searches, and whether one that was stopped at a moment ends as it would have
- `trees`: small data sets on disk, in their official layouts
- `processes`: processes that work together, and waiting for other processes
- `users`: which user runs a test
- `outside`: everything read from outside, how each kind of file is spoiled, and what reads it
- `spoiled`: how bytes, JSON, sealed files and images are spoiled
- `harm`: harm that reading a file may do, and the watch for it
- `fuzz`: a program that reads many spoiled files, with these three
- `kills`: a program that kills runs at random moments
- `struck`: the program with a signal to one of its processes; for torchrun
"""

import os

import pytest
import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Some virtual machines announce tile instructions (AMX) but lack them: bf16 on the CPU then kills the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# The networks here are small: two threads take longer than one, and many times longer on a busy machine.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Only parts behind the public interface, which has its own sentences for a user's mistakes.
CHECKED = ["ops.kernels", "ops.eager", "embedding"]
install_import_hook([f"metaaugment.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
