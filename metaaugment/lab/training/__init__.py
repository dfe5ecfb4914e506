"""Training as people expect it: epochs, checkpoints, a log and progress around a learner."""
