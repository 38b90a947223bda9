"""`python -m clipx.plan [key=value …]`: predicts what a run needs. Trains and allocates nothing."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("plan")
