"""The trainer: data, learner, loop, evaluation and checkpoints of one run."""
