"""Before anything is imported: shapes in signatures are checked, and Triton runs in its interpreter without a GPU."""

import os

import pytest
import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
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
