"""What a seed is used for: each use within an experiment, a search and so on has random numbers of its own.

The constants below are part of every run: if they changed, older runs could not be continued or repeated. A use that
adds a second number, of a fold or an epoch, may share its constant with one that adds none.
"""

import hashlib

# An experiment: initial weights, training and validation batches, all that augments, and looks at what is learned.
INITIAL, ORDER, VALIDATION_ORDER, DRAWS, LOOKS = range(5)
# Searches: initial weights of each member of a population, and its evolution; AutoAugment's controller, the policies
# it proposes, and its child networks; Fast AutoAugment's folds, its proposals, and what the trial of one draws.
MEMBER, EVOLUTION = 10, 11
CONTROLLER, DECISIONS, CHILD = 200, 201, 202
FOLD, PROPOSAL, TRIAL = range(3)
# Adversarial AutoAugment: its controller.
ADVERSARY = 100
# A diagnosis: halves of the validation images, training samples, and which of the samples judge a prediction.
HALVES, SAMPLES, JUDGES = range(3)


def derived_seed(*numbers: int) -> int:
    """One seed from several numbers; other numbers give an unrelated seed."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1
