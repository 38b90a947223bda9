"""`python -m clipx.check run=outputs/… expected=…`: compares a finished run with expected results."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("check")
