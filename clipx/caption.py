"""`python -m clipx.caption run=outputs/… images=…`: captions images, one JSON line each."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("caption")
