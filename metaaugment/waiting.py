"""Have threads that wait for each other soon sleep, which OpenMP is told while torch is loaded, and only then.

By default they spin: on two busy cores, two threads trained up to 17 times slower than one. On idle cores nothing is
lost, and no number changes. Where torch is imported before, or the environment says how to wait, nothing is done.
"""

import os

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

if not WAITING.keys() & os.environ.keys():
    os.environ.update(WAITING)
    import torch  # noqa: F401

    for name in WAITING:
        del os.environ[name]
