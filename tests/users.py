"""Which user runs a test."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

THIRD_VERSION = 0x20080522  # of the structures below, as <linux/capability.h> has them
IGNORES_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Of(ctypes.Structure):
    """Whose capabilities: by default those of this thread, and of threads that it starts."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Not root, to whom nothing is forbidden.

    As root, what a file's mode forbids its owner is forbidden; the user stays the same. Another user could not read the
    checkout in root's home.
    """
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Of(THIRD_VERSION), (_Capabilities * 2)()  # the second holds capabilities from 32 on

    def call(function: str) -> None:
        if libc[function](ctypes.byref(header), sets):
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    call("capget")
    before = sets[0].effective
    sets[0].effective = before & ~IGNORES_PERMISSIONS
    call("capset")
    try:
        yield
    finally:
        sets[0].effective = before
        call("capset")
