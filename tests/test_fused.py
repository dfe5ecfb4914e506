"""The Triton kernel equals the PyTorch one bit for bit: in Triton's interpreter here, on CUDA where there is one."""

import os
import subprocess
import sys

import pytest
import torch

from metaaugment import OPS, Transformation, apply
from metaaugment.ops import SPACES, eager

from images import CONTENTS, make

fused = pytest.importorskip("metaaugment.ops.fused", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(images: torch.Tensor, t: Transformation, device: str = "cpu") -> Tensors:
    t, images = t.to(device), images.to(device)
    assert t.positions is not None
    return images, torch.stack([t.first, t.second], 1), t.magnitudes, t.signs, t.positions


def both(images: torch.Tensor, t: Transformation, space: str = "metaaugment") -> tuple[torch.Tensor, torch.Tensor]:
    """What Triton and what PyTorch on the CPU make of it."""
    fill = (5, 150, 255)[: images.shape[1]]
    ours = fused.apply_functions(*operands(images, t, DEVICE), SPACES[space], fill)
    return ours.cpu(), eager.apply_functions(*operands(images, t), SPACES[space], fill)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 33, 47), (3, 2, 3), (3, 1, 1)], ids=str)
def test_equals_eager(shape: tuple[int, int, int], space: str) -> None:
    """Each function first and second, beside random others."""
    n = 3 * len(OPS)
    functions = torch.arange(n) % len(OPS)
    t = Transformation.draw(functions, functions[torch.randperm(n)])
    contents = torch.stack([make(content, *shape[1:], shape[0]) for content in CONTENTS])
    images = contents[torch.arange(n) % len(CONTENTS)]
    ours, expected = both(images, t, space)
    different = (ours != expected).flatten(1).any(1).nonzero().flatten().tolist()
    assert not different, [(OPS[t.first[i]].name, OPS[t.second[i]].name) for i in different]


def test_images_of_several_blocks() -> None:
    """Above 1,024 pixels an image has several programs, and sums over it several rounds."""
    functions = torch.arange(len(OPS))
    t = Transformation.draw(functions, functions.flip(0))
    images = make("photo", 80, 75).expand(len(OPS), -1, -1, -1).contiguous()
    ours, expected = both(images, t)
    assert torch.equal(ours, expected)


def test_compiles_for_a_gpu() -> None:
    """The interpreter is more lenient than the compiler: branches must agree on types, and nothing may be fused."""
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from metaaugment.ops import fused

types = dict(images="*u8", ops="*i64", magnitudes="*fp32", signs="*i8", levels="*fp64", positions="*fp32",
             tables="*u8", out="*u8", CHANNELS="constexpr", BLOCK="constexpr")
for kernel in (fused.make_tables, fused.make_pixels):
    for channels in (1, 3):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs={"CHANNELS": channels, "BLOCK": 1024})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        assert "fma.rn.f32" not in compiled.asm["ptx"]
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("size", [(32, 32), (28, 28), (33, 47), (224, 224)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_cuda_equals_cpu(channels: int, size: tuple[int, int], space: str) -> None:
    n = 4096 if size[0] < 100 else 256
    contents = torch.stack([make(content, *size, channels) for content in CONTENTS])
    images = contents[torch.randint(0, len(CONTENTS), (n,))]
    t = Transformation.draw(torch.randint(0, 16, (n,)), torch.randint(0, 16, (n,)))
    assert torch.equal(apply(images.cuda(), t, space, fill=77).cpu(), apply(images, t, space, fill=77))


@pytest.mark.gpu
def test_plain_pytorch_on_cuda_equals_cpu() -> None:
    """What runs where Triton is missing."""
    images = make("photo", 32, 32).expand(512, -1, -1, -1).contiguous()
    t = Transformation.draw(torch.randint(0, 16, (512,)), torch.randint(0, 16, (512,)))
    on_cpu, on_gpu = (
        eager.apply_functions(*operands(images, t, device), SPACES["metaaugment"], (1, 2, 3)).cpu()
        for device in ("cpu", "cuda")
    )
    assert torch.equal(on_gpu, on_cpu)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_never_waits_and_can_be_captured() -> None:
    images = make("photo", 32, 32).expand(128, -1, -1, -1).contiguous()
    drawn = [Transformation.draw(torch.randint(0, 14, (128,)), torch.randint(0, 14, (128,))) for _ in range(3)]
    static, t = images.cuda(), drawn[0].to("cuda")
    apply(static, t)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply(static, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply(static, t)
    for other in drawn[1:]:
        for name in ("first", "second", "magnitudes", "signs"):
            getattr(t, name).copy_(getattr(other, name))
        graph.replay()
        assert torch.equal(out.cpu(), apply(images, other))
