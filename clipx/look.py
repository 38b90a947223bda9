"""`python -m clipx.look data=…`: writes an HTML page about a data set as training reads it."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("look")
