"""The program `metaaugment`, one of whose processes gets a signal in the middle of training; for torchrun.

    torchrun … tests/struck.py SIGNAL RANK STEP train …

The signal comes after step STEP, counted over all epochs, and only when torchrun starts the processes the first time.
"""

import os
import signal
import sys

from metaaugment.distributed import rank
from metaaugment.lab import cli
from metaaugment.lab.training.trainer import Trainer
from metaaugment.observation import Observation

number, struck, step = getattr(signal, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
add = Trainer._add


def add_and_strike(trainer: Trainer, seen: Observation) -> None:
    add(trainer, seen)
    first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_time and rank() == struck and trainer.learner.steps == step:
        os.kill(os.getpid(), number)


Trainer._add = add_and_strike
cli.main(sys.argv[4:])
