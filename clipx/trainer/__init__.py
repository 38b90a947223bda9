"""The trainer of one run: data, learner, loop, evaluation and checkpoints."""
