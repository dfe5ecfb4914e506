"""Before anything is imported: shapes in signatures are checked, and Triton runs in its interpreter without a GPU.

Besides the tests this folder holds what they share:

- `commands`: calls of the program, and what they end in
- `endings`: runs that are killed, and comparing what two runs come to
- `images`: images that have tripped an implementation, and Pillow's
- `trees`: small data sets on disk, in their official layouts
- `processes`: processes that work together, and waiting for what others do
- `users`: who runs a test
- `outside`: all that is read from outside, how each kind of file is spoiled, and who reads it
- `spoiled`: how bytes, JSON, sealed files and images are spoiled
- `harm`: harm that reading a file may do, and who looks out for it
- `fuzz`: a program that spoils files at length, by these three
- `kills`: a program that kills runs at random moments
- `struck`: the program, of which one process gets a signal; for torchrun
"""

import os

import pytest
import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Some virtual machines announce tile instructions (AMX) and do not have them: bf16 on the CPU then kills the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# The networks here are small: two threads take longer than one, and many times so on a busy machine.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Parts behind the public boundary, which gives its own sentence for what a user gets wrong.
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
