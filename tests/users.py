"""Which user runs a test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Not root, to whom nothing is forbidden."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)
