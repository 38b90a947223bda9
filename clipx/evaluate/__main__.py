"""`python -m clipx.evaluate run=outputs/…`: evaluates checkpoints of runs, or other weights, by any evaluators."""

from clipx.evaluate import main

if __name__ == "__main__":  # loader processes import this module again
    main()
