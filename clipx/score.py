"""`python -m clipx.score data=… out=…`: writes a table of scores with a row for each training sample."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("score")
