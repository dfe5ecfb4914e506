"""Errors in words: memory that is full, a process that was killed, and of any other its first line."""

import re

import torch

GPU, MACHINE = "the memory of the GPU is full", "the memory of this machine is full"
# What torch and the libraries below it write where they have no exception type for full memory.
SIGNS = {
    "CUDA out of memory": GPU,  # as a reader's thread hands on torch.OutOfMemoryError
    "CUDA error: out of memory": GPU,
    "CUDA driver error: out of memory": GPU,
    "Triton Error [CUDA]: out of memory": GPU,
    "CUBLAS_STATUS_ALLOC_FAILED": GPU,
    "CUDNN_STATUS_ALLOC_FAILED": GPU,
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": GPU,  # cuDNN 9's name for it
    "DefaultCPUAllocator": MACHINE,
    "Cannot allocate memory": MACHINE,
}
# torch's words for a process of its DataLoader that is gone.
LOST = re.compile(r"DataLoader worker \(.*?\) (?:is killed by signal: ([\w ]+)|exited unexpectedly)")


def full_memory(error: BaseException) -> str | None:
    """Which memory an error says is full, or one that it follows from; None where they say something else.

    A CUDA graph that cannot be captured for lack of memory ends in an error that says only that an earlier one spoiled
    the capture.
    """
    if memory := _said_full(error):
        return memory
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return before and full_memory(before)


def _said_full(error: BaseException) -> str | None:
    if isinstance(error, torch.OutOfMemoryError):
        return GPU
    if isinstance(error, MemoryError):
        return MACHINE
    if not isinstance(error, RuntimeError | OSError):  # others may quote what a file says
        return None
    return next((memory for sign, memory in SIGNS.items() if sign in str(error)), None)


def lost_reader(error: BaseException) -> str | None:
    """What happened to a process that reads images, if an error says that one is gone; else None."""
    if isinstance(error, ConnectionError | EOFError):  # it died while handing something over
        return "a process that reads images is gone"
    found = LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    return f"a process that reads images was killed ({found[1]})" if found[1] else "a process that reads images is gone"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch appends a trace of its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
