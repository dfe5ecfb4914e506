"""What a seed is used for: in an experiment, a search or a diagnosis each use has random numbers of its own.

The numbers of the uses are part of every run; a run that is gone on with, or repeated, needs them as they were. Uses
that add a second number, of a fold or an epoch, may share the first with one that adds none.
"""

import hashlib

# An experiment: initial weights, mini-batches, those of validation, all that augments, and looks at what is learned.
INITIAL, ORDER, VALIDATION_ORDER, DRAWS, LOOKS = range(5)
# Searches: initial weights of each member of a population, and how that goes on; AutoAugment's controller, what it
# proposes, and its children; folds of Fast AutoAugment, what is proposed there, and what a proposal draws.
MEMBER, EVOLUTION = 10, 11
CONTROLLER, DECISIONS, CHILD = 200, 201, 202
FOLD, PROPOSAL, TRIAL = range(3)
# Adversarial AutoAugment: its controller.
ADVERSARY = 100
# A diagnosis: halves of the validation images, training samples, and which of these judge a prediction.
HALVES, SAMPLES, JUDGES = range(3)


def derived_seed(*numbers: int) -> int:
    """One seed from several numbers, unrelated for different ones."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1
